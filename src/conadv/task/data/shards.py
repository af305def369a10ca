"""Tar shards in the WebDataset layout (KEY.jpg and KEY.cls), read at random by an index of offsets.

shards ── headers, once ──► index (name, offset, size, label) ──► cache ──► os.pread an image
"""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from conadv.task.data.cache import Table, cached, stamp_of
from conadv.task.data.decode import EXTENSIONS
from conadv.task.data.files import Files, read_file
from conadv.task.data.source import DamagedError

_LONGEST_HEADER = 2**20  # bytes
_LONGEST_END = 2**20  # bytes of zeros; archives are padded to whole records, usually of 10 kB


class _Headers(io.FileIO):
    """A tar file of which tarfile reads the headers only, never as many bytes as a damaged one asks for."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or not 0 <= size <= _LONGEST_HEADER:
            raise tarfile.ReadError(f"a header of {size:,} bytes")
        return super().read(size)


def list_shards(
    root: Path, shards: Sequence[Path], channels: int
) -> tuple[Files, NDArray[np.int64], list[DamagedError]]:
    """The images of these tar files in the order in which they are stored, their labels, and what is wrong."""
    below = [str(shard.relative_to(root)) for shard in shards]
    names: list[str] = []
    places, labels, problems = [], [], []
    for number, shard in enumerate(shards):
        table = cached("shard", stamp_of([shard]), partial(_index, shard))
        names += (f"{below[number]}/{name}" for name in table["name"].tolist())
        places.append(np.column_stack([np.full(len(table["label"]), number), table["offset"], table["size"]]))
        labels.append(table["label"])
        problems += [DamagedError(shard / name, why) for name, why in table["problem"].tolist()]
    return Files(str(root), names, channels, below, np.concatenate(places)), np.concatenate(labels), problems


def _index(shard: Path) -> Table:
    """Name, offset, size and label of each image in a shard, and what is wrong with it."""
    images: dict[str, tuple[str, int, int]] = {}
    labels: dict[str, int] = {}
    problems: dict[str, str] = {}
    try:
        read_file(shard, size=0)  # it must be a regular file
        with _Headers(shard) as file, tarfile.open(fileobj=file, mode="r:") as archive:
            for member in archive:
                folder, slash, base = member.name.rpartition("/")
                stem, _, extension = base.partition(".")
                key, is_image = folder + slash + stem, extension.lower() in EXTENSIONS
                if not member.isreg() or member.issparse() or not (is_image or extension.lower() == "cls"):
                    continue
                if key in (images if is_image else labels):
                    problems[member.name] = f"the key {key} occurs twice"
                elif is_image:
                    images[key] = (member.name, member.offset_data, member.size)
                elif (text := os.pread(file.fileno(), min(member.size, 32), member.offset_data).strip()).isdigit():
                    labels[key] = int(text)
                else:
                    problems[member.name] = f"{text[:20]!r} is not a class number"
            # tarfile takes a damaged header for the end, which is a block of zeros.
            end = os.pread(file.fileno(), _LONGEST_END, archive.offset)
            if not end or end.strip(b"\0"):
                raise tarfile.ReadError(f"no end mark at byte {archive.offset}")
    except Exception as error:  # tarfile fails in many ways on damaged bytes
        problems[""] = f"the shard is truncated or not a tar file ({error})"
    for key in images.keys() ^ labels.keys():
        name = images[key][0] if key in images else f"{key}.cls"
        problems.setdefault(name, f"{key}.cls is missing" if key in images else "its image is missing")
    rows = [(*image, labels[key]) for key, image in images.items() if key in labels]
    names, offsets, sizes, numbers = zip(*rows, strict=True) if rows else ((), (), (), ())
    return {
        "name": np.array(names, np.str_),
        "offset": np.array(offsets, np.int64),
        "size": np.array(sizes, np.int64),
        "label": np.array(numbers, np.int64),
        "problem": np.array(list(problems.items()), np.str_).reshape(-1, 2),
    }
