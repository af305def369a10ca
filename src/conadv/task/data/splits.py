"""Split files and images into training and test."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from conadv.task.data.bounds import MAX_CLASSES
from conadv.task.data.draws import permutation
from conadv.task.data.regular import named_damage, read_whole
from conadv.task.data.source import Labels

_WORDS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validation"), "val"),
    **dict.fromkeys(("test", "testing"), "test"),
}
# A constant, not a user's seed: the split is the same in every run.
_SPLIT = 1797
_MAX_NAMES = 2**24  # bytes of classes.txt


def split_files(files: Iterable[Path], root: Path) -> tuple[list[Path], list[Path]]:
    """Split files into training and test files, by the words in their paths below `root`."""
    parts: dict[str, list[Path]] = {"train": [], "val": [], "test": []}
    for file in sorted(files):
        words = re.findall("[a-z]+", str(file.relative_to(root)).lower())
        kinds = sorted({_WORDS[word] for word in words if word in _WORDS})
        if len(kinds) != 1:
            found = " and ".join(kinds) or "none"
            raise ValueError(
                f"{file}: rename it, so that its path has one of the words train, val, test (now: {found})"
            )
        parts[kinds[0]].append(file)
    # A data set with both usually has no public test labels (ImageNet on the hub).
    test = parts["val"] or parts["test"]
    for kind, chosen in (("train", parts["train"]), ("val or test", test)):
        if not chosen:
            raise ValueError(f"{root}: no file has {kind} in its name; training and test images are both needed")
    return parts["train"], test


def class_names(root: Path) -> tuple[str, ...] | None:
    """The lines of classes.txt, if there is one next to the data."""
    file = root / "classes.txt"
    if not file.is_file():
        return None
    with named_damage(file, "write one class per line, as UTF-8"):
        names = tuple(read_whole(file, _MAX_NAMES).decode("utf-8").splitlines())
        if len(names) > MAX_CLASSES:
            raise ValueError(f"{len(names):,} classes are more than the {MAX_CLASSES:,} that are supported")
    return names


def stratified(labels: Labels, classes: int, size: int) -> NDArray[np.bool_]:
    """A mask of `size` images, taken from the classes in turn."""
    shuffled = permutation(len(labels), _SPLIT)
    turns = np.empty(len(labels), np.int64)
    by_class = shuffled[np.argsort(labels[shuffled], kind="stable")]
    counts = np.bincount(labels, minlength=classes)
    turns[by_class] = np.arange(len(labels)) - np.repeat(np.cumsum(counts) - counts, counts)
    first = np.lexsort((labels, turns))[:size]
    mask = np.zeros(len(labels), np.bool_)
    mask[first] = True
    return mask
