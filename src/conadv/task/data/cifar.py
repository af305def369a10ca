"""CIFAR-10 and CIFAR-100 as people have them: the Python version of their author, as an archive or a folder."""

from __future__ import annotations

import io
import pickle
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conadv.task.data.files import read_file
from conadv.task.data.source import Arrays, Found, Labels, Planes, labelled, naming

_ADVICE = "download it again"
# Training files, test file, file of class names; the keys of labels and of names.
_VERSIONS = (
    (tuple(f"data_batch_{number}" for number in range(1, 6)), "test_batch", "batches.meta", b"labels", b"label_names"),
    (("train",), "test", "meta", b"fine_labels", b"fine_label_names"),
)
_NAMES = {name for train, test, meta, _, _ in _VERSIONS for name in (*train, test, meta)}
_MAX_MEMBER = 2**28  # bytes; the largest real one has 155 MB
_ALLOWED = ("numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct", "numpy.ndarray", "numpy.dtype")


def find_cifar(path: Path, channels: int) -> Found | None:
    """Training and test images in this archive or folder (or a folder in it), which keep their channels."""
    if path.is_file() and path.name.endswith((".tar", ".tar.gz", ".tgz")):
        with naming(path, _ADVICE):
            return _read(path, _unpacked(path))
    for folder in (path, *sorted(filter(Path.is_dir, path.iterdir()))) if path.is_dir() else ():
        there = [name for name in _NAMES if (folder / name).is_file()]
        if found := _read(path, {name: read_file(folder / name) for name in there}):
            return found
    return None


def _unpacked(path: Path) -> dict[str, bytes]:
    """The files of an archive by the last part of their names; nothing is written to disk."""
    contents = {}
    with tarfile.open(fileobj=io.BytesIO(read_file(path))) as archive:
        for member in archive:
            name = member.name.rpartition("/")[2]
            if name in _NAMES and (file := archive.extractfile(member)):
                contents[name] = file.read(_MAX_MEMBER)
    return contents


def _read(path: Path, contents: dict[str, bytes]) -> Found | None:
    for train, test, meta, label_key, name_key in _VERSIONS:
        if {*train, test, meta} <= contents.keys():
            with naming(path / meta, _ADVICE):
                classes = tuple(name.decode() for name in _unpickled(contents[meta])[name_key])
            tables = []
            for name in (*train, test):
                with naming(path / name, _ADVICE):
                    tables.append(_table(_unpickled(contents[name]), label_key))
            parts = [tables[:-1], tables[-1:]]
            images = [np.concatenate([one for one, _ in part]).transpose(0, 2, 3, 1) for part in parts]
            labels = [np.concatenate([own for _, own in part]) for part in parts]
            return Found(labelled([Arrays(np.ascontiguousarray(part)) for part in images], labels, classes))
    return None


def _table(content: Any, label_key: bytes) -> tuple[Planes, Labels]:
    """The images of a file, (N, 3, 32, 32), and their labels."""
    rows, labels = content[b"data"].rows, content[label_key]
    if len(labels) != len(rows) or any(type(label) is not int for label in labels):
        raise ValueError("no table of bytes with a label per row")
    return rows.reshape(-1, 3, 32, 32), np.array(labels, np.int64)


class _Array:
    """Stands for a NumPy array of bytes with two axes, and for its type, whose own state says nothing new."""

    rows: NDArray[np.uint8]

    def __setstate__(self, state: object) -> None:
        match state:
            case (int(), (int(height), int(width)), _Array(), bool(by_column), bytes(data)):
                self.rows = np.frombuffer(data, np.uint8).reshape(height, width, order="F" if by_column else "C")


class _Unpickler(pickle._Unpickler):
    """Calls nothing but `_Array`. In Python, not C, whose memo grows to any size that a damaged file asks for."""

    def find_class(self, module: str, name: str) -> Any:
        if f"{module}.{name}" not in _ALLOWED:
            raise ValueError(f"it would import {module}.{name}")
        return lambda *_: _Array()


def _unpickled(data: bytes) -> Any:
    return _Unpickler(io.BytesIO(data), encoding="bytes").load()
