"""Images per second from disk to batch, decoded and augmented: ours against a plain PyTorch loop with Pillow.

    python benchmarks/data.py --workers 2

Both read the same JPEGs, crop and flip them at random and deliver batches of bytes. A lap is one pass over all of them.
"""

from __future__ import annotations

import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from alternate import alternate, arguments, compare, report
from conadv.task.augment import augmentation
from conadv.task.data import open_data
from conadv.task.stream import Stream

# Height and width of the images that are made: ImageNet's usual formats, and the larger ones in their share.
FORMATS = [(375, 500)] * 5 + [(500, 375)] * 2 + [(333, 500), (400, 400), (768, 1024)]


class PlainImages(Dataset[Tensor]):
    """The plain loop with Pillow: an image opened, cropped, resized, perhaps flipped."""

    def __init__(self, files: list[Path], size: int) -> None:
        self._files, self._size = files, size

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> Tensor:
        with Image.open(self._files[index]) as file:
            image = file.convert("RGB")
        area, ratio, left, top, flip = np.random.random(5)
        share, shape = np.sqrt(0.08 + 0.92 * area), np.exp(0.5 * np.log(4 / 3) * (2 * ratio - 1))
        width, height = min(1.0, share * shape) * image.width, min(1.0, share / shape) * image.height
        x, y = left * (image.width - width), top * (image.height - height)
        box = (x, y, x + width, y + height)
        image = image.resize((self._size, self._size), Image.Resampling.BILINEAR, box)
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if flip < 0.5 else image
        return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def make_images(folder: Path, count: int, formats: list[tuple[int, int]] = FORMATS) -> list[Path]:
    """JPEGs in folder/train and folder/val; those of train are returned."""
    random = np.random.default_rng(0)
    for part, images in (("train", count), ("val", 1)):
        place = folder / part / "made"
        place.mkdir(parents=True)
        for number in range(images):
            pixels = natural_noise(random, *formats[number % len(formats)])
            Image.fromarray(pixels).save(place / f"{number:06d}.jpg", quality=88)
    return sorted((folder / "train" / "made").iterdir())


def natural_noise(random: np.random.Generator, height: int, width: int) -> Any:
    """Noise with the spectrum of photographs, about 1/f, so that its JPEG is as large as theirs, some 100 kB."""
    down, across = np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None]
    frequency = np.hypot(down, across)
    frequency[0, 0] = 1
    shape = (4, height, width // 2 + 1)
    waves = (random.normal(size=shape) + 1j * random.normal(size=shape)) / frequency**1.15
    planes = np.fft.irfft2(waves, s=(height, width))
    planes /= planes.std(axis=(1, 2), keepdims=True)
    return (128 + 55 * (planes[0] + 0.35 * planes[1:])).clip(0, 255).astype(np.uint8).transpose(1, 2, 0)


def ours(folder: Path, size: int, batch_size: int, workers: int) -> int:
    """One epoch of the trainer's loader; returns how many images it gave."""
    source = open_data(None, folder).train
    stream = Stream(source, batch_size, batch_size // 4, 0, augmentation("resized-crop", size), workers)
    return sum(len(chunk[0]) for batch in stream.batches(0, stream.steps_per_epoch) for chunk in batch.chunks)


def plain(files: list[Path], size: int, batch_size: int, workers: int) -> DataLoader[Tensor]:
    processes = {"persistent_workers": True, "multiprocessing_context": "fork"} if workers else {}
    images = PlainImages(files, size)
    return DataLoader(images, batch_size, shuffle=True, drop_last=True, num_workers=workers, **processes)


def main() -> None:
    given = arguments(__doc__ or "", rounds=12, images=256, image_size=224, batch_size=64, workers=2)
    if given.images % given.batch_size or given.batch_size % 4:
        raise SystemExit("error: take a batch size that is a multiple of 4, and a whole number of batches")
    with TemporaryDirectory() as folder:
        files = make_images(Path(folder), given.images)
        loader = plain(files, given.image_size, given.batch_size, given.workers)
        runs = {
            "plain": lambda: sum(len(batch) for batch in loader),
            "conadv": lambda: ours(Path(folder), given.image_size, given.batch_size, given.workers),
        }
        laps = alternate(runs, given.rounds, clock=time.perf_counter)  # workers have a processor time of their own
    speeds = {f"{name}, images/s": round(given.images / float(np.median(lap))) for name, lap in laps.items()}
    report([compare(laps, "plain", "conadv")], given.json, workers=given.workers, **speeds)


if __name__ == "__main__":
    main()
