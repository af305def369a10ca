"""`conadv data inspect`: images per class, sizes, damaged files, and a sheet of pictures."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from conadv.atomic import replacing
from conadv.task.data.open import find_data
from conadv.task.data.regular import plain_errors
from conadv.task.data.scan import Scan
from conadv.task.data.source import DamagedError, DataSet, Source, one_line

_TILE, _LABEL, _ROWS, _COLUMNS = 96, 14, 12, 8  # pixels, pixels, classes, images of each
_LISTED = 20
_NAME = 60  # characters


@dataclass(frozen=True)
class Part:
    """The training or the test images."""

    counts: dict[str, int]
    """Usable images by name of the class."""
    heights: tuple[int, int, int]
    """Smallest, median, largest, in pixels."""
    widths: tuple[int, int, int]


@dataclass(frozen=True)
class Inspection:
    """What was found."""

    path: str
    kind: str
    train: Part
    test: Part
    damaged: tuple[DamagedError, ...]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        parts = {
            name: {"images": sum(part.counts.values()), "by_class": part.counts, **_sizes(part)}
            for name, part in (("train", self.train), ("test", self.test))
        }
        damaged = [{"name": problem.name, "reason": problem.reason} for problem in self.damaged]
        return {"path": self.path, "kind": self.kind, **parts, "damaged": damaged}

    def lines(self) -> list[str]:
        """For a terminal; the whole list of what is damaged is in `as_dict`."""
        names = [_short(name) for name in self.train.counts]
        width = max(len(name) for name in ("class", *names))
        table = [f"  {'class':{width}}  {'train':>9}  {'test':>9}"]
        table += [
            f"  {name:{width}}  {train:9,}  {test:9,}"
            for name, train, test in zip(names, self.train.counts.values(), self.test.counts.values(), strict=True)
        ]
        problems = [f"  {problem}" for problem in self.damaged[:_LISTED]]
        if len(self.damaged) > _LISTED:
            problems.append(f"  and {len(self.damaged) - _LISTED} more")
        return [
            f"{self.path}: {self.kind}",
            *(f"  {name:5}  {_sentence(part)}" for name, part in (("train", self.train), ("test", self.test))),
            *table,
            f"damaged: {len(self.damaged)}",
            *problems,
        ]


def inspect_data(path: str | Path, sheet: str | Path | None = None, channels: int = 3) -> Inspection:
    """Decode every image at `path` once; if `sheet` is given, write some of them to that PNG file."""
    with plain_errors(path):
        found = find_data(Path(path), channels)
        scans = found.scans()
        data = found.healthy()
    if sheet is not None:
        _write_sheet(data, Path(sheet))
    return Inspection(
        str(path), found.kind, _part(data.train, scans["train"]), _part(data.test, scans["test"]), data.skipped
    )


def _part(source: Source, scan: Scan) -> Part:
    counts = np.bincount(source.labels, minlength=len(source.classes)).tolist()
    return Part(dict(zip(_distinct(source.classes), counts, strict=True)), _range(scan.heights), _range(scan.widths))


def _distinct(classes: tuple[str, ...]) -> list[str]:
    """Class names, followed by the class number if several classes share a name."""
    uses = Counter(classes)
    return [name if uses[name] == 1 else f"{name} ({number})" for number, name in enumerate(classes)]


def _short(name: str) -> str:
    """A class name as one short line, whatever a file put into it."""
    line = one_line(name)
    return line if len(line) <= _NAME else f"{line[: _NAME - 1]}…"


def _range(sides: np.ndarray[Any, np.dtype[np.int64]]) -> tuple[int, int, int]:
    known = sides[sides > 0]
    return int(known.min()), int(np.median(known)), int(known.max())


def _sizes(part: Part) -> dict[str, dict[str, int]]:
    names = ("smallest", "median", "largest")
    return {
        side: dict(zip(names, values, strict=True))
        for side, values in (("height", part.heights), ("width", part.widths))
    }


def _sentence(part: Part) -> str:
    (low, middle, high), (narrow, usual, wide) = part.heights, part.widths
    size = f"{_span(narrow, wide)} × {_span(low, high)}"
    if (low, narrow) != (high, wide):
        size += f" (median {usual} × {middle})"
    return f"{sum(part.counts.values()):,} images in {len(part.counts)} classes, {size} pixels"


def _span(least: int, most: int) -> str:
    return str(most) if least == most else f"{least} to {most}"


def _write_sheet(data: DataSet, path: Path) -> None:
    """Draw one row per class, with its name above; if there are many classes, evenly spaced ones."""
    source = data.train
    rows = np.unique(np.linspace(0, len(source.classes) - 1, _ROWS).round().astype(int)).tolist()
    canvas = Image.new("RGB", (_COLUMNS * _TILE, len(rows) * (_TILE + _LABEL)), "white")
    draw = ImageDraw.Draw(canvas)
    for row, label in enumerate(rows):
        top = row * (_TILE + _LABEL)
        draw.text((2, top), _short(source.classes[label]).encode("ascii", "replace"), fill="black")
        members = np.flatnonzero(source.labels == label)[:_COLUMNS].tolist()
        for column, index in enumerate(members):
            canvas.paste(_tile(source, index), (column * _TILE, top + _LABEL))
    with replacing(path) as file:
        canvas.save(file, "PNG")


def _tile(source: Source, index: int) -> Image.Image:
    """The whole image as a tile: small images are enlarged with visible pixels, large ones smoothly reduced."""
    pixels = source.image(index)
    image = Image.fromarray(pixels[..., 0] if pixels.shape[2] != 3 else pixels).convert("RGB")
    scale = (_TILE - 2) / max(image.size)
    filter_ = Image.Resampling.NEAREST if scale > 1 else Image.Resampling.BILINEAR
    return image.resize((max(1, round(image.width * scale)), max(1, round(image.height * scale))), filter_)
