"""Which files and which images are for training and which for the test."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from conadv.task.data.draws import permutation
from conadv.task.data.source import Labels

# In this order: where there is a validation part, the test part has no public labels (ImageNet's on the hub).
_TEST_WORDS = ("val", "test")
# Not a user's seed: a part of the data is the same in every run.
_SPLIT = 1797


def split_files(files: Iterable[Path], root: Path) -> tuple[list[Path], list[Path]]:
    """The training files and the test files among these, by the words in their paths below `root`."""
    parts: dict[str, list[Path]] = {"train": [], "val": [], "test": []}
    for file in sorted(files):
        words = [word for word in parts if re.search(word, str(file.relative_to(root)).lower())]
        if len(words) != 1:
            found = " and ".join(words) if words else "none of them"
            raise ValueError(f"{file}: its name has {found}; name it by one of train, val, test")
        parts[words[0]].append(file)
    test = next((parts[word] for word in _TEST_WORDS if parts[word]), [])
    for kind, chosen in (("train", parts["train"]), ("val or test", test)):
        if not chosen:
            raise ValueError(f"{root}: no file has {kind} in its name; training and test images are both needed")
    return parts["train"], test


def class_names(root: Path) -> tuple[str, ...] | None:
    """The lines of classes.txt, where that file lies beside the data."""
    file = root / "classes.txt"
    return tuple(file.read_text("utf-8").splitlines()) if file.is_file() else None


def stratified(labels: Labels, classes: int, size: int) -> NDArray[np.bool_]:
    """A mask that takes `size` images, round and round the classes, until it has enough."""
    shuffled = permutation(len(labels), _SPLIT)
    turns = np.empty(len(labels), np.int64)
    for label in range(classes):
        members = shuffled[labels[shuffled] == label]
        turns[members] = np.arange(len(members))
    first = np.lexsort((labels, turns))[:size]
    mask = np.zeros(len(labels), np.bool_)
    mask[first] = True
    return mask
