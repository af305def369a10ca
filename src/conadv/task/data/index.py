"""The index of a data set as bytes: rank 0 lists the files, and the other ranks do not have to.

rank 0   lists folders, reads headers and labels ──► index (names, labels, places) ──► bytes
others   bytes ──► the same data set, below their own path; they only read images that are held in memory
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from conadv.task.data import numpy_files
from conadv.task.data.cache import Table, pack_strings, unpack_strings
from conadv.task.data.encoded import Encoded
from conadv.task.data.source import Arrays, DamagedError, DataSet, Source
from conadv.task.data.stored import Parts, Stored

_PLACES = ("file", "offset", "size")
_ARRAYS = {"numpy": numpy_files.read_images}


def pack_index(data: DataSet, root: Path) -> bytes:
    """The index of a data set below `root`; empty for CIFAR and the hub, which each process reads by itself."""
    table: Table = _texts("data", [data.name])
    for part, source in (("train", data.train), ("test", data.test)):
        columns = _columns(source, root)
        if columns is None:
            return b""
        table |= {f"{part} {column}": values for column, values in columns.items()}
    table |= _texts("class", data.train.classes)
    table |= _texts("skipped", [_below(problem.name, root) for problem in data.skipped])
    table |= _texts("reason", [problem.reason for problem in data.skipped])
    packed = io.BytesIO()
    np.savez_compressed(packed, **table)  # type: ignore[arg-type]  # its stub takes the columns for allow_pickle
    return packed.getvalue()


def unpack_index(packed: bytes, root: Path, channels: int) -> DataSet:
    """The data set of an index. Opens files only if their images are held in memory.

    Args:
        packed: What `pack_index` returned.
        root: Where this process finds the data.
        channels: 1 (grey) or 3 (RGB).
    """
    with np.load(io.BytesIO(packed), allow_pickle=False) as columns:
        table: Table = dict(columns)
    classes = tuple(_strings(table, "class"))
    names, reasons = (_strings(table, column) for column in ("skipped", "reason"))
    skipped = tuple(DamagedError(_join(root)(name), reason) for name, reason in zip(names, reasons, strict=True))
    train, test = (_source(table, part, root, classes, channels) for part in ("train", "test"))
    return DataSet(train, test, _strings(table, "data")[0], skipped)


def _columns(source: Source, root: Path) -> Table | None:
    if isinstance(source, Arrays):
        return None if source.origin is None else {"label": source.labels, **_texts("origin", source.origin)}
    assert isinstance(source, Encoded)
    stored = source.read
    if not isinstance(stored, Stored):
        return None
    names = [_below(source.name(index), root) for index in range(len(source))]
    columns: Table = {"label": source.labels, **_texts("name", names)}
    if stored.parts is None:
        return columns
    places = {place: getattr(stored.parts, place) for place in _PLACES}
    return {**columns, **places, **_texts("shard", [_below(file, root) for file in stored.files])}


def _source(table: Table, part: str, root: Path, classes: tuple[str, ...], channels: int) -> Source:
    labels = table[f"{part} label"].astype(np.int64)
    if f"{part} origin" in table:
        kind, name = _strings(table, f"{part} origin")
        return Arrays(_ARRAYS[kind](root, name), labels, classes, (kind, name))
    names = list(map(_join(root), _strings(table, f"{part} name")))
    if f"{part} file" not in table:
        return Encoded(names, labels, classes, Stored(names), channels)
    shards = list(map(_join(root), _strings(table, f"{part} shard")))
    places = Parts(*(table[f"{part} {place}"].astype(np.int64) for place in _PLACES))
    return Encoded(names, labels, classes, Stored(shards, places), channels)


def _texts(column: str, texts: Sequence[str]) -> Table:
    return {column: pack_strings(texts), f"{column} count": np.array(len(texts))}


def _strings(table: Table, column: str) -> list[str]:
    return unpack_strings(table[column], int(table[f"{column} count"]))


def _below(name: str, root: Path) -> str:
    return name.removeprefix(_prefix(root))


def _join(root: Path) -> Callable[[str], str]:
    prefix = _prefix(root)
    return lambda name: prefix + name


def _prefix(root: Path) -> str:
    """The prefix of paths below a folder, as pathlib writes them."""
    return "" if root == Path() else os.path.join(root, "")  # noqa: PTH118  # pathlib drops the last slash
