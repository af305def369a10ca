"""From what a user names to a data set."""

from __future__ import annotations

from pathlib import Path

from conadv.task.data.embedded import digits, synthetic
from conadv.task.data.source import DataSet


def open_data(name: str, path: str | Path | None = None, train_size: int | None = None) -> DataSet:
    """The data set called `name`: "digits", "synthetic", or "path" for what lies at `path`."""
    match name:
        case "digits":
            return digits() if train_size is None else digits(train_size)
        case "synthetic":
            return synthetic()
    raise ValueError(f"data {name!r}: choose digits, synthetic, or path")
