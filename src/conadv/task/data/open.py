"""Open a data set: a built-in one, or one at a path, whose format is detected from its files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

from conadv.machine import usable_cores
from conadv.task.data.cache import stamp_of
from conadv.task.data.cifar import find_cifar
from conadv.task.data.embedded import digits, synthetic
from conadv.task.data.encoded import Listing, numbered_classes
from conadv.task.data.folder import folder_classes, has_class_folders, list_folder, split_folders
from conadv.task.data.hf import PREFIX, open_hub
from conadv.task.data.index import pack_index, unpack_index
from conadv.task.data.numpy_files import open_arrays
from conadv.task.data.regular import plain_errors
from conadv.task.data.scan import Scan, scan
from conadv.task.data.shards import list_shards
from conadv.task.data.source import DAMAGE_ADVICE, DamagedError, DataSet, Source
from conadv.task.data.splits import class_names, split_files, stratified

KNOWN = (
    "an image folder (train/CLASS/*.jpg and val/CLASS/*.jpg), tar shards (*train*.tar and *val*.tar), "
    "CIFAR's archives or their folders, NumPy arrays (train_images.npy and so on), or hf:NAME_OR_PATH for a data set "
    "of the Hugging Face hub or a folder of Parquet files"
)

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
        path: Folder or file of your own data; its format is detected. Or hf:NAME_OR_PATH.
        train_size: Number of training images to use; None: all.
        image_size: Height and width of synthetic images, in pixels.
        channels: Channels of synthetic images, and what encoded images are converted to. Arrays keep theirs.
        classes: Number of classes of synthetic data.
        damaged: "stop" raises an error that names a damaged image; "skip" leaves damaged images out
            (`DataSet.skipped`). To find them, every image is decoded once; the result is cached until the files change.
        share: If several processes open the same data: runs a function in one of them, and returns its bytes in all.
            That process lists the files and reads the labels, and the others get the index. Each process reads images
            that are held in memory (NumPy) by itself, and CIFAR's files and the hub's with their labels.
    """
    match name:
        case "digits":
            return digits() if train_size is None else digits(train_size)
        case "synthetic":
            side = image_size or 32
            return synthetic((side, side, channels), classes, train_size or 50_000)
        case "path" if path is not None:
            listed = partial(_listed, Path(path), channels, damaged)
            data = listed() if share is None else _shared(Path(path), channels, listed, share)
            return data if train_size is None else _part(data, train_size)
    raise ValueError(f"data {name!r}: choose digits, synthetic, or path with path=")


def _listed(path: Path, channels: int, damaged: Literal["stop", "skip"]) -> DataSet:
    """The data set at a path, listed by this process."""
    with plain_errors(path):
        found = find_data(path, channels)
        return found.checked() if damaged == "stop" else found.healthy()


def _shared(path: Path, channels: int, listed: Callable[[], DataSet], share: Share) -> DataSet:
    """The data set, listed by one process for all."""
    own: list[DataSet] = []

    def index() -> bytes:
        own.append(listed())
        return pack_index(own[0], path)

    packed = share(index)
    if own:
        return own[0]
    if not packed:
        return listed()
    with plain_errors(path):
        return unpack_index(packed, path, channels)


