"""Data sets of other libraries: Hugging Face's, as hf:NAME_OR_PATH, and your own, as package.module:callable."""

from __future__ import annotations

from collections.abc import Sequence
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
    labels: Sequence[Any]

    def name(self, row: int) -> str:
        return f"{self.part}[{row}]"

    def picture(self, row: int) -> Picture:
        with naming(self.name(row)):
            item = self.items[row]
            image = item[self.column]
            if isinstance(image, dict) and (image["bytes"] or image["path"]):  # Hugging Face's, not decoded
                return open_picture(image["bytes"] or read_file(image["path"]), self.channels, self.name(row))
            pixels, agrees = _pixels(image, self.channels), bool(item[1] == self.labels[row])
        if not agrees:
            text = f"{item[1]} as an item, {self.labels[row]} in targets or before"
            raise ValueError(f"{self.name(row)} has two labels, {text}: make them agree")
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
    is_image = isinstance(image, np.ndarray) and image.dtype == np.uint8 and image.ndim == 3
    if not is_image or (image.shape[2] > 4 and {1, 3} & {*image.shape[:2]}):  # the axes are in another order
        raise ValueError("no image: it must be a Pillow image, an (H, W, C) array of bytes, or a (C, H, W) tensor")
    return image  # type: ignore[no-any-return]


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
        names = (f"{reference} train", f"{reference} test")[: len(parts)]
        items = [Items(name, part, 0, channels, own) for name, part, own in zip(names, parts, labels, strict=True)]
        found = _found(items, [getattr(part, "classes", ()) for part in parts])
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
        items = []
        for name, part in zip(("train", "test"), parts, strict=False):
            encoded = part.select_columns([image]).cast_column(image, datasets.Image(decode=False))
            items.append(Items(f"{reference} {name}", encoded, image, channels, part[label]))
        return _found(items, [getattr(part.features[label], "names", ()) for part in parts])


def _column(features: Any, kind: type, names: tuple[str, ...]) -> str:
    """The first column of this kind, or else with one of these names."""
    for name in (*(name for name in features if isinstance(features[name], kind)), *names):
        if name in features:
            return str(name)
    raise ValueError(f"its columns are {', '.join(features)}; it needs an image and a label")


def _found(parts: Sequence[Items], classes: Sequence[Any]) -> Found:
    """One or two parts, and the names of the classes in each, if it has names."""
    named = [*{tuple(map(str, names)): None for names in classes if len(names)}]
    if len(named) > 1:
        raise ValueError("training and test images have other classes: give both the same, in the same order")
    # -1 stands for a missing label, and is refused.
    labels = [np.array([-1 if label is None else label for label in part.labels]) for part in parts]
    return Found(labelled(parts, labels, named[0] if named else None))
