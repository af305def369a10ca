"""Images that are arrays: handwritten digits and synthetic images, which need no file of yours, and NumPy's files."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import numpy as np

from conadv.task.data.files import class_names
from conadv.task.data.source import Arrays, DataSet, Found, Source, labelled, naming
from conadv.task.draws import mix_all

_NAMES = ("train_images", "train_labels", "test_images", "test_labels")
_ADVICE = "write it again with numpy.save or numpy.savez"
# A constant, not a user's seed: the synthetic pixels are the same in every run.
_PIXELS = 8128


def digits(train_size: int = 1437) -> DataSet:
    """scikit-learn's 1,797 handwritten digits of 8×8 grey pixels (UCI; Kaynak 1995).

    Their grey levels 0 to 16 are scaled to bytes, level × 255/16 rounded. All others are test images.
    """
    with np.load(Path(__file__).with_name("digits.npz"), allow_pickle=False) as kept:
        levels, labels = kept["levels"].astype(np.int64), kept["labels"].astype(np.int64)
    if not 10 <= train_size < len(labels):
        raise ValueError(f"train_size {train_size}: choose 10 to {len(labels) - 1} of the {len(labels)} digits")
    images = ((levels * 255 + 8) // 16).astype(np.uint8)[..., None]
    everything = Source(Arrays(images), labels, tuple(str(digit) for digit in range(10)))
    return DataSet(*everything.split(train_size), "digits")


def synthetic(shape: tuple[int, int, int], count: int) -> DataSet:
    """Noise of shape (H, W, C) in ten classes, for speed tests; a tenth as many test images. It takes little memory."""
    return DataSet(_noise(shape, count, 0), _noise(shape, max(1, count // 10), 1), "synthetic")


def _noise(shape: tuple[int, int, int], count: int, part: int) -> Source:
    """Image i is a window into one strip of random bytes, i bytes from its start."""
    height, width, channels = shape
    length = height * width * channels + count - 1
    strip = mix_all(_PIXELS, part, np.arange(-(-length // 8))).astype("<u8").view(np.uint8)
    windows = np.lib.stride_tricks.sliding_window_view(strip, height * width * channels)[:count]
    return Source(
        Arrays(windows.reshape(count, *shape)), np.arange(count) % 10, tuple(f"class {number}" for number in range(10))
    )


def find_arrays(path: Path, channels: int) -> Found | None:
    """The images and labels in this .npz file or folder of .npy files, which keep their channels."""
    arrays = []
    if path.is_dir():
        for name in _chosen([file.stem for file in path.glob("*.npy") if file.is_file()]):
            with naming(path / f"{name}.npy", _ADVICE):  # memory-mapped: arrays may be larger than memory
                arrays.append(np.load(path / f"{name}.npy", mmap_mode="r", allow_pickle=False))
    elif path.suffix == ".npz" and path.is_file():
        with naming(path, _ADVICE), np.load(path, allow_pickle=False) as stored:
            arrays = [stored[name] for name in _chosen(stored.files)]
    if not arrays:
        return None
    # (N, H, W) means grey, and Keras has labels of shape (N, 1).
    images = [array[..., None] if array.ndim == 3 else array for array in arrays[0::2]]
    labels = [np.array(array[:, 0] if array.shape[1:] == (1,) else array) for array in arrays[1::2]]
    for part, own in zip(images, labels, strict=True):
        if own.shape != part.shape[:1]:
            raise ValueError(f"{len(part)} images have labels of shape {own.shape}: give one number per image")
    return Found(labelled([Arrays(part) for part in images], labels, class_names(path)))


def _chosen(present: Collection[str]) -> list[str]:
    """The names of the arrays that are there, if they include those to train on."""
    return [name for name in _NAMES if name in present] if {*_NAMES[:2]} <= {*present} else []
