"""Open a data set: a built-in one, or one at a path, whose format is detected from its files."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from conadv.catalog import names_dataset
from conadv.machine import usable_cores
from conadv.task.data.cache import Table, cached, stamp_of
from conadv.task.data.cifar import find_cifar
from conadv.task.data.draws import stratified
from conadv.task.data.embedded import digits, synthetic
from conadv.task.data.files import Files, read_file
from conadv.task.data.folder import find_folders, folder_classes, has_class_folders, list_folder
from conadv.task.data.items import HUB, open_hub, open_own
from conadv.task.data.numpy_files import find_arrays
from conadv.task.data.shards import list_shards
from conadv.task.data.source import DAMAGE_ADVICE, Arrays, DamagedError, DataSet, Source, naming, number_names
from conadv.task.data.stream import ordered_map

KNOWN = (
    "an image folder (train/CLASS/*.jpg and val/CLASS/*.jpg), tar shards (*train*.tar and *val*.tar), CIFAR's "
    "archives or their folders, NumPy arrays (train_images.npy and so on), hf:NAME_OR_PATH for a data set of the "
    "Hugging Face hub or a folder of Parquet files, or package.module:callable for your own Dataset"
)
_WORDS = {"train": "train", "training": "train", "val": "val", "valid": "val", "validation": "val", "test": "test"}

# Runs a function in one process, and returns its result in all of them.
Share = Callable[[Callable[[], bytes]], bytes]


def open_data(
    name: str,
    path: str | Path | None = None,
    train_size: int | None = None,
    image_size: int | None = None,
    channels: int = 3,
    classes: int = 10,
    damaged: Literal["stop", "skip"] = "stop",
    share: Share | None = None,
) -> DataSet:
    """Open a data set.

    Args:
        name: "digits", "synthetic", or "path" for your own.
        path: Folder or file of your own data, whose format is detected; or hf:NAME_OR_PATH; or package.module:callable.
        train_size: Number of training images to use; None: all.
        image_size: Height and width of synthetic images, in pixels.
        channels: Channels of synthetic images, and what encoded images are converted to. Arrays keep theirs.
        classes: Number of classes of synthetic data.
        damaged: "stop" raises an error that names a damaged image; "skip" leaves damaged images out
            (`DataSet.skipped`). To find them, every image is decoded once; the result is cached until the files change.
        share: If several processes open the same data: runs a function in one of them, and returns its bytes in all.
            That process lists the files of an image folder or of tar shards, and the others get the index. Each
            process opens data of other formats by itself.
    """
    if name == "digits":
        return digits() if train_size is None else digits(train_size)
    if name == "synthetic":
        return synthetic((image_size or 32, image_size or 32, channels), classes, train_size or 50_000)
    if name != "path" or path is None:
        raise ValueError(f"data {name!r}: choose digits, synthetic, or path with path=")

    def listed() -> DataSet:
        with naming(path):
            found = find_data(path, channels)
            return found.checked() if damaged == "stop" else found.healthy()[0]

    data = listed() if share is None else _shared(str(path), listed, share)
    if train_size is None:
        return data
    if not 1 <= train_size <= len(data.train):
        raise ValueError(f"train_size {train_size}: choose 1 to {len(data.train)}, as many as {data.name} has")
    chosen = stratified(data.train.labels, len(data.train.classes), train_size)
    return replace(data, train=data.train.take(np.flatnonzero(chosen)))


def _shared(path: str, listed: Callable[[], DataSet], share: Share) -> DataSet:
    """The data set, listed by one process for all if it consists of files."""
    own: list[DataSet] = []

    def index() -> bytes:
        own.append(listed())
        return _packed(own[0])

    packed = share(index)
    if own or not packed:
        return own[0] if own else listed()
    return _unpacked(packed, path)


def _packed(data: DataSet) -> bytes:
    """The index of a data set that consists of files; empty for all others."""
    parts = []
    for source in (data.train, data.test):
        files = source.pictures
        if not isinstance(files, Files):
            return b""
        names = [files.names[row] for row in source.rows.tolist()]
        places = None if files.places is None else files.places[source.rows].tolist()
        parts.append([names, files.channels, files.shards, places, source.labels.tolist()])
    skipped = [(problem.name, problem.reason) for problem in data.skipped]
    return zlib.compress(json.dumps([parts, data.train.classes, data.name, skipped, data.notes]).encode())


def _unpacked(packed: bytes, root: str) -> DataSet:
    """The data set of an index, below the path at which this process finds it; no file is opened."""
    parts, classes, name, skipped, notes = json.loads(zlib.decompress(packed))
    sources = []
    for names, channels, shards, places, labels in parts:
        files = Files(root, names, channels, shards, None if places is None else np.array(places, np.int64))
        sources.append(Source(files, np.array(labels, np.int64), tuple(classes)))
    return DataSet(sources[0], sources[1], name, tuple(DamagedError(*problem) for problem in skipped), tuple(notes))


@dataclass(frozen=True)
class Found:
    """The data set at a path, and what is wrong with it."""

    kind: str
    data: DataSet
    problems: tuple[DamagedError, ...] = ()
    """Found without decoding; these images are not in the data set."""
    stamp: Callable[[], str] = str
    """A key for the state of the files: cached results are valid until it changes. Empty: nothing is cached."""

    def checked(self) -> DataSet:
        """The data set; raises an error for a problem that was found without decoding."""
        if self.problems:
            more = f" (and {len(self.problems) - 1} more)" if len(self.problems) > 1 else ""
            raise DamagedError(self.problems[0].name, f"{self.problems[0].reason}{more}; {DAMAGE_ADVICE}")
        return self.data

    def healthy(self) -> tuple[DataSet, dict[str, NDArray[np.int64]]]:
        """The data set without the images that cannot be used, and the sizes of "train" and "test", (N, 2)."""
        parts, sizes = {"train": self.data.train, "test": self.data.test}, {}
        skipped, stamp = list(self.problems), self.stamp()
        for part, source in parts.items():
            if isinstance(source.pictures, Arrays):
                sizes[part] = np.tile(source.pictures.images.shape[1:3], (len(source), 1))
                continue
            table = cached("scan", f"{part}-{stamp}", partial(_scan, source)) if stamp else _scan(source)
            damaged = table["damaged"].tolist()
            skipped += map(DamagedError, map(source.name, damaged), table["reason"].tolist())
            parts[part] = source.take(np.delete(np.arange(len(source)), damaged))
            sizes[part] = np.delete(table["size"], damaged, axis=0)
        return replace(self.data, train=parts["train"], test=parts["test"], skipped=tuple(skipped)), sizes


def _scan(source: Source) -> Table:
    """Decode every image once: its height and width, and which are damaged, and why."""

    def look(index: int) -> tuple[int, int] | str:
        try:
            return source.image(index).shape[:2]
        except DamagedError as error:
            return error.reason

    workers = len(usable_cores())
    seen = list(ordered_map(look, range(len(source)), workers, 64 * workers))
    damaged = {index: reason for index, reason in enumerate(seen) if isinstance(reason, str)}
    return {
        "size": np.array([(0, 0) if isinstance(size, str) else size for size in seen], np.int64).reshape(-1, 2),
        "damaged": np.array(list(damaged), np.int64),
        "reason": np.array(list(damaged.values()), np.str_),
    }


def find_data(place: str | Path, channels: int = 3) -> Found:
    """Detect the format of the data at a path; the error for an unknown one lists the known formats."""
    path, name = Path(place), Path(place).name
    if path.exists() and (arrays := _find_arrays(path)):
        return arrays
    if channels not in (1, 3):
        raise ValueError(f"channels {channels}: choose 1 (grey) or 3 (RGB)")
    if str(place).startswith(HUB):
        first, second, digest = open_hub(str(place), channels)
        return Found("Hugging Face", _data(first, second, name), stamp=lambda: digest)
    if not path.exists():
        if names_dataset(str(place)):
            return Found("your own Dataset", _data(*open_own(str(place), channels), name))
        raise ValueError("no such file or directory; pass the path of your data set (conadv train: --data.path)")
    # Not deeper, since image folders have very many files.
    if shards := sorted(file for file in (*path.glob("*.tar"), *path.glob("*/*.tar")) if not file.is_dir()):
        parts = [list_shards(path, part, channels) for part in _split(path, shards) if part]
        classes = _class_names(path) or number_names(*(labels for _, labels, _ in parts))
        wrong = [problem for *_, problems in parts for problem in problems]
    elif folders := find_folders(path):
        shards, classes = [], folder_classes(*folders)
        parts = [list_folder(path, folder, classes, channels) for folder in folders if folder]
        wrong = parts[0][2]  # the test images need not have all classes
    elif has_class_folders(path):
        raise ValueError("folders of images, but none called train; move the class folders to train/CLASS")
    else:
        raise ValueError(f"not recognized; it can be {KNOWN}")
    train, *test = (Source(files, labels, classes) for files, labels, _ in parts)
    if wrong and not all(map(len, (train, *test))):
        raise ValueError(f"no usable image ({wrong[0]}); {DAMAGE_ADVICE}")

    def stamp() -> str:
        return stamp_of(shards or [source.name(index) for source in (train, *test) for index in range(len(source))])

    data = _data(train, test[0] if test else None, name)
    return Found("tar shards" if shards else "image folder", data, tuple(wrong), stamp)


def _find_arrays(path: Path) -> Found | None:
    """Images that are arrays, which keep their channels."""
    if not path.is_file() and not path.is_dir():
        raise ValueError(f"neither a regular file nor a directory; it can be {KNOWN}")
    if arrays := find_arrays(path, _class_names(path)):
        return Found("NumPy arrays", _data(*arrays, path.stem))
    if cifar := find_cifar(path):
        return Found("CIFAR's own files", _data(*cifar, path.name))
    return None


def _data(train: Source, test: Source | None, name: str) -> DataSet:
    """The data set; without test images, a tenth of the training images is held out, the same ones in every run."""
    if test is not None:
        return DataSet(train, test, name)
    held = stratified(train.labels, len(train.classes), -(-len(train) // 10))
    note = f"no test images: {held.sum():,} of the {len(train):,} training images, a tenth, are held out to test on"
    return DataSet(train.take(np.flatnonzero(~held)), train.take(np.flatnonzero(held)), name, notes=(note,))


def _split(root: Path, files: list[Path]) -> tuple[list[Path], list[Path]]:
    """Training and test files, by the words in their paths below `root`."""
    parts: dict[str, list[Path]] = {"train": [], "val": [], "test": []}
    for file in files:
        words = re.findall("[a-z]+", str(file.relative_to(root)).lower())
        kinds = sorted({_WORDS[word] for word in words if word in _WORDS})
        if len(kinds) != 1:
            found = " and ".join(kinds) or "none"
            raise ValueError(f"{file.name}: rename it, so that it has one of the words train, val, test (now: {found})")
        parts[kinds[0]].append(file)
    if not parts["train"]:
        raise ValueError("no file has train in its name")
    # A data set with both usually has no public test labels (ImageNet on the hub).
    return parts["train"], parts["val"] or parts["test"]


def _class_names(root: Path) -> tuple[str, ...] | None:
    """The lines of classes.txt, if there is one next to the data."""
    file = root / "classes.txt"
    with naming(file, "write one class per line, as UTF-8"):
        return tuple(read_file(file).decode("utf-8").splitlines()) if file.is_file() else None
