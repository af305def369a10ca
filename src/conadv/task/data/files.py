"""Encoded images on disk: image folders, and tar shards, which are read at random by an index of offsets."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import tarfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conadv.atomic import replace_file
from conadv.task.data.decode import EXTENSIONS, open_picture
from conadv.task.data.source import DamagedError, Found, Labels, Picture, Source, labelled, naming

_MAX_BYTES = 2**28  # of one encoded image, or one file that is read whole
_CACHE_FORMAT = 4
_LONGEST_END = 2**20  # bytes of zeros; archives are padded to whole records, usually of 10 kB
_PARTS = {"train": "train", "training": "train", "val": "val", "valid": "val", "validation": "val", "test": "test"}


@dataclass(frozen=True)
class Files:
    """Pictures in files below a folder, each a file of its own or a part of a tar shard."""

    root: str
    names: Sequence[str]
    """Path of each image below `root`; of a member of a shard, the path of the shard followed by its name."""
    channels: int
    """1 (grey) or 3 (RGB)."""
    shards: Sequence[str] = ()
    places: NDArray[np.int64] | None = None
    """Number of the shard, offset and size in bytes of each image, (N, 3); None: each image is a file."""

    def name(self, row: int) -> str:
        return self._path(self.names[row])

    def read(self, row: int) -> bytes:
        """The encoded bytes of an image."""
        if self.places is None:
            return read_file(self.name(row))
        shard, offset, size = self.places[row].tolist()
        return read_file(self._path(self.shards[shard]), offset, size)

    def picture(self, row: int) -> Picture:
        with naming(self.name(row)):
            return open_picture(self.read(row), self.channels, self.name(row))

    def files(self) -> list[str]:
        """The paths of the files that have the images."""
        return [self._path(name) for name in self.shards or self.names]

    def _path(self, name: str) -> str:
        return f"{self.root}{os.sep}{name}"


def read_file(path: str | os.PathLike[str], offset: int = 0, size: int | None = None) -> bytes:
    """`size` bytes of a file (None: all), which is not kept open: there may be more shards than handles."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # opening a pipe would wait
    try:
        size = os.fstat(handle).st_size if size is None else size
        if size > _MAX_BYTES:
            raise OSError(errno.EFBIG, f"{size:,} bytes are more than the limit of {_MAX_BYTES:,}")
        data = os.pread(handle, size, offset)
    finally:
        os.close(handle)
    if len(data) < size:
        raise OSError(errno.EIO, "the file is truncated")
    return data


def find_folders(root: Path, channels: int) -> Found | None:
    """The images in train/CLASS, and in val/CLASS or test/CLASS, or all in CLASS; None if there is no such folder."""
    parts = {part: root / name for name, part in reversed(_PARTS.items()) if (root / name).is_dir()}
    if "train" not in parts:
        if not any(_is_image(file.name) for file in root.glob("*/*")):
            return None
        if parts:
            raise ValueError("images to test on, but no folder called train; put the class folders in train/CLASS")
        parts = {"train": root}
    train, test = parts["train"], parts.get("val", parts.get("test"))
    classes = _subfolders(train)
    if not classes:
        raise DamagedError(train, "no class folders; put the images of each class in a folder of its own")
    if unknown := sorted(set(_subfolders(test) if test else ()) - set(classes)):
        raise DamagedError(test, f"{train} has no class {unknown[0]!r} ({len(unknown)} such folders)")
    sources = [_list_folder(root, folder, classes, channels) for folder in (train, test) if folder]
    empty = np.flatnonzero(np.bincount(sources[0].labels, minlength=len(classes)) == 0)  # of training images
    return Found(sources, [DamagedError(train / classes[one], "a class without images") for one in empty])


def _list_folder(root: Path, folder: Path, classes: tuple[str, ...], channels: int) -> Source:
    """The images of every class, sorted by name."""
    names: list[str] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        members = images_below(folder / name)
        names += (member.removeprefix(f"{root}{os.sep}") for member in members)
        labels += [label] * len(members)
    return Source(Files(str(root), names, channels), np.array(labels, np.int64), classes)


def _subfolders(folder: Path) -> tuple[str, ...]:
    return tuple(sorted(one.name for one in os.scandir(folder) if one.is_dir() and not one.name.startswith(".")))


def images_below(folder: Path) -> list[str]:
    """The paths of the image files in a folder and the folders in it, sorted."""
    return sorted(
        os.path.join(place, file)  # noqa: PTH118  # a Path for each of a million files takes longer
        for place, _, files in os.walk(folder)
        for file in files
        if _is_image(file)
    )


def _is_image(name: str) -> bool:
    return not name.startswith(".") and name.rpartition(".")[2].lower() in EXTENSIONS


def find_shards(root: Path, channels: int) -> Found | None:
    """The images of the tar files in this folder and those directly below it, split by the words in their names.

    A shard has the WebDataset layout, KEY.jpg and KEY.cls. Images are in the order in which they are stored.
    """
    # Not deeper, since image folders have very many files.
    shards = sorted(file for file in (*root.glob("*.tar"), *root.glob("*/*.tar")) if not file.is_dir())
    if not shards:
        return None
    parts = [_list_shards(root, part, channels) for part in _split(root, shards) if part]
    pictures, labels, problems = zip(*parts, strict=True)
    return Found(labelled(pictures, labels, class_names(root)), [*chain(*problems)])


