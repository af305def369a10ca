"""CIFAR-10 and CIFAR-100 as people have them: the Python version of their author, as an archive or a folder."""

from __future__ import annotations

import io
import pickle
import tarfile
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conadv.task.data.files import read_file
from conadv.task.data.source import Arrays, Source, naming

_ADVICE = "download it again"
_MAX_ARCHIVE = 2**29  # bytes unpacked; the real ones have 186 MB
# Training files, test file, file of class names; the keys of labels and of names.
_VERSIONS = (
    (tuple(f"data_batch_{number}" for number in range(1, 6)), "test_batch", "batches.meta", b"labels", b"label_names"),
    (("train",), "test", "meta", b"fine_labels", b"fine_label_names"),
)
_ALLOWED = ("numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct", "numpy.ndarray", "numpy.dtype")
_NAMES = {name for train, test, meta, _, _ in _VERSIONS for name in (*train, test, meta)}


def find_cifar(path: Path) -> tuple[Source, Source] | None:
    """Training and test images in this archive or folder (or a folder in it); None if it is not CIFAR."""
    places: list[dict[str, Callable[[], bytes]]] = []
    if path.is_file() and path.name.endswith((".tar", ".tar.gz", ".tgz")):
        with naming(path, _ADVICE):
            places.append(_unpacked(path))
    for folder in (path, *sorted(filter(Path.is_dir, path.iterdir()))) if path.is_dir() else ():
        places.append({name: partial(read_file, folder / name) for name in _NAMES if (folder / name).is_file()})
    for files in places:
        for train, test, meta, label_key, name_key in _VERSIONS:
            if {*train, test, meta} <= files.keys():
                with naming(path / meta, _ADVICE):
                    classes = tuple(name.decode() for name in _unpickled(files[meta]())[name_key])
                tables = []
                for name in (*train, test):
                    with naming(path / name, _ADVICE):
                        tables.append(_table(_unpickled(files[name]()), label_key))
                return _source(tables[:-1], classes), _source(tables[-1:], classes)
    return None


def _unpacked(path: Path) -> dict[str, Callable[[], bytes]]:
    """The files of an archive by the last part of their names; nothing is written to disk."""
    data = read_file(path)
    if data.startswith(b"\x1f\x8b"):
        data = zlib.decompressobj(wbits=31).decompress(data, _MAX_ARCHIVE)
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as archive:
        members = {member.name.rpartition("/")[2]: member for member in archive if member.isreg()}
    return {
        name: partial(bytes, memoryview(data)[one.offset_data : one.offset_data + one.size])
        for name, one in members.items()
        if name in _NAMES
    }


Table = tuple[NDArray[np.uint8], NDArray[np.int64]]
"""Rows of 3,072 bytes, one plane per colour, and their labels."""


def _table(content: Any, label_key: bytes) -> Table:
    rows, labels = content[b"data"].rows, content[label_key]
    # A list that contains itself would send NumPy into an endless recursion.
    if len(labels) != len(rows) or any(type(label) is not int for label in labels):
        raise ValueError("no table of bytes with a label per row")
    return rows, np.array(labels, np.int64)


def _source(tables: list[Table], classes: tuple[str, ...]) -> Source:
    rows = np.concatenate([rows for rows, _ in tables])
    images = np.ascontiguousarray(rows.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
    return Source(Arrays(images), np.concatenate([labels for _, labels in tables]), classes)


class _Array:
    """Stands for a NumPy array of bytes with two axes, and for its type, whose own state says nothing new."""

    rows: NDArray[np.uint8]

    def __setstate__(self, state: object) -> None:
        match state:
            case (int(), (int(height), int(width)), _Array(), bool(by_column), bytes(data)):
                self.rows = np.frombuffer(data, np.uint8).reshape(height, width, order="F" if by_column else "C")


class _Names(dict[bytes | str, Any]):
    """A dictionary by name: to hash a tuple of tuples of tuples could take forever."""

    def __setitem__(self, key: bytes | str, value: object) -> None:
        if not isinstance(key, bytes | str):
            raise ValueError("a key that is not a name")
        super().__setitem__(key, value)


class _Unpickler(pickle._Unpickler):
    """Reads dictionaries, lists, strings, numbers and arrays of bytes, and calls nothing but `_Array`.

    In Python, not C, whose memo grows to any size that a file asks for.
    """

    dispatch = {  # noqa: RUF012
        **{code: run for code, run in pickle._Unpickler.dispatch.items() if code not in b"d\x8f\x90\x91"},  # dict, sets
        pickle.EMPTY_DICT[0]: lambda self: self.append(_Names()),  # type: ignore[attr-defined]
    }

    def find_class(self, module: str, name: str) -> Any:
        if f"{module}.{name}" not in _ALLOWED:
            raise ValueError(f"it would import {module}.{name}")
        return lambda *_: _Array()


def _unpickled(data: bytes) -> Any:
    return _Unpickler(io.BytesIO(data), encoding="bytes").load()
