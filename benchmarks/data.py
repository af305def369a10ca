"""Images per second from disk to batch, decoded and augmented: ours against a plain PyTorch loop and webdataset.

    python benchmarks/data.py --json

Every candidate reads the same JPEGs, crops and flips them at random and delivers batches of bytes. A lap is one pass
over all of them; workers stay alive from lap to lap where the loader can keep them.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from conadv.study.bench.alternate import Laps, Tell, alternate
from conadv.study.bench.command import Measurement, report
from conadv.study.bench.result import Findings, Goal, Result, Spread, compare, wall_time, work_time
from conadv.task.augment import augmentation
from conadv.task.augment.geometry import DRAWS, random_box
from conadv.task.data import DataSet, Stream, open_data
from conadv.task.data.encoded import Encoded
from conadv.task.data.source import Pixels
from conadv.task.data.write_shards import write_shards
from libraries import absence, load
from scripts import run_script

_GOAL = Goal("≥", 1.5)
# Height and width of the images that are made: ImageNet's usual formats, and the larger ones in their share.
_FORMATS = [(375, 500)] * 5 + [(500, 375)] * 2 + [(333, 500), (400, 400), (768, 1024)]


@dataclass(frozen=True)
class Reading:
    """Sizes of the benchmark."""

    path: Path | None = None
    """An image folder or shards; None: ImageNet-sized JPEGs made for the benchmark."""
    images: int = 256
    """How many of them a lap reads."""
    size: int = 224
    """Height and width of the crops."""
    batch_size: int = 64
    workers: tuple[int, ...] = (0, 2)

    def __post_init__(self) -> None:
        if not 1 <= self.batch_size <= self.images or self.images % self.batch_size:
            raise ValueError(f"{self.images} images in batches of {self.batch_size}: take a whole number of batches")
        if not self.workers or min(self.workers) < 0:
            raise ValueError(f"workers {list(self.workers)}: give one number or more, each 0 or more")


def measure(reading: Reading, rounds: int, tell: Tell) -> Findings:
    """Time of the others divided by ours, and seconds per image, for each number of workers."""
    webdataset = load("webdataset")
    results: list[Result] = []
    with TemporaryDirectory(prefix="conadv-bench-") as folder:
        source = _images(reading, Path(folder))
        shards = write_shards(DataSet(source, source, "bench"), Path(folder) / "shards", reading.batch_size)
        train = [shard for shard in shards if shard.name.startswith("train")]
        for workers in reading.workers:
            runs = _runs(source, train, webdataset, reading, workers)
            results += _results(alternate(runs, rounds, tell=tell), reading, workers)
    notes = [
        f"{reading.images} images to {reading.size} × {reading.size} per lap; by wall time where there are "
        "workers, which are processes of their own",
        "plain: torch's DataLoader over Pillow, bytes in bytes out",
    ]
    return Findings(results, notes if webdataset else [*notes, absence("webdataset")])


def _results(laps: Laps, reading: Reading, workers: int) -> Iterator[Result]:
    clock = wall_time if workers else work_time
    end = f", {workers} workers"
    for name in laps:
        if name != "conadv":
            spread = compare(laps, name, "conadv", clock)
            wall = compare(laps, name, "conadv", wall_time).median
            yield Result(f"{name}/conadv{end}", spread, goal=_GOAL if name == "plain" else None, wall=wall)
    for name, times in laps.items():
        spread = Spread.of([clock(lap) / reading.images for lap in times])
        yield Result(f"{name}{end}", spread, unit="seconds_per_image")


def _runs(
    source: Encoded, shards: list[Path], webdataset: ModuleType | None, reading: Reading, workers: int
) -> dict[str, Callable[[], None]]:
    plain = _plain_loader(source, reading, workers)
    runs = {"conadv": lambda: _ours(source, reading, workers), "plain": lambda: _drain(plain, reading.images)}
    if webdataset:
        other = _webdataset_loader(webdataset, shards, reading, workers)
        runs["webdataset"] = lambda: _drain(other, reading.images)
    return runs


def _ours(source: Encoded, reading: Reading, workers: int) -> None:
    augment = augmentation("resized-crop", reading.size)
    stream = Stream(source, reading.batch_size, _piece(reading.batch_size), 0, augment, workers)
    batches = stream.batches(0, stream.steps_per_epoch)
    _drain((chunk for batch in batches for chunk in batch.chunks), reading.images)


def _piece(batch_size: int) -> int:
    """Images per chunk: as in training, a batch is a few chunks, which the workers share."""
    return next(size for size in (16, 8, 4, 2, 1) if batch_size % size == 0)


def _drain(batches: Any, images: int) -> None:
    seen = sum(len(batch[0]) for batch in batches)
    assert seen == images, (seen, images)


class _PlainImages(Dataset[tuple[Tensor, int]]):
    """The plain loop with Pillow: an image by index, opened, cropped, resized, perhaps flipped."""

    def __init__(self, source: Encoded, size: int) -> None:
        self._source, self._size = source, size

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return plain_image(self._source.encoded(index), self._size), int(self._source.labels[index])


def plain_image(data: bytes, size: int) -> Tensor:
    """A random crop as a tensor of bytes."""
    image = Image.open(io.BytesIO(data)).convert("RGB")
    draws = np.random.random(DRAWS)
    image = image.crop(random_box(image.height, image.width, draws[1:])).resize((size, size), Image.Resampling.BILINEAR)
    if draws[0] < 0.5:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def _plain_loader(source: Encoded, reading: Reading, workers: int) -> DataLoader[Any]:
    images = _PlainImages(source, reading.size)
    return DataLoader(images, reading.batch_size, shuffle=True, drop_last=True, **_processes(workers))


def _processes(workers: int) -> dict[str, Any]:
    """Forked, as they inherit what they read from; kept from lap to lap."""
    return {"num_workers": workers, "persistent_workers": True, "multiprocessing_context": "fork"} if workers else {}


def _webdataset_loader(webdataset: Any, shards: list[Path], reading: Reading, workers: int) -> Any:
    """As its documentation has it: shards shared out among the workers, a shuffle buffer, Pillow underneath."""
    images = (
        webdataset.WebDataset([str(shard) for shard in shards], shardshuffle=len(shards), empty_check=False)
        .shuffle(100)
        .to_tuple("jpg", "cls")
        .map_tuple(lambda data: plain_image(data, reading.size), int)
        .batched(reading.batch_size)
    )
    return webdataset.WebLoader(images, batch_size=None, **_processes(workers))


def _images(reading: Reading, folder: Path) -> Encoded:
    """As many images as a lap reads, from the path or made here."""
    if reading.path is None:
        _make_images(folder / "made", reading.images)
    source = open_data("path", reading.path or folder / "made").train
    if not isinstance(source, Encoded):
        raise ValueError(f"{reading.path}: holds arrays, which nothing has to decode; give a folder or shards")
    if len(source) < reading.images:
        raise ValueError(f"{reading.path}: {len(source)} training images; take {len(source)} or fewer")
    return source.take(range(reading.images))


def _make_images(folder: Path, count: int) -> None:
    random = np.random.default_rng(0)
    for part, images in (("train", count), ("val", 1)):
        place = folder / part / "made"
        place.mkdir(parents=True)
        for number in range(images):
            pixels = natural_noise(random, *_FORMATS[number % len(_FORMATS)])
            Image.fromarray(pixels).save(place / f"{number:06d}.jpg", quality=88)


def natural_noise(random: np.random.Generator, height: int, width: int) -> Pixels:
    """Noise with the spectrum of photographs, about 1/f, so that its JPEG is as large as theirs, some 100 kB."""
    down, across = np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None]
    frequency = np.hypot(down, across)
    frequency[0, 0] = 1
    shape = (4, height, width // 2 + 1)
    waves = (random.normal(size=shape) + 1j * random.normal(size=shape)) / frequency**1.15
    planes = np.fft.irfft2(waves, s=(height, width))
    planes /= planes.std(axis=(1, 2), keepdims=True)
    colours = planes[0] + 0.35 * planes[1:]
    pixels: Pixels = (128 + 55 * colours).clip(0, 255).astype(np.uint8).transpose(1, 2, 0)
    return pixels


def main(
    *,
    rounds: int = 12,
    path: Path | None = None,
    images: int = Reading.images,
    image_size: int = Reading.size,
    batch_size: int = Reading.batch_size,
    json: bool = False,
) -> None:
    """Time reading images from disk to batch against a plain PyTorch loop and webdataset."""
    reading = Reading(path, images, image_size, batch_size)
    report({"data": Measurement(measure, reading, rounds, one_core=False)}, json)


if __name__ == "__main__":
    run_script(main)
