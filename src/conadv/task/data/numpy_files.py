"""NumPy arrays: train and test images and labels as .npy files in a folder, or in one .npz file."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conadv.task.data.bounds import check_memory
from conadv.task.data.source import Arrays, Source, naming, number_names

_ADVICE = "write it again with numpy.save or numpy.savez"


def find_arrays(path: Path, classes: tuple[str, ...] | None) -> tuple[Source, Source | None] | None:
    """Training and test images in this .npz file or folder of .npy files; None if it has no training images."""
    if path.is_dir():
        files = {file.stem: file for file in path.glob("*.npy")}
        # Memory-mapped: arrays may be larger than memory.
        return _sources({name: _load(files[name]) for name in _chosen(files)}, classes)
    if path.suffix != ".npz":
        return None
    with naming(path, _ADVICE), zipfile.ZipFile(path) as archive:
        sizes = {entry.filename.removesuffix(".npy"): entry.file_size for entry in archive.infolist()}
        chosen = _chosen(sizes)
        advice = "save the arrays as .npy files in a folder, which need not fit into memory"
        check_memory(sum(sizes[name] for name in chosen), str(path), advice)
    with naming(path, _ADVICE), np.load(path, allow_pickle=False) as arrays:
        return _sources({name: arrays[name] for name in chosen}, classes)


def _chosen(present: Mapping[str, object]) -> list[str]:
    """The names of the arrays: ours, or those of Keras."""
    for kind in (
        ("train_images", "train_labels", "test_images", "test_labels"),
        ("x_train", "y_train", "x_test", "y_test"),
    ):
        if set(kind[:2]) <= present.keys():
            return [name for name in kind if name in present]
    return []


def _load(file: Path) -> NDArray[Any]:
    with naming(file, _ADVICE):
        if not file.is_file():
            raise ValueError("not a regular file")
        array: NDArray[Any] = np.load(file, mmap_mode="r", allow_pickle=False)
        return array


def _sources(arrays: dict[str, NDArray[Any]], classes: tuple[str, ...] | None) -> tuple[Source, Source | None] | None:
    values = list(arrays.values())
    if len(values) < 2:
        return None
    # (N, H, W) means grey, and Keras has labels of shape (N, 1).
    images = [Arrays(array[..., None] if array.ndim == 3 else array) for array in values[0::2]]
    labels = [np.array(array[:, 0] if array.shape[1:] == (1,) else array) for array in values[1::2]]
    for part, own in zip(images, labels, strict=True):
        if own.shape != part.images.shape[:1]:
            raise ValueError(f"{len(part.images)} images have labels of shape {own.shape}: give one number per image")
    classes = classes or number_names(*labels)
    train, *test = (Source(part, own, classes) for part, own in zip(images, labels, strict=True))
    return train, test[0] if test else None
