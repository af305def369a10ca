"""Open a data set, a built-in one or one at a path, whose format is detected from its files; or inspect it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from conadv.catalog import names_dataset
from conadv.machine import ordered_map, usable_cores
from conadv.task.data.arrays import digits, find_arrays, synthetic
from conadv.task.data.cifar import find_cifar
from conadv.task.data.files import Files, cached, find_folders, find_shards
from conadv.task.data.items import HUB, open_hub, open_own
from conadv.task.data.source import DAMAGE_ADVICE, Arrays, DamagedError, DataSet, Found, Source, naming

KNOWN = (
    "an image folder (CLASS/*.jpg, or train/CLASS/*.jpg and val/CLASS/*.jpg), tar shards (*train*.tar and *val*.tar), "
    "CIFAR's archives or their folders, NumPy arrays (train_images.npy and so on), hf:NAME_OR_PATH for a data set of "
    "the Hugging Face hub or a folder of Parquet files, or package.module:callable for your own Dataset"
)
# What finds the data of a format at a path, in the order in which they are tried; it returns None for other data.
FORMATS: dict[str, Callable[[Path, int], Found | None]] = {
    "NumPy arrays": find_arrays,
    "CIFAR's own files": find_cifar,
    "tar shards": find_shards,
    "image folder": find_folders,
}


def open_data(
    name: str | None = None,
    path: str | Path | None = None,
    train_size: int | None = None,
    image_size: int | None = None,
    channels: int = 3,
    damaged: Literal["stop", "skip"] = "stop",
) -> DataSet:
    """Open a data set.

    The arguments are the fields of `[data]` in a recipe; `image_size` is that of synthetic images only. To skip damaged
    images, which `DataSet.skipped` lists, every image is decoded once; the result is cached until the files change.
    """
    if name == "digits":
        return digits() if train_size is None else digits(train_size)
    if name == "synthetic":
        return synthetic((image_size or 32, image_size or 32, channels), train_size or 50_000)
    assert path is not None
    with naming(path):
        data = find_data(path, channels)[1]
        if damaged == "skip":
            data = without_damaged(data)[0]
        elif data.skipped:
            first, *more = data.skipped
            count = f" (and {len(more)} more)" if more else ""
            raise DamagedError(first.name, f"{first.reason}{count}; {DAMAGE_ADVICE}")
    if train_size is None:
        return data
    if not 1 <= train_size <= len(data.train):
        raise ValueError(f"train_size {train_size}: choose 1 to {len(data.train)}, as many as {data.name} has")
    return replace(data, train=data.train.split(train_size)[0])


def find_data(place: str | Path, channels: int = 3) -> tuple[str, DataSet]:
    """The format of the data at a path, and the data without what is damaged as far as one sees without decoding."""
    text, path = str(place), Path(place)
    if text.startswith(HUB):
        kind, found = "Hugging Face", open_hub(text, channels)
    elif path.exists():
        formats = ((kind, find(path, channels)) for kind, find in FORMATS.items())
        detected = next(((kind, found) for kind, found in formats if found), None)
        if detected is None:
            raise ValueError(f"not recognized; it can be {KNOWN}")
        kind, found = detected
    elif names_dataset(text):
        kind, found = "your own Dataset", open_own(text, channels)
    else:
        raise ValueError("no such file or directory; pass the path of your data set (conadv train: --data.path)")
    train, *test = found.parts
    if channels not in (1, 3) and not isinstance(train.pictures, Arrays):
        raise ValueError(f"channels {channels}: choose 1 (grey) or 3 (RGB)")
    notes = []
    if not test:
        held, rest = train.split(-(-len(train) // 10))
        count = f"{len(held):,} of the {len(train):,} training images, a tenth,"
        notes.append(f"no test images: {count} are held out to test on")
        test, train = [held], rest
    return kind, DataSet(train, test[0], path.name, tuple(found.problems), tuple(notes))


def without_damaged(data: DataSet) -> tuple[DataSet, list[tuple[int, int]]]:
    """The data set without images that cannot be decoded, and the height and width of each that can."""
    parts: list[Source] = []
    sizes: list[tuple[int, int]] = []
    skipped = list(data.skipped)
    for part, source in (("train", data.train), ("test", data.test)):
        files = source.pictures
        scan = partial(_scan, source)
        seen = cached(f"{part}{len(source)}", files.files(), scan) if isinstance(files, Files) else scan()
        usable = [index for index, found in enumerate(seen) if not isinstance(found, str)]
        skipped += [DamagedError(source.name(index), why) for index, why in enumerate(seen) if isinstance(why, str)]
        sizes += [tuple(seen[index]) for index in usable]
        parts.append(source.take(usable))
    return replace(data, train=parts[0], test=parts[1], skipped=tuple(skipped)), sizes


def _scan(source: Source) -> list[tuple[int, int] | str]:
    """Decode every image once: its height and width, or why it is damaged."""

    def look(index: int) -> tuple[int, int] | str:
        try:
            return source.image(index).shape[:2]
        except DamagedError as error:
            return error.reason

    return list(ordered_map(look, range(len(source)), len(usable_cores())))


def inspect_data(path: str | Path) -> dict[str, Any]:
    """Decode every image at `path` once; count those of each class, and list what is damaged. Sizes: height, width."""
    with naming(path):
        kind, found = find_data(path)
        data, sizes = without_damaged(found)
    names = data.train.classes
    counts = [np.bincount(source.labels, minlength=len(names)).tolist() for source in (data.train, data.test)]
    return {
        "path": str(path),
        "kind": kind,
        "train": len(data.train),
        "test": len(data.test),
        "smallest": np.min(sizes, axis=0).tolist(),
        "largest": np.max(sizes, axis=0).tolist(),
        "classes": [
            {"class": name, "train": one, "test": other} for name, one, other in zip(names, *counts, strict=True)
        ],
        "damaged": [{"name": problem.name, "reason": problem.reason} for problem in data.skipped],
    }
