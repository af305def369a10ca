"""CIFAR-10 and CIFAR-100 as distributed by their author: binary or Python version, as archive or folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conadv.task.data.gunzip import Gunzip
from conadv.task.data.pickled import ByteTable, read_pickle
from conadv.task.data.regular import named_damage, open_regular, read_exactly, read_whole
from conadv.task.data.source import Arrays, DataSet, Pixels
from conadv.task.data.tar import BLOCK, looks_like_tar, tar_members

_PIXELS = 3 * 32 * 32
_MAX_FILE = 2**28  # bytes; the largest file of the real ones has 155 MB
_MAX_ARCHIVE = 2**29  # bytes unpacked; the real ones have 186 MB

Part = tuple[Pixels, NDArray[np.int64]]


@dataclass(frozen=True)
class _Version:
    """The files of one of the four distributions."""

    name: str
    train: tuple[str, ...]
    test: tuple[str, ...]
    names: str
    """The file with the names of the classes."""
    parse: Callable[[bytes], Part]
    parse_names: Callable[[bytes], tuple[str, ...]]


def find_cifar(path: Path) -> DataSet | None:
    """The data set in this archive or folder (or a folder in it), or None if it is not CIFAR."""
    if path.is_file():
        return _from_archive(path)
    for folder in (path, *sorted(entry for entry in path.iterdir() if entry.is_dir())):
        for version in _VERSIONS:
            names = (*version.train, *version.test, version.names)
            if all((folder / name).is_file() for name in names):
                with named_damage(path, "download it again"):
                    files = {name: read_whole(folder / name, _MAX_FILE) for name in names}
                return _assemble(version, files, path)
    return None


def _from_archive(path: Path) -> DataSet | None:
    """Read an archive without extracting it; only the last part of a member's name matters."""
    wanted = {name for version in _VERSIONS for name in (*version.train, *version.test, version.names)}
    files: dict[str, bytes] = {}
    with named_damage(f"{path}: damaged archive", "download it again"), open_regular(path) as stored:
        archive = _unpacked(stored)
        if not looks_like_tar(first := archive.read(BLOCK)):
            return None
        for member in tar_members(archive, _MAX_ARCHIVE, first):
            name = member.name.rpartition("/")[2]
            if name in wanted and member.size <= _MAX_FILE:
                archive.seek(member.offset)
                files[name] = read_exactly(archive, member.size).tobytes()
    for version in _VERSIONS:
        if {*version.train, *version.test, version.names} <= files.keys():
            return _assemble(version, files, path)
    return None


def _unpacked(stored: FileIO) -> Gunzip | FileIO:
    start = stored.read(2)
    stored.seek(0)
    return Gunzip(stored) if start == b"\x1f\x8b" else stored


def _assemble(version: _Version, files: Mapping[str, bytes], path: Path) -> DataSet:
    def read(name: str, parse: Callable[[bytes], Any]) -> Any:
        with named_damage(f"{path}: {name} is damaged", "download it again"):
            return parse(files[name])

    classes = read(version.names, version.parse_names)

    def part(names: tuple[str, ...]) -> Arrays:
        parts: list[Part] = [read(name, version.parse) for name in names]
        images, labels = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        return Arrays(images, labels, classes)

    with named_damage(path, "download it again"):
        return DataSet(part(version.train), part(version.test), version.name)


def _images(rows: NDArray[np.uint8]) -> Pixels:
    """(N, 3072), one plane per colour, to (N, 32, 32, 3)."""
    return np.ascontiguousarray(rows.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))


def _binary(label_bytes: int) -> Callable[[bytes], Part]:
    """A parser of records: label bytes, of which the last is the class, then pixels."""

    def parse(data: bytes) -> Part:
        rows = np.frombuffer(data, np.uint8).reshape(-1, label_bytes + _PIXELS)
        return _images(rows[:, label_bytes:]), rows[:, label_bytes - 1].astype(np.int64)

    return parse


def _pickled(label_key: bytes) -> Callable[[bytes], Part]:
    def parse(data: bytes) -> Part:
        match read_pickle(data):
            case {b"data": ByteTable() as table, **others} if _all_of(others.get(label_key), int):
                return _images(table.array), np.array(others[label_key], np.int64)
        raise ValueError("no table of bytes with a label per row")

    return parse


def _pickled_names(key: bytes) -> Callable[[bytes], tuple[str, ...]]:
    def parse(data: bytes) -> tuple[str, ...]:
        names = read_pickle(data)[key]
        if not _all_of(names, bytes):
            raise ValueError("no list of names")
        return tuple(name.decode() for name in names)

    return parse


def _all_of(items: object, kind: type) -> bool:
    """Whether this is a flat list. (NumPy would recurse without end into a list that contains itself.)"""
    return isinstance(items, list) and all(type(item) is kind for item in items)


def _lines(data: bytes) -> tuple[str, ...]:
    return tuple(line for line in data.decode().splitlines() if line)


_BATCHES = tuple(f"data_batch_{number}" for number in range(1, 6))
_VERSIONS = (
    _Version(
        "cifar10",
        tuple(f"{name}.bin" for name in _BATCHES),
        ("test_batch.bin",),
        "batches.meta.txt",
        _binary(1),
        _lines,
    ),
    _Version("cifar100", ("train.bin",), ("test.bin",), "fine_label_names.txt", _binary(2), _lines),
    _Version("cifar10", _BATCHES, ("test_batch",), "batches.meta", _pickled(b"labels"), _pickled_names(b"label_names")),
    _Version("cifar100", ("train",), ("test",), "meta", _pickled(b"fine_labels"), _pickled_names(b"fine_label_names")),
)
