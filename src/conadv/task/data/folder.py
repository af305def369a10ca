"""Image folders with ImageNet's structure: train/CLASS/*.jpg and val/CLASS/*.jpg."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from conadv.task.data.decode import EXTENSIONS
from conadv.task.data.files import Files
from conadv.task.data.source import DamagedError

_TRAIN, _TEST = ("train", "training"), ("val", "valid", "validation", "test")


def find_folders(root: Path) -> tuple[Path, Path | None] | None:
    """The folders of training and test images below `root`; None if there are no training images."""
    train, test = (next((root / name for name in names if (root / name).is_dir()), None) for names in (_TRAIN, _TEST))
    return (train, test) if train else None


def has_class_folders(root: Path) -> bool:
    """Whether there are images one folder below `root`."""
    return any(_is_image(file.name) for file in root.glob("*/*"))


def folder_classes(train: Path, test: Path | None) -> tuple[str, ...]:
    """The names of the class folders, sorted; their order gives the class numbers."""
    classes = _subfolders(train)
    if not classes:
        raise DamagedError(train, "no class folders; put the images of each class in a folder of its own")
    if unknown := sorted(set(_subfolders(test) if test else ()) - set(classes)):
        raise DamagedError(test, f"{train} has no class {unknown[0]!r} ({len(unknown)} such folders)")
    return classes


def list_folder(
    root: Path, folder: Path, classes: tuple[str, ...], channels: int
) -> tuple[Files, NDArray[np.int64], list[DamagedError]]:
    """The images of every class, sorted by name, their labels, and the classes without images."""
    names: list[str] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        members = sorted(
            os.path.join(place, file)  # noqa: PTH118  # a Path for each of a million files takes longer
            for place, _, files in os.walk(folder / name)
            for file in files
            if _is_image(file)
        )
        names += (member.removeprefix(f"{root}{os.sep}") for member in members)
        labels += [label] * len(members)
    empty = [classes[label] for label in sorted(set(range(len(classes))) - set(labels))]
    problems = [DamagedError(folder / name, "a class without images") for name in empty]
    return Files(str(root), names, channels), np.array(labels, np.int64), problems


def _subfolders(folder: Path) -> tuple[str, ...]:
    return tuple(sorted(one.name for one in os.scandir(folder) if one.is_dir() and not one.name.startswith(".")))


def _is_image(name: str) -> bool:
    return not name.startswith(".") and name.rpartition(".")[2].lower() in EXTENSIONS