@dataclass(frozen=True)
class Found:
    """The data set at a path, and what is wrong with it."""

    kind: str
    data: DataSet
    problems: tuple[DamagedError, ...] = ()
    """Found without decoding; these images are not in the data set."""
    stamp: Callable[[], str] = str
    """A key for the state of the files: cached results are valid until it changes."""

    def checked(self) -> DataSet:
        """The data set; raises an error for a problem that was found without decoding."""
        if self.problems:
            more = f" (and {len(self.problems) - 1} more)" if len(self.problems) > 1 else ""
            raise ValueError(f"{self.problems[0]}{more}; {DAMAGE_ADVICE}")
        return self.data

    def scans(self) -> dict[str, Scan]:
        """What decoding all images shows, by "train" and "test"."""
        stamp, workers = self.stamp(), len(usable_cores())
        return {part: scan(source, f"{part}-{stamp}", workers) for part, source in self._parts().items()}

    def healthy(self) -> DataSet:
        """The data set without the images that cannot be used."""
        parts, skipped = self._parts(), list(self.problems)
        for part, seen in self.scans().items():
            source = parts[part]
            skipped += [DamagedError(source.name(index), reason) for index, reason in seen.damaged.items()]
            if seen.damaged:
                parts[part] = source.take([index for index in range(len(source)) if index not in seen.damaged])
        return replace(self.data, train=parts["train"], test=parts["test"], skipped=tuple(skipped))

    def _parts(self) -> dict[str, Source]:
        return {"train": self.data.train, "test": self.data.test}


def find_data(path: Path, channels: int = 3) -> Found:
    """Detect the format of the data at a path; the error for an unknown one lists the known formats."""
    if str(path).startswith(PREFIX):
        first, second, classes, digest = open_hub(str(path))
        return replace(_encoded("Hugging Face", path, [], first, second, classes, channels), stamp=lambda: digest)
    if not path.exists():
        raise ValueError(
            f"data {str(path)!r}: no such file or directory; pass the path of your data set (conadv train: --data.path)"
        )
    if not path.is_file() and not path.is_dir():
        raise ValueError(f"{path}: neither a regular file nor a directory; it can be {KNOWN}")
    if arrays := open_arrays(path):
        return Found("NumPy arrays", arrays)
    if cifar := find_cifar(path):
        return Found("CIFAR's own files", cifar)
    if shards := _below(path, ".tar"):
        train, test = split_files(shards, path)
        return _encoded("tar shards", path, shards, list_shards(train), list_shards(test), class_names(path), channels)
    if path.is_dir() and (folders := split_folders(path)):
        return _open_folder(path, *folders, channels)
    if has_class_folders(path):
        raise ValueError(
            f"{path}: folders of images, but none called train and val; move the class folders to train/CLASS, and the "
            "images to test on to val/CLASS"
        )
    raise ValueError(f"{path}: not recognized; it can be {KNOWN}")


def _below(path: Path, suffix: str) -> list[Path]:
    """Files with this suffix in the folder or its subfolders; not deeper, since image folders have very many files."""
    found = [*path.glob(f"*{suffix}"), *path.glob(f"*/*{suffix}")] if path.is_dir() else []
    return sorted(file for file in found if not file.is_dir())


def _open_folder(path: Path, train: Path, test: Path, channels: int) -> Found:
    classes = folder_classes(train, test)
    parts = list_folder(train, classes, may_lack=False), list_folder(test, classes, may_lack=True)
    return _encoded("image folder", path, [*parts[0].names, *parts[1].names], *parts, classes, channels)


def _encoded(
    kind: str,
    path: Path,
    files: Sequence[Path | str],
    train: Listing,
    test: Listing,
    classes: tuple[str, ...] | None,
    channels: int,
) -> Found:
    names = classes or numbered_classes(train, test)
    train_source, train_problems = train.source(names, channels)
    test_source, test_problems = test.source(names, channels)
    for source, problems in ((train_source, train_problems), (test_source, test_problems)):
        if len(source) == 0 and problems:
            raise ValueError(f"{path}: no usable image ({problems[0]}); {DAMAGE_ADVICE}")
    data = DataSet(train_source, test_source, path.name)
    return Found(kind, data, train_problems + test_problems, lambda: stamp_of(map(Path, files)))


def _part(data: DataSet, train_size: int) -> DataSet:
    """The data set with fewer training images, as balanced over the classes as possible."""
    if not 1 <= train_size <= len(data.train):
        raise ValueError(f"train_size {train_size}: choose 1 to {len(data.train)}, as many as {data.name} has")
    chosen = stratified(data.train.labels, len(data.train.classes), train_size)
    return replace(data, train=data.train.take(chosen.nonzero()[0].tolist()))
