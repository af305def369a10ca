"""Tar shards in the WebDataset layout (KEY.jpg and KEY.cls), read at random by an index of offsets.

shards ── headers, once ──> index (shard, offset, size, label, key) ──> cache ──> os.pread an image
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path

import numpy as np

from conadv.task.data.cache import Table, cached, pack_strings, stamp_of, unpack_strings
from conadv.task.data.decode import EXTENSIONS
from conadv.task.data.encoded import Listing
from conadv.task.data.regular import open_regular
from conadv.task.data.source import DamagedError
from conadv.task.data.stored import Parts, Stored
from conadv.task.data.tar import Member, TarError, tar_members

_LONGEST_END = 2**20  # bytes; archives are padded to whole records, usually of 10 kB


def list_shards(shards: Sequence[Path]) -> Listing:
    """List the images of these tar files, in the order in which they are stored."""
    parts = [(shard, _index(shard)) for shard in shards]
    shard_of = np.concatenate([np.full(len(table["label"]), place) for place, (_, table) in enumerate(parts)])
    offsets, sizes, labels = (
        np.concatenate([table[column].astype(np.int64) for _, table in parts]) for column in ("offset", "size", "label")
    )
    return Listing(
        names=[name for shard, table in parts for name in _names(shard, table, "key", len(table["label"]))],
        labels=labels,
        read=Stored(list(map(str, shards)), Parts(shard_of, offsets, sizes)),
        problems=tuple(problem for shard, table in parts for problem in _problems(shard, table)),
    )


@dataclass
class _Found:
    """The samples of a shard, collected from its members."""

    images: dict[str, tuple[str, int, int]] = field(default_factory=dict)
    """By key: name, offset, size."""
    labels: dict[str, int] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)
    """By name of a member, or "" for the shard: the reason."""

    def add(self, member: Member, shard: Path, file: FileIO) -> None:
        folder, slash, base = member.name.rpartition("/")
        stem, _, extension = base.partition(".")
        key, extension = folder + slash + stem, extension.lower()
        is_image = extension in EXTENSIONS
        if not is_image and extension != "cls":
            return
        if key in (self.images if is_image else self.labels):
            self.problems[member.name] = f"the key {key} occurs twice in {shard.name}"
        elif is_image:
            self.images[key] = (member.name, member.offset, member.size)
        else:
            self._add_label(key, member, file)

    def _add_label(self, key: str, member: Member, file: FileIO) -> None:
        file.seek(member.offset)
        text = file.read(min(member.size, 32)).strip()
        if text.removeprefix(b"-").isdigit() and len(text) < 10:
            self.labels[key] = int(text)
        else:
            self.problems[member.name] = f"{text[:20]!r} is not a class number"

    def table(self) -> Table:
        pairs = [(*image, self.labels[key]) for key, image in self.images.items() if key in self.labels]
        for key, (name, _, _) in self.images.items():
            if key not in self.labels:
                self.problems.setdefault(name, f"{key}.cls is missing")
        for key in self.labels.keys() - self.images.keys():
            self.problems.setdefault(f"{key}.cls", "its image is missing")
        names, offsets, sizes, labels = zip(*pairs, strict=True) if pairs else ((), (), (), ())
        return {
            "key": pack_strings(names),
            "offset": np.array(offsets, np.int64),
            "size": np.array(sizes, np.int64),
            "label": np.array(labels, np.int64),
            "problem": pack_strings(self.problems),
            "reason": pack_strings(self.problems.values()),
            "problems": np.array(len(self.problems)),
        }


def _index(shard: Path) -> Table:
    return cached("shard", stamp_of([shard]), lambda: _scan(shard).table())


def _scan(shard: Path) -> _Found:
    found = _Found()
    try:
        with open_regular(shard) as file:
            length = os.fstat(file.fileno()).st_size
            for member in tar_members(file, length):
                found.add(member, shard, file)
            _check_end(file)
    except (OSError, TarError) as error:
        found.problems[""] = f"the shard is truncated or not a tar file ({error})"
    return found


def _check_end(file: FileIO) -> None:
    """Check that only zeros follow the end mark: anything else was lost because of a damaged header."""
    if file.read(_LONGEST_END).strip(b"\0"):
        raise TarError(f"no end mark at byte {file.tell()}")


def _names(shard: Path, table: Table, column: str, count: int) -> Iterator[str]:
    return (f"{shard}/{name}" for name in unpack_strings(table[column], count))


def _problems(shard: Path, table: Table) -> Iterator[DamagedError]:
    count = int(table["problems"])
    reasons = unpack_strings(table["reason"], count)
    for name, reason in zip(_names(shard, table, "problem", count), reasons, strict=True):
        yield DamagedError(name.removesuffix("/"), reason)
