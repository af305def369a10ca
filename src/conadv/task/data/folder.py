"""Image folders with ImageNet's structure: train/CLASS/*.jpg and val/CLASS/*.jpg."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from conadv.task.data.bounds import MAX_CLASSES
from conadv.task.data.decode import EXTENSIONS
from conadv.task.data.encoded import Listing
from conadv.task.data.source import DamagedError
from conadv.task.data.stored import Stored

TRAIN_FOLDERS = ("train", "training")
TEST_FOLDERS = ("val", "valid", "validation", "test")


def split_folders(root: Path) -> tuple[Path, Path] | None:
    """The folders of training and test images below `root`, or None unless it has both."""
    train = next((root / name for name in TRAIN_FOLDERS if (root / name).is_dir()), None)
    test = next((root / name for name in TEST_FOLDERS if (root / name).is_dir()), None)
    return (train, test) if train and test else None


def has_class_folders(root: Path) -> bool:
    """Whether there are images one folder below `root`."""
    return any(file.suffix[1:].lower() in EXTENSIONS for file in root.glob("*/*"))


def folder_classes(train: Path, test: Path) -> tuple[str, ...]:
    """The names of the class folders, sorted; their order gives the class numbers."""
    classes = tuple(sorted(_subfolders(train)))
    if not classes:
        raise ValueError(f"{train}: no class folders; put the images of each class in a folder of its own")
    if len(classes) > MAX_CLASSES:
        raise ValueError(
            f"{train}: {len(classes):,} class folders are more than the {MAX_CLASSES:,} that are supported"
        )
    if unknown := sorted(set(_subfolders(test)) - set(classes)):
        raise ValueError(f"{test / unknown[0]}: {train} has no class of that name ({len(unknown)} such folders)")
    return classes


def list_folder(folder: Path, classes: tuple[str, ...], may_lack: bool) -> Listing:
    """List the images of every class, sorted by name; `may_lack` allows classes without images."""
    paths: list[str] = []
    labels: list[int] = []
    problems = []
    for label, name in enumerate(classes):
        members = sorted(_images(folder / name)) if (folder / name).is_dir() else []
        paths += members
        labels += [label] * len(members)
        if not members and not may_lack:
            problems.append(DamagedError(str(folder / name), "a class without images"))
    return Listing(paths, np.array(labels, np.int64), Stored(paths), tuple(problems))


def _subfolders(folder: Path) -> list[str]:
    return [entry.name for entry in os.scandir(folder) if entry.is_dir() and not entry.name.startswith(".")]


def _images(folder: Path) -> Iterator[str]:
    for place, _, files in os.walk(folder):
        for file in files:
            if not file.startswith(".") and file.rpartition(".")[2].lower() in EXTENSIONS:
                yield f"{place}{os.sep}{file}"
