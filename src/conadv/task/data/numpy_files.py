"""NumPy arrays: train and test images and labels as .npy files in a folder, or in one .npz file."""

from __future__ import annotations

import zipfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conadv.task.data.bounds import check_memory
from conadv.task.data.source import Arrays, Source, naming, number_names

_OURS = ("train_images", "train_labels", "test_images", "test_labels")
_KERAS = ("x_train", "y_train", "x_test", "y_test")
_ADVICE = "write it again with numpy.save or numpy.savez"


def find_arrays(path: Path, classes: tuple[str, ...] | None) -> tuple[Source, Source | None] | None:
    """Training and test images in this .npz file or folder of .npy files; None if it has no training images."""
    arrays: list[NDArray[Any]] = []
    if path.is_dir():
        for name in _chosen([file.stem for file in path.glob("*.npy")]):
            with naming(path / f"{name}.npy", _ADVICE):
                if not (path / f"{name}.npy").is_file():
                    raise ValueError("not a regular file")
                # Memory-mapped: arrays may be larger than memory.
                arrays.append(np.load(path / f"{name}.npy", mmap_mode="r", allow_pickle=False))
    elif path.suffix == ".npz":
        with naming(path, _ADVICE), zipfile.ZipFile(path) as archive:
            sizes = {entry.filename.removesuffix(".npy"): entry.file_size for entry in archive.infolist()}
        advice = "save the arrays as .npy files in a folder, which need not fit into memory"
        check_memory(sum(sizes[name] for name in _chosen(sizes)), str(path), advice)
        with naming(path, _ADVICE), np.load(path, allow_pickle=False) as stored:
            arrays = [stored[name] for name in _chosen(sizes)]
    if not arrays:
        return None
    # (N, H, W) means grey, and Keras has labels of shape (N, 1).
    images = [array[..., None] if array.ndim == 3 else array for array in arrays[0::2]]
    labels = [np.array(array[:, 0] if array.shape[1:] == (1,) else array) for array in arrays[1::2]]
    for part, own in zip(images, labels, strict=True):
        if own.shape != part.shape[:1]:
            raise ValueError(f"{len(part)} images have labels of shape {own.shape}: give one number per image")
    names = classes or number_names(*labels)
    train, *test = (Source(Arrays(part), own, names) for part, own in zip(images, labels, strict=True))
    return train, test[0] if test else None


def _chosen(present: Collection[str]) -> list[str]:
    """The names of the arrays that are there, if they include those to train on."""
    for names in (_OURS, _KERAS):
        if set(names[:2]) <= set(present):
            return [name for name in names if name in present]
    return []
