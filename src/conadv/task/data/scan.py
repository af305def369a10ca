"""Decode every image once, to find sizes and damage."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from conadv.task.data.ahead import ordered_map
from conadv.task.data.cache import Table, cached, pack_strings, unpack_strings
from conadv.task.data.encoded import Encoded
from conadv.task.data.source import Arrays, DamagedError, Source


@dataclass(frozen=True)
class Scan:
    """What decoding all images of a source showed."""

    heights: NDArray[np.int64]
    """In pixels, one per image; 0 if it is damaged."""
    widths: NDArray[np.int64]
    damaged: dict[int, str]
    """Reasons by index."""


def scan(source: Source, stamp: str, workers: int) -> Scan:
    """Scan a source, or return the cached scan for this state of its files."""
    if isinstance(source, Arrays):
        height, width = source.images.shape[1:3]
        return Scan(np.full(len(source), height), np.full(len(source), width), {})
    assert isinstance(source, Encoded)
    table = cached("scan", stamp, lambda: _decode_all(source, workers))
    indices = table["damaged"].tolist()
    reasons = unpack_strings(table["reason"], len(indices))
    return Scan(
        table["height"].astype(np.int64), table["width"].astype(np.int64), dict(zip(indices, reasons, strict=True))
    )


def _decode_all(source: Encoded, workers: int) -> Table:
    outcomes = list(ordered_map(lambda index: _decode(source, index), range(len(source)), workers, 64 * workers))
    damaged = {index: reason for index, (_, _, reason) in enumerate(outcomes) if reason is not None}
    return {
        "height": np.array([height for height, _, _ in outcomes], np.int64),
        "width": np.array([width for _, width, _ in outcomes], np.int64),
        "damaged": np.array(list(damaged), np.int64),
        "reason": pack_strings(damaged.values()),
    }


def _decode(source: Encoded, index: int) -> tuple[int, int, str | None]:
    try:
        height, width, _ = source.image(index).shape
    except DamagedError as error:
        return 0, 0, error.reason
    return height, width, None
