"""CIFAR-10 and CIFAR-100 as their author distributes them: binary or Python version, archive or unpacked folder."""

from __future__ import annotations

import io
import pickle
import tarfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conadv.task.data.source import Arrays, DataSet, Pixels

_PIXELS = 3 * 32 * 32
_MAX_FILE = 2**28  # bytes; the largest file of the real ones has 155 MB

Part = tuple[Pixels, NDArray[np.int64]]


@dataclass(frozen=True)
class _Version:
    """How one of the four distributions is laid out."""

    name: str
    train: tuple[str, ...]
    test: tuple[str, ...]
    names: str
    """The file with the names of the classes."""
    parse: Callable[[bytes], Part]
    parse_names: Callable[[bytes], tuple[str, ...]]


def find_cifar(path: Path) -> DataSet | None:
    """The data set in this archive or folder (or a folder in it), or None where it is no CIFAR."""
    if path.is_file():
        return _from_archive(path) if tarfile.is_tarfile(path) else None
    for folder in (path, *sorted(entry for entry in path.iterdir() if entry.is_dir())):
        for version in _VERSIONS:
            names = (*version.train, *version.test, version.names)
            if all((folder / name).is_file() for name in names):
                return _assemble(version, {name: (folder / name).read_bytes() for name in names}, path)
    return None


def _from_archive(path: Path) -> DataSet | None:
    """Nothing is unpacked to disk; a member counts by the last part of its name only."""
    wanted = {name for version in _VERSIONS for name in (*version.train, *version.test, version.names)}
    files: dict[str, bytes] = {}
    try:
        with tarfile.open(path, "r:*") as archive:
            for member in archive:
                name = Path(member.name).name
                if name in wanted and member.isreg() and member.size <= _MAX_FILE:
                    stream = archive.extractfile(member)
                    assert stream is not None
                    files[name] = stream.read()
    except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path}: damaged archive ({error}); download it again") from error
    for version in _VERSIONS:
        if {*version.train, *version.test, version.names} <= files.keys():
            return _assemble(version, files, path)
    return None


def _assemble(version: _Version, files: Mapping[str, bytes], path: Path) -> DataSet:
    def read(name: str, parse: Callable[[bytes], Any]) -> Any:
        try:
            return parse(files[name])
        except Exception as error:  # bytes that are not what they seem fail in many ways
            raise ValueError(f"{path}: {name} is damaged ({error}); download it again") from error

    classes = read(version.names, version.parse_names)

    def part(names: tuple[str, ...]) -> Arrays:
        parts: list[Part] = [read(name, version.parse) for name in names]
        images, labels = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        return Arrays(images, labels, classes)

    return DataSet(part(version.train), part(version.test), version.name)


def _images(rows: NDArray[np.uint8]) -> Pixels:
    """(N, 3072), a plane a colour, to (N, 32, 32, 3)."""
    return np.ascontiguousarray(rows.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))


def _binary(label_bytes: int) -> Callable[[bytes], Part]:
    """Records of label bytes, the last of which is the class, and pixels."""

    def parse(data: bytes) -> Part:
        rows = np.frombuffer(data, np.uint8).reshape(-1, label_bytes + _PIXELS)
        return _images(rows[:, label_bytes:]), rows[:, label_bytes - 1].astype(np.int64)

    return parse


def _pickled(label_key: bytes) -> Callable[[bytes], Part]:
    def parse(data: bytes) -> Part:
        table = safe_unpickle(data)
        if not isinstance(table[b"data"], ByteTable):
            raise ValueError("its data is no table of bytes")
        rows = table[b"data"].array
        return _images(rows), np.array(table[label_key], np.int64)

    return parse


def _pickled_names(key: bytes) -> Callable[[bytes], tuple[str, ...]]:
    return lambda data: tuple(name.decode() for name in safe_unpickle(data)[key])


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


def safe_unpickle(data: bytes) -> Any:
    """What the Python version pickles: numbers, strings, lists, dicts and `ByteTable`s; nothing that could run."""
    return _Unpickler(io.BytesIO(data), encoding="bytes").load()


class ByteTable:
    """Stands in for an array in a pickle, so that no code of NumPy sees what the file says before it is checked."""

    array: NDArray[np.uint8]

    def __setstate__(self, state: object) -> None:
        match state:
            case (int(), tuple(shape), ByteType(), bool(by_column), bytes(data)):
                self.array = np.frombuffer(data, np.uint8).reshape(shape, order="F" if by_column else "C")
            case _:
                raise pickle.UnpicklingError("an array that is not of bytes")


class ByteType:
    """Stands in for the type of an array's elements; only bytes are taken."""

    def __setstate__(self, state: object) -> None:
        pass


class _Unpickler(pickle.Unpickler):
    """Knows the four names that occur in CIFAR's files, and for each a harmless function of our own."""

    def find_class(self, module: str, name: str) -> Any:
        known = {
            ("numpy.core.multiarray", "_reconstruct"): _array,
            ("numpy._core.multiarray", "_reconstruct"): _array,
            ("numpy", "ndarray"): "ndarray",
            ("numpy", "dtype"): _type,
            ("_codecs", "encode"): _latin_bytes,
        }
        if (module, name) not in known:
            raise pickle.UnpicklingError(f"it would call {module}.{name}")
        return known[module, name]


def _array(kind: object, shape: object, code: object) -> ByteTable:
    return ByteTable()


def _type(code: object, *rest: object) -> ByteType:
    if code not in (b"u1", "u1"):
        raise pickle.UnpicklingError(f"an array of {code!r}, not of bytes")
    return ByteType()


def _latin_bytes(text: str, encoding: object) -> bytes:
    if encoding not in ("latin1", b"latin1"):
        raise pickle.UnpicklingError(f"text in {encoding!r}")
    return text.encode("latin1")
