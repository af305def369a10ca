"""IDX files (MNIST, Fashion-MNIST), gzipped or not."""

from __future__ import annotations

import math
import os
import struct
from io import FileIO
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from conadv.task.data.bounds import DEFLATE, MAX_ARRAY, check_memory
from conadv.task.data.gunzip import Gunzip
from conadv.task.data.regular import named_damage, open_regular, read_exactly
from conadv.task.data.source import Arrays, DataSet, number_names

_BYTES = 0x08
_MAX_DIMENSIONS = 4


def find_idx(root: Path) -> dict[str, Path] | None:
    """The four files of an IDX data set, by part and kind, or None if one is missing."""
    found = {}
    for part, prefixes in (("train", ("train",)), ("test", ("t10k", "test"))):
        for kind, digit in (("images", 3), ("labels", 1)):
            names = (f"{prefix}-{kind}{mark}idx{digit}-ubyte" for prefix in prefixes for mark in "-.")
            paths = (root / (name + end) for name in names for end in ("", ".gz"))
            path = next((path for path in paths if path.is_file()), None)
            if path is None:
                return None
            found[f"{part} {kind}"] = path
    return found


def open_idx(files: dict[str, Path], name: str) -> DataSet:
    """Both parts of the data set, in memory."""
    arrays = {what: read_idx(path) for what, path in files.items()}
    classes = number_names(int(max(arrays["train labels"].max(initial=0), arrays["test labels"].max(initial=0))))
    origins = {part: ("idx", files[f"{part} images"].name) for part in ("train", "test")}
    train, test = (
        Arrays(arrays[f"{part} images"][..., None], arrays[f"{part} labels"], classes, origin)
        for part, origin in origins.items()
    )
    return DataSet(train, test, name)


def read_images(path: Path, name: str) -> NDArray[np.uint8]:
    """The images in one file of a folder."""
    return read_idx(path / name)[..., None]


def read_idx(path: Path) -> NDArray[np.uint8]:
    """Read an IDX file: an array of bytes of the shape in its header, and nothing after it."""
    with named_damage(path, "download it again"), open_regular(path) as stored:
        gzipped = path.suffix == ".gz"
        most = os.fstat(stored.fileno()).st_size * (DEFLATE if gzipped else 1)
        file = Gunzip(stored) if gzipped else stored
        shape = _read_shape(file)
        size = math.prod(shape)
        if size > most:
            raise ValueError(f"fewer bytes than its header's {size:,}")
        check_memory(size, str(path), "use a machine with more memory")
        data = read_exactly(file, size)
        if file.read(1):
            raise ValueError(f"more bytes than its header's {size:,}")
    return data.reshape(shape)


def _read_shape(file: Gunzip | FileIO) -> tuple[int, ...]:
    zeros, kind, dimensions = struct.unpack(">HBB", file.read(4))
    shape = struct.unpack(f">{dimensions}I", file.read(4 * dimensions))
    if zeros or kind != _BYTES or dimensions > _MAX_DIMENSIONS or math.prod(shape) > MAX_ARRAY:
        raise ValueError("not an IDX file of bytes")
    return shape
