"""NumPy arrays: train and test images and labels as .npy files in a folder, or in one .npz file."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conadv.task.data.source import Arrays, DataSet
from conadv.task.data.splits import class_names

# What the arrays may be called: ours first, then as Keras has it.
_NAMES = {
    "train images": ("train_images", "x_train"),
    "train labels": ("train_labels", "y_train"),
    "test images": ("test_images", "x_test"),
    "test labels": ("test_labels", "y_test"),
}


def open_arrays(path: Path) -> DataSet | None:
    """The data set in this .npz file or folder of .npy files, or None where it has not the four arrays."""
    if path.is_dir():
        # Mapped, so that arrays larger than memory can be used.
        return _open(path, {file.stem for file in path.glob("*.npy")}, lambda name: _load(path / f"{name}.npy"))
    if path.suffix != ".npz":
        return None
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as kept:
            return _open(path, kept.files, kept.__getitem__)
    except (OSError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path}: damaged ({error})") from error


def _load(path: Path) -> NDArray[Any]:
    try:
        array: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, EOFError, ValueError) as error:
        raise ValueError(f"{path}: damaged, or not an array of numbers ({error})") from error
    return array


def _open(path: Path, present: Collection[str], read: Callable[[str], NDArray[Any]]) -> DataSet | None:
    chosen = {what: next((name for name in names if name in present), None) for what, names in _NAMES.items()}
    if None in chosen.values():
        return None
    arrays = {what: read(name) for what, name in chosen.items() if name is not None}
    labels = {part: _flat(arrays[f"{part} labels"], path) for part in ("train", "test")}
    count = int(max(part.max(initial=0) for part in labels.values())) + 1
    classes = class_names(path) or tuple(str(number) for number in range(count))
    train, test = (Arrays(_four_axes(arrays[f"{part} images"]), labels[part], classes) for part in ("train", "test"))
    return DataSet(train, test, path.stem)


def _flat(labels: NDArray[Any], path: Path) -> NDArray[np.integer]:
    """(N,) from (N,) or (N, 1)."""
    if not np.issubdtype(labels.dtype, np.integer):
        raise ValueError(f"{path}: labels are {labels.dtype}; give one whole number an image")
    return labels[:, 0] if labels.ndim == 2 and labels.shape[1] == 1 else labels


def _four_axes(images: NDArray[Any]) -> NDArray[Any]:
    """(N, H, W, C) from (N, H, W) or (N, H, W, C)."""
    return images[..., None] if images.ndim == 3 else images