def _list_shards(root: Path, shards: Sequence[Path], channels: int) -> tuple[Files, Labels, list[DamagedError]]:
    names: list[str] = []
    places, labels, problems = [], [], []
    for number, shard in enumerate(shards):
        images, wrong = cached("index", [shard], partial(_index, shard))
        for name, offset, size, label in images:
            names.append(f"{shard.relative_to(root)}/{name}")
            places.append((number, offset, size))
            labels.append(label)
        problems += [DamagedError(shard / name, why) for name, why in wrong]
    below = [str(shard.relative_to(root)) for shard in shards]
    table = np.array(places, np.int64).reshape(-1, 3)
    return Files(str(root), names, channels, below, table), np.array(labels, np.int64), problems


def _split(root: Path, files: Sequence[Path]) -> tuple[list[Path], list[Path]]:
    """Training and test files, by the words in their paths below `root`."""
    parts: dict[str, list[Path]] = {"train": [], "val": [], "test": []}
    for file in files:
        words = re.findall("[a-z]+", str(file.relative_to(root)).lower())
        kinds = sorted({_PARTS[word] for word in words if word in _PARTS})
        if len(kinds) != 1:
            found = " and ".join(kinds) or "none"
            raise ValueError(f"{file.name}: rename it, so that it has one of the words train, val, test (now: {found})")
        parts[kinds[0]].append(file)
    if not parts["train"]:
        raise ValueError("no file has train in its name")
    # A data set with both usually has no public test labels (ImageNet on the hub).
    return parts["train"], parts["val"] or parts["test"]


def _index(shard: Path) -> tuple[list[tuple[str, int, int, int]], list[tuple[str, str]]]:
    """Name, offset, size and label of each image in a shard, and what is wrong by name."""
    images: dict[str, tuple[str, int, int]] = {}
    labels: dict[str, int] = {}
    problems: dict[str, str] = {}
    try:
        if not shard.is_file():
            raise ValueError("not a regular file")
        with shard.open("rb", buffering=0) as file, tarfile.open(fileobj=file, mode="r:") as archive:
            for member in archive:
                folder, slash, base = member.name.rpartition("/")
                stem, _, extension = base.partition(".")
                key, kind = folder + slash + stem, extension.lower()
                if not member.isreg() or member.issparse() or (kind != "cls" and kind not in EXTENSIONS):
                    continue
                if key in (labels if kind == "cls" else images):
                    problems[member.name] = f"the key {key} occurs twice"
                elif kind != "cls":
                    images[key] = (member.name, member.offset_data, member.size)
                elif (text := os.pread(file.fileno(), min(member.size, 32), member.offset_data).strip()).isdigit():
                    labels[key] = int(text)
                else:
                    problems[member.name] = f"{text[:20]!r} is not a class number"
            # tarfile takes a damaged header for the end, which is a block of zeros.
            end = os.pread(file.fileno(), _LONGEST_END, archive.offset)
            if not end or end.strip(b"\0"):
                raise ValueError(f"no end mark at byte {archive.offset}")
    except Exception as error:  # tarfile fails in many ways on damaged bytes
        problems[""] = f"the shard is truncated or not a tar file ({error})"
    for key in images.keys() ^ labels.keys():
        name = images[key][0] if key in images else f"{key}.cls"
        problems.setdefault(name, f"{key}.cls is missing" if key in images else "its image is missing")
    return [(*image, labels[key]) for key, image in images.items() if key in labels], list(problems.items())


def class_names(root: Path) -> tuple[str, ...] | None:
    """The lines of classes.txt, if there is one in the folder of the data, or beside its file."""
    file = (root if root.is_dir() else root.parent) / "classes.txt"
    with naming(file, "write one class per line, as UTF-8"):
        return tuple(read_file(file).decode("utf-8").splitlines()) if file.is_file() else None


def cached(what: str, files: Iterable[str | os.PathLike[str]], build: Callable[[], Any]) -> Any:
    """What `build` returned for these files, as JSON has it; from the user's cache folder until one of them changes."""
    digest = hashlib.sha256()
    for file in files:
        status = os.stat(file)  # noqa: PTH116  # a Path for each of a million files takes longer
        state = f"\0{os.path.abspath(file)}\0{status.st_size}\0{status.st_mtime_ns}"  # noqa: PTH100
        digest.update(state.encode("utf-8", "surrogateescape"))
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = Path(os.environ.get("CONADV_CACHE") or home / "conadv")
    path = folder / f"data{_CACHE_FORMAT}-{what}-{digest.hexdigest()}.json"
    with suppress(OSError, ValueError):  # nothing is cached, or it is damaged
        return json.loads(path.read_bytes())
    built = build()
    with suppress(OSError):  # a full disk or no permission: build it again next time
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(path, json.dumps(built).encode())
    return built
