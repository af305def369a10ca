"""`conadv data inspect`: images per class, sizes, and damaged files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from conadv.printing import one_line
from conadv.task.data.open import find_data, without_damaged
from conadv.task.data.source import naming

_LISTED = 20  # damaged files in the text
_NAME = 60  # characters of a class name in the text


def inspect_data(path: str | Path) -> dict[str, Any]:
    """Decode every image at `path` once; count those of each class, and list what is damaged. Sizes: height, width."""
    with naming(path):
        kind, found = find_data(path)
        data, sizes = without_damaged(found)
    names = data.train.classes
    counts = [np.bincount(source.labels, minlength=len(names)).tolist() for source in (data.train, data.test)]
    return {
        "path": str(path),
        "kind": kind,
        "train": len(data.train),
        "test": len(data.test),
        "smallest": np.min(sizes, axis=0).tolist(),
        "largest": np.max(sizes, axis=0).tolist(),
        "classes": [
            {"class": name, "train": one, "test": other} for name, one, other in zip(names, *counts, strict=True)
        ],
        "damaged": [{"name": problem.name, "reason": problem.reason} for problem in data.skipped],
    }


def as_lines(report: dict[str, Any]) -> list[str]:
    """What `inspect_data` found, for a terminal."""
    classes, damaged = report["classes"], report["damaged"]
    size = " to ".join(
        dict.fromkeys(f"{width} × {height}" for height, width in (report["smallest"], report["largest"]))
    )
    lines = [f"{one_line(report['path'])}: {report['kind']}, {len(classes)} classes, {size} pixels"]
    rows = [(one_line(row["class"])[:_NAME], row["train"], row["test"]) for row in classes]
    width = max(len(name) for name, *_ in (*rows, ("class",)))
    lines.append(f"  {'class':{width}}  {'train':>9}  {'test':>9}")
    lines += [
        f"  {name:{width}}  {one:9,}  {other:9,}"
        for name, one, other in (*rows, ("all", report["train"], report["test"]))
    ]
    lines.append(f"damaged: {len(damaged)}")
    lines += [f"  {problem['name']}: {problem['reason']}" for problem in damaged[:_LISTED]]
    return [*lines, f"  and {len(damaged) - _LISTED} more"] if len(damaged) > _LISTED else lines
