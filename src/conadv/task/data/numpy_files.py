"""NumPy arrays: train and test images and labels as .npy files in a folder, or in one .npz file.

Headers are parsed here and not by NumPy, so that every number is checked before it is used. Nothing is unpickled.
"""

from __future__ import annotations

import ast
import math
import os
import re
import zipfile
from collections.abc import Callable, Collection
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import IO, Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from conadv.task.data.bounds import DEFLATE, MAX_ARRAY, check_memory
from conadv.task.data.regular import Readable, named_damage, open_regular, read_exactly
from conadv.task.data.source import Arrays, DataSet, number_names
from conadv.task.data.splits import class_names

# Names of the arrays: ours first, then Keras's.
_NAMES = {
    "train images": ("train_images", "x_train"),
    "train labels": ("train_labels", "y_train"),
    "test images": ("test_images", "x_test"),
    "test labels": ("test_labels", "y_test"),
}
_ADVICE = "write it again with numpy.save or numpy.savez"
_MAX_HEADER = 4096  # bytes; NumPy writes 118 for an array of numbers
_COMPRESSIONS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)


def open_arrays(path: Path) -> DataSet | None:
    """The data set in this .npz file or folder of .npy files, or None if one of the four arrays is missing."""
    if path.is_dir():
        # Memory-mapped: arrays may be larger than memory.
        return _open(path, {file.stem for file in path.glob("*.npy")}, lambda name: _map(path / f"{name}.npy"))
    if path.suffix != ".npz":
        return None
    with named_damage(path, _ADVICE), open_regular(path) as file, zipfile.ZipFile(file) as archive:
        present = {name.removesuffix(".npy") for name in archive.namelist() if name.endswith(".npy")}
        return _open(path, present, lambda name: _unzip(archive, f"{name}.npy"))


def read_images(path: Path, name: str) -> NDArray[Any]:
    """The images in one array of this .npz file or folder of .npy files."""
    if path.suffix != ".npz" or path.is_dir():
        return _four_axes(_map(path / f"{name}.npy"))
    with named_damage(path, _ADVICE), open_regular(path) as file, zipfile.ZipFile(file) as archive:
        return _four_axes(_unzip(archive, f"{name}.npy"))


@dataclass(frozen=True)
class _Header:
    """The header of a .npy file."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    order: Literal["C", "F"]
    length: int
    """Bytes before the data."""

    @property
    def size(self) -> int:
        """Bytes of the data."""
        return math.prod(self.shape) * self.dtype.itemsize


def _read_header(file: FileIO | IO[bytes]) -> _Header:
    """The header of format 1 or 2, which all arrays of numbers have."""
    start = file.read(8)
    if start[:6] != b"\x93NUMPY" or start[6:] not in (b"\1\0", b"\2\0"):
        raise ValueError("damaged: no NumPy header")
    width = 2 if start[6] == 1 else 4
    length = int.from_bytes(file.read(width), "little")
    if length > _MAX_HEADER:
        raise ValueError(f"damaged: a header of {length:,} bytes")
    text = file.read(length).decode("latin1")
    try:
        fields = ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError("damaged: its header cannot be parsed") from error
    match fields:
        case {"descr": str(code), "fortran_order": bool(by_column), "shape": tuple(shape), **rest} if not rest:
            return _Header(_checked_shape(shape), _number_type(code), "F" if by_column else "C", 8 + width + length)
    raise ValueError("damaged, or not an array of numbers")


def _checked_shape(shape: tuple[object, ...]) -> tuple[int, ...]:
    sides = tuple(side for side in shape if type(side) is int and 0 <= side <= MAX_ARRAY)
    if len(sides) != len(shape) or len(shape) > 4:
        raise ValueError("damaged: not the shape of images or labels")
    return sides


def _number_type(code: str) -> np.dtype[Any]:
    if code.lstrip("|<>=") == "O":
        raise ValueError("an array of pickled Python objects, which we never load; save an array of numbers")
    if not re.fullmatch(r"[|<>=]?[biuf][1248]|[|<>=]?f16", code):
        raise ValueError(f"elements of type {code[:20]!r} are not numbers")
    return np.dtype(code)


def _map(path: Path) -> NDArray[Any]:
    with named_damage(path, _ADVICE), open_regular(path) as file:
        header = _read_header(file)
        if header.size > os.fstat(file.fileno()).st_size - header.length:
            raise ValueError(f"damaged: fewer bytes than its header's {header.size:,}")
        if header.size == 0:
            raise ValueError(f"an empty array of shape {header.shape}")
        mapped: NDArray[Any] = np.memmap(path, header.dtype, "r", header.length, header.shape, header.order)
        return mapped


def _unzip(archive: zipfile.ZipFile, name: str) -> NDArray[Any]:
    entry = archive.getinfo(name)
    if entry.flag_bits & 1 or entry.compress_type not in _COMPRESSIONS:
        raise ValueError(f"damaged: {name} is encrypted, or compressed in a way that NumPy does not use")
    if entry.file_size > DEFLATE * entry.compress_size + _MAX_HEADER:
        raise ValueError(f"damaged: {name} claims a size that its compressed bytes cannot have")
    with archive.open(entry) as file:
        header = _read_header(file)
        if header.length + header.size != entry.file_size or header.size == 0:
            raise ValueError(f"damaged: {name} does not have the {header.size:,} bytes of its header")
        check_memory(header.size, name, "save the arrays as .npy files in a folder, which need not fit into memory")
        data = read_exactly(cast(Readable, file), header.size)
        file.read(1)  # at the end of the entry its checksum is compared
    return data.view(header.dtype).reshape(header.shape, order=header.order)


def _open(path: Path, present: Collection[str], read: Callable[[str], NDArray[Any]]) -> DataSet | None:
    chosen = {what: next((name for name in names if name in present), None) for what, names in _NAMES.items()}
    if None in chosen.values():
        return None
    arrays = {what: read(name) for what, name in chosen.items() if name is not None}
    with named_damage(path, "correct the arrays"):
        labels = {part: _flat(arrays[f"{part} labels"]) for part in ("train", "test")}
        count = int(max(part.max(initial=0) for part in labels.values()))
        classes = class_names(path) or number_names(count)
        train, test = (
            Arrays(
                _four_axes(arrays[f"{part} images"]), labels[part], classes, ("numpy", str(chosen[f"{part} images"]))
            )
            for part in ("train", "test")
        )
        return DataSet(train, test, path.stem)


def _flat(labels: NDArray[Any]) -> NDArray[np.integer]:
    """(N,) from (N,) or (N, 1), in memory."""
    if labels.dtype.kind not in "iu":
        raise ValueError(f"labels are {labels.dtype}; give one whole number per image")
    check_memory(8 * labels.size, "labels", "use fewer images")
    return np.array(labels[:, 0] if labels.ndim == 2 and labels.shape[1] == 1 else labels)


def _four_axes(images: NDArray[Any]) -> NDArray[Any]:
    """(N, H, W, C) from (N, H, W) or (N, H, W, C)."""
    return images[..., None] if images.ndim == 3 else images
