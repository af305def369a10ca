"""Data sets of the Hugging Face hub, or of the `datasets` library on disk, as hf:NAME_OR_PATH; memory-mapped."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from conadv.task.data.decode import open_picture
from conadv.task.data.files import read_file
from conadv.task.data.source import DamagedError, Picture, Source, naming, number_names

PREFIX = "hf:"
_TEST_SPLITS = ("validation", "val", "valid", "test")
_IMAGES = ("image", "img")
_LABELS = ("label", "labels", "fine_label", "cls", "class")


@dataclass(frozen=True)
class Rows:
    """Pictures in the rows of a split, each read when it is needed."""

    split: str
    rows: Any
    column: str
    channels: int

    def name(self, row: int) -> str:
        return f"{self.split} row {row}"

    def picture(self, row: int) -> Picture:
        cell = self.rows[row][self.column]
        if cell is None or (cell["bytes"] is None and cell["path"] is None):
            raise DamagedError(self.name(row), "the row has no image")
        with naming(self.name(row)):
            return open_picture(cell["bytes"] or read_file(cell["path"]), self.channels, self.name(row))


def open_hub(reference: str, channels: int) -> tuple[Source, Source | None, str]:
    """Training and test images, and a digest of their state.

    Args:
        reference: hf:NAME for a data set of the hub, hf:PATH for a folder of Parquet files or of `save_to_disk`.
        channels: 1 (grey) or 3 (RGB).
    """
    try:
        import datasets
    except ImportError as error:
        raise ValueError("it needs the datasets library: pip install 'conadv[hf]'") from error
    datasets.disable_progress_bars()
    with naming(reference, "check the name or the files"):
        path = reference.removeprefix(PREFIX)
        saved = (Path(path) / "dataset_dict.json").is_file()
        splits = datasets.load_from_disk(path) if saved else datasets.load_dataset(path)
        if "train" not in splits:
            raise ValueError(f"its splits are {', '.join(splits)}; it needs one called train")
        names = ["train", *[name for name in _TEST_SPLITS if name in splits][:1]]
        features = splits["train"].features
        image = _column(features, datasets.Image, _IMAGES)
        label = _column(features, datasets.ClassLabel, _LABELS)
        labels = [np.array([-1 if one is None else one for one in splits[name][label]], np.int64) for name in names]
        classes = tuple(features[label].names) if hasattr(features[label], "names") else number_names(*labels)
        encoded = [
            splits[name].select_columns([image]).cast_column(image, datasets.Image(decode=False)) for name in names
        ]
        train, *test = (
            Source(Rows(f"{reference} {name}", rows, image, channels), own, classes)
            for name, rows, own in zip(names, encoded, labels, strict=True)
        )
    return train, test[0] if test else None, "-".join(splits[name]._fingerprint for name in names)


def _column(features: Any, kind: type, names: tuple[str, ...]) -> str:
    """The first column of this kind, or else with one of these names."""
    for name in (*(name for name in features if isinstance(features[name], kind)), *names):
        if name in features:
            return str(name)
    raise ValueError(f"its columns are {', '.join(features)}; it needs an image and a label")
