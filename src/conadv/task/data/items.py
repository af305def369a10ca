"""Data sets of other libraries: Hugging Face's, as hf:NAME_OR_PATH, and your own, as package.module:callable."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from conadv.task.data.decode import open_picture, pixels_of
from conadv.task.data.files import read_file
from conadv.task.data.source import DamagedError, Found, Picture, Pixels, labelled, naming
from conadv.task.libraries import load_callable

HUB = "hf:"
_TEST_SPLITS = ("validation", "val", "valid", "test")
_IMAGES = ("image", "img")
_LABELS = ("label", "labels", "fine_label", "cls", "class")


@dataclass(frozen=True)
class Items:
    """Pictures that are the items of a data set, each read when it is needed."""

    part: str
    items: Any
    column: int | str
    """Where an item has its image."""
    channels: int

    def name(self, row: int) -> str:
        return f"{self.part}[{row}]"

    def picture(self, row: int) -> Picture:
        with naming(self.name(row)):
            image = self.items[row][self.column]
            if isinstance(image, dict) and (image["bytes"] or image["path"]):  # Hugging Face's, not decoded
                return open_picture(image["bytes"] or read_file(image["path"]), self.channels, self.name(row))
            pixels = _pixels(image, self.channels)
        return Picture(pixels.shape[0], pixels.shape[1], lambda shrink: pixels)


def _pixels(image: Any, channels: int) -> Pixels:
    """The (H, W, C) bytes of a decoded image, whatever an item has it as."""
    if isinstance(image, Image.Image):
        return pixels_of(image, channels)
    if isinstance(image, torch.Tensor):
        if image.is_floating_point():
            if not 0 <= image.min() <= image.max() <= 1:
                raise ValueError("an image with floats outside [0, 1]: leave normalization to the model")
            image = (image * 255).round().to(torch.uint8)
        image = image.movedim(0, -1).numpy()
    if not isinstance(image, np.ndarray) or image.dtype != np.uint8 or image.ndim != 3:
        raise ValueError("no image: it must be a Pillow image, an (H, W, C) array of bytes, or a (C, H, W) tensor")
    height, width, found = image.shape
    if found > 4 and (height in (1, 3) or width in (1, 3)):
        raise ValueError(
            f"an image of height {height} and width {width} with {found} channels: order the axes of an array as "
            "(H, W, C), and those of a tensor as (C, H, W)"
        )
    return image


def open_own(reference: str, channels: int) -> Found:
    """Training and test images of `package.module:callable`.

    docs/command-line.md says what it returns. The attributes `targets` and `classes`, if there are any, are the labels,
    which are otherwise read from the items, and the names of the classes.
    """
    with naming(reference, "return a Dataset, or a pair of them, of (image, label)"):
        made = load_callable(reference)()
        parts = made if isinstance(made, tuple) else (made,)
        labels = [
            part.targets if hasattr(part, "targets") else [part[row][1] for row in range(len(part))] for part in parts
        ]
        found = _found(reference, parts, 0, labels, getattr(parts[0], "classes", ()), channels)
        with suppress(DamagedError):  # reported when the image is needed
            train = found.parts[0]
            if len(train) and not np.array_equal(train.image(0), train.image(0)):
                raise ValueError("its first image is another one each time: leave augmentation to the trainer")
    return found


def open_hub(reference: str, channels: int) -> Found:
    """Training and test images of hf:NAME, a data set of the hub, or hf:PATH, a folder of Parquet or `save_to_disk`."""
    try:
        import datasets
    except ImportError as error:
        raise ValueError("it needs the datasets library: pip install 'conadv[hf]'") from error
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # an error is our own line
    with naming(reference, "check the name or the files"):
        path = reference.removeprefix(HUB)
        saved = (Path(path) / "dataset_dict.json").is_file()
        splits = datasets.load_from_disk(path) if saved else datasets.load_dataset(path)
        if "train" not in splits:
            raise ValueError(f"its splits are {', '.join(splits)}; it needs one called train")
        parts = [splits[name] for name in ("train", *[name for name in _TEST_SPLITS if name in splits][:1])]
        features = parts[0].features
        image, label = _column(features, datasets.Image, _IMAGES), _column(features, datasets.ClassLabel, _LABELS)
        labels = [part[label] for part in parts]
        encoded = [part.select_columns([image]).cast_column(image, datasets.Image(decode=False)) for part in parts]
        return _found(reference, encoded, image, labels, getattr(features[label], "names", ()), channels)


def _column(features: Any, kind: type, names: tuple[str, ...]) -> str:
    """The first column of this kind, or else with one of these names."""
    for name in (*(name for name in features if isinstance(features[name], kind)), *names):
        if name in features:
            return str(name)
    raise ValueError(f"its columns are {', '.join(features)}; it needs an image and a label")


def _found(
    reference: str,
    parts: Sequence[Any],
    column: int | str,
    labels: Sequence[Any],
    classes: Iterable[Any],
    channels: int,
) -> Found:
    """The items of one or two parts; -1 stands for a missing label, and is refused."""
    names = (f"{reference} train", f"{reference} test")[: len(parts)]
    items = [Items(name, part, column, channels) for name, part in zip(names, parts, strict=True)]
    numbers = [np.array([-1 if label is None else int(label) for label in own], np.int64) for own in labels]
    return Found(labelled(items, numbers, tuple(map(str, classes))))
