"""`conadv data inspect`: images per class, sizes, and damaged files."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from conadv.task.data.open import find_data
from conadv.task.data.source import DamagedError, naming, one_line

_LISTED = 20
_NAME = 60  # characters


@dataclass(frozen=True)
class Inspection:
    """What was found in a data set."""

    path: str
    kind: str
    counts: dict[str, tuple[int, int]]
    """Usable images of each class, for training and for test."""
    sizes: dict[str, dict[str, dict[str, int]]]
    """By "train" and "test", and by "height" and "width": smallest, median, largest, in pixels."""
    damaged: tuple[DamagedError, ...]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        parts = {}
        for number, part in enumerate(("train", "test")):
            by_class = {name: counts[number] for name, counts in self.counts.items()}
            parts[part] = {"images": sum(by_class.values()), "by_class": by_class, **self.sizes[part]}
        damaged = [{"name": problem.name, "reason": problem.reason} for problem in self.damaged]
        return {"path": self.path, "kind": self.kind, **parts, "damaged": damaged}

    def lines(self) -> list[str]:
        """For a terminal; the whole list of what is damaged is in `as_dict`."""
        lines = [f"{one_line(self.path)}: {self.kind}"]
        for number, part in enumerate(("train", "test")):
            images, side = sum(counts[number] for counts in self.counts.values()), self.sizes[part]
            ranges = " × ".join(_range(side[name]) for name in ("width", "height"))
            lines.append(f"  {part:5}  {images:,} images in {len(self.counts)} classes, {ranges} pixels")
        names = [one_line(name)[:_NAME] for name in self.counts]
        width = max(len(name) for name in ("class", *names))
        lines.append(f"  {'class':{width}}  {'train':>9}  {'test':>9}")
        for name, (train, test) in zip(names, self.counts.values(), strict=True):
            lines.append(f"  {name:{width}}  {train:9,}  {test:9,}")
        lines.append(f"damaged: {len(self.damaged)}")
        lines += [f"  {problem}" for problem in self.damaged[:_LISTED]]
        return [*lines, f"  and {len(self.damaged) - _LISTED} more"] if len(self.damaged) > _LISTED else lines


def inspect_data(path: str | Path, channels: int = 3) -> Inspection:
    """Decode every image at `path` once."""
    with naming(path):
        found = find_data(path, channels)
        data, sizes = found.healthy()
    uses = Counter(data.train.classes)  # several classes may have the same name
    classes = [name if uses[name] == 1 else f"{name} ({number})" for number, name in enumerate(data.train.classes)]
    train, test = (np.bincount(part.labels, minlength=len(classes)).tolist() for part in (data.train, data.test))
    counts = dict(zip(classes, zip(train, test, strict=True), strict=True))
    return Inspection(str(path), found.kind, counts, {part: _spread(sizes[part]) for part in sizes}, data.skipped)


def _spread(sizes: np.ndarray[Any, np.dtype[np.int64]]) -> dict[str, dict[str, int]]:
    sides = zip(("height", "width"), sizes.T, strict=True)
    return {
        name: {"smallest": int(side.min()), "median": int(np.median(side)), "largest": int(side.max())}
        for name, side in sides
    }


def _range(side: dict[str, int]) -> str:
    if side["smallest"] == side["largest"]:
        return str(side["largest"])
    return f"{side['smallest']} to {side['largest']} (median {side['median']})"
