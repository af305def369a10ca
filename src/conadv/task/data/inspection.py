"""`conadv data inspect`: images per class, sizes, and damaged files."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conadv.task.data.open import find_data, without_damaged
from conadv.task.data.source import naming, one_line

_LISTED = 20  # damaged files in the text
_NAME = 60  # characters of a class name in the text


def inspect_data(path: str | Path, channels: int = 3) -> dict[str, Any]:
    """Decode every image at `path` once.

    Returns:
        For "train" and "test": the number of images, those of each class, and their sizes; and all that is damaged.
    """
    with naming(path):
        kind, found = find_data(path, channels)
        data, sizes = without_damaged(found)
    uses = Counter(data.train.classes)  # several classes may have the same name
    classes = [name if uses[name] == 1 else f"{name} ({number})" for number, name in enumerate(data.train.classes)]
    report: dict[str, Any] = {"path": str(path), "kind": kind}
    for part, source in (("train", data.train), ("test", data.test)):
        by_class = np.bincount(source.labels, minlength=len(classes)).tolist()
        height, width = (_spread(side) for side in sizes[part].T)
        by_name = dict(zip(classes, by_class, strict=True))
        report[part] = {"images": len(source), "by_class": by_name, "height": height, "width": width}
    damaged = [{"name": problem.name, "reason": problem.reason} for problem in data.skipped]
    return {**report, "damaged": damaged}


def as_lines(report: dict[str, Any]) -> list[str]:
    """What `inspect_data` found, for a terminal."""
    train, test = report["train"]["by_class"], report["test"]["by_class"]
    lines = [f"{one_line(report['path'])}: {report['kind']}"]
    for part in ("train", "test"):
        size = f"{_range(report[part]['width'])} × {_range(report[part]['height'])}"
        lines.append(f"  {part:5}  {report[part]['images']:,} images in {len(train)} classes, {size} pixels")
    names = [one_line(name)[:_NAME] for name in train]
    width = max(len(name) for name in ("class", *names))
    lines.append(f"  {'class':{width}}  {'train':>9}  {'test':>9}")
    for name, one, other in zip(names, train.values(), test.values(), strict=True):
        lines.append(f"  {name:{width}}  {one:9,}  {other:9,}")
    damaged = report["damaged"]
    lines.append(f"damaged: {len(damaged)}")
    lines += [f"  {problem['name']}: {problem['reason']}" for problem in damaged[:_LISTED]]
    return [*lines, f"  and {len(damaged) - _LISTED} more"] if len(damaged) > _LISTED else lines


def _spread(side: NDArray[np.int64]) -> dict[str, int]:
    return {"smallest": int(side.min()), "median": int(np.median(side)), "largest": int(side.max())}


def _range(side: dict[str, int]) -> str:
    if side["smallest"] == side["largest"]:
        return str(side["largest"])
    return f"{side['smallest']} to {side['largest']} (median {side['median']})"
