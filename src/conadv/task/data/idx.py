"""IDX files (MNIST, Fashion-MNIST), gzipped or not."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from conadv.task.data.source import Arrays, DataSet

_BYTES = 0x08
_MAX_SIZE = 2**34  # a header that promises more is not believed


def find_idx(root: Path) -> dict[str, Path] | None:
    """The four files of an IDX data set by what they are, or None where they do not all lie there."""
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
    count = int(max(arrays["train labels"].max(initial=0), arrays["test labels"].max(initial=0))) + 1
    classes = tuple(str(number) for number in range(count))
    train, test = (
        Arrays(arrays[f"{part} images"][..., None], arrays[f"{part} labels"], classes) for part in ("train", "test")
    )
    return DataSet(train, test, name)


def read_idx(path: Path) -> NDArray[np.uint8]:
    """An array of bytes as the header says; anything else in the file is an error."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            zeros, kind, dimensions = struct.unpack(">HBB", file.read(4))
            shape = struct.unpack(f">{dimensions}I", file.read(4 * dimensions))
            size = math.prod(shape)
            if zeros or kind != _BYTES or size > _MAX_SIZE:
                raise ValueError("no IDX header of an array of bytes")
            data = file.read(size + 1)
    except (OSError, EOFError, struct.error, ValueError, zlib.error) as error:
        raise ValueError(f"{path}: {error}; download it again") from error
    if len(data) != size:
        missing = "fewer" if len(data) < size else "more"
        raise ValueError(f"{path}: {missing} bytes than its header's {size:,}; download it again")
    return np.frombuffer(data, np.uint8).reshape(shape)
