"""Data sets of the Hugging Face hub, or of the `datasets` library on disk, as hf:NAME_OR_PATH; memory-mapped."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conadv.task.data.encoded import Listing
from conadv.task.data.regular import named_damage

PREFIX = "hf:"
_TEST_SPLITS = ("validation", "val", "valid", "test")
_LABELS = ("label", "labels", "fine_label", "cls", "class")


class Rows:
    """The encoded images of a split by index; a row is read when it is needed."""

    def __init__(self, rows: Any, column: str, chosen: NDArray[np.int64]) -> None:
        self._rows, self._column, self._chosen = rows, column, chosen

    def __call__(self, index: int) -> bytes:
        cell = self._rows[int(self._chosen[index])][self._column]
        if cell is None or (cell["bytes"] is None and cell["path"] is None):
            raise OSError("the row has no image")
        data: bytes = Path(cell["path"]).read_bytes() if cell["bytes"] is None else cell["bytes"]
        return data

    def take(self, indices: Sequence[int]) -> Rows:
        """These rows only, in this order."""
        return Rows(self._rows, self._column, self._chosen[np.asarray(indices, np.int64)])


def open_hub(reference: str) -> tuple[Listing, Listing, tuple[str, ...] | None, str]:
    """Training and test images, the names of the classes if the data set has them, and a digest of its contents.

    Args:
        reference: hf:NAME for a data set of the hub, hf:PATH for a folder of Parquet files or of `save_to_disk`.
    """
    try:
        import datasets
    except ImportError as error:
        raise ValueError(f"{reference} needs the datasets library: pip install 'conadv[hf]'") from error
    name = reference.removeprefix(PREFIX)
    datasets.disable_progress_bars()
    with named_damage(reference, "check the name or the files"):
        saved = (Path(name) / "dataset_dict.json").is_file()
        splits = datasets.load_from_disk(name) if saved else datasets.load_dataset(name)
        test = next((split for split in _TEST_SPLITS if split in splits), None)
        if "train" not in splits or test is None:
            raise ValueError(f"its splits are {', '.join(splits)}; it needs train, and validation or test")
        parts = [_listing(f"{reference} {split}", splits[split], datasets) for split in ("train", test)]
        digest = "-".join(splits[split]._fingerprint for split in ("train", test))
    return parts[0][0], parts[1][0], parts[0][1], digest


def _listing(name: str, rows: Any, datasets: Any) -> tuple[Listing, tuple[str, ...] | None]:
    features = rows.features
    image = next((column for column, kind in features.items() if isinstance(kind, datasets.Image)), None)
    image = image or next((column for column in ("image", "img") if column in features), None)
    label = next((column for column, kind in features.items() if isinstance(kind, datasets.ClassLabel)), None)
    label = label or next((column for column in _LABELS if column in features), None)
    if image is None or label is None:
        raise ValueError(f"its columns are {', '.join(features)}; it needs an image and a label")
    labels = np.array([-1 if value is None else value for value in rows[label]], np.int64)
    encoded = rows.select_columns([image]).cast_column(image, datasets.Image(decode=False))
    classes = tuple(features[label].names) if isinstance(features[label], datasets.ClassLabel) else None
    names = [f"{name} row {row}" for row in range(len(labels))]
    return Listing(names, labels, Rows(encoded, image, np.arange(len(labels)))), classes
