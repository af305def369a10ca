"""Memory does not grow with the batch: images, twins and activations are those of one chunk at a time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from support.launcher import TESTS

MIB = 2**20


def write_images(root: Path, count: int, size: int) -> Path:
    """A folder in the shape of ImageNet."""
    random = np.random.default_rng(0)
    for part, images in (("train", count), ("val", 8)):
        for number in range(images):
            folder = root / part / f"n{number % 4:08d}"
            folder.mkdir(parents=True, exist_ok=True)
            coarse = Image.fromarray(random.integers(0, 256, (8, 8, 3), np.uint8))
            coarse.resize((size, size), Image.Resampling.BICUBIC).save(folder / f"{number}.JPEG", quality=90)
    return root


def train(*words: str) -> tuple[dict[str, Any], int]:
    """What `conadv train` says at its end, and the most bytes that it had in memory."""
    command = [sys.executable, "-m", "conadv", "train", *words, "--json"]
    # What is freed is given back at once, so that the peak is that of the tensors and not of a scattered heap.
    environment = {**os.environ, "PYTHONPATH": str(TESTS), "MALLOC_MMAP_THRESHOLD_": "65536"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE)
    with process.stdout as out:
        said = out.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    return json.loads(said), usage.ru_maxrss * 1024


def flags(**fields: object) -> list[str]:
    texts = ((f"--{key.replace('__', '.').replace('_', '-')}", str(value)) for key, value in fields.items())
    return [word for pair in texts for word in pair]


def test_a_batch_sixteen_times_as_large_takes_no_more_memory(tmp_path: Path) -> None:
    """Whole, the further 240 images of a batch would be 34 MiB as bytes, and 138 MiB as floats."""
    data = write_images(tmp_path / "images", 256, 32)
    fields = {
        "model": "support.tiny:pooled",
        "method": "conadv",
        "chunk_size": 16,
        "max_steps": 2,
        "threads": 1,
        "data__path": data,
        "data__train_size": "none",
        "data__image_size": 224,
        "data__augment": "resized-crop",
    }
    small, large = (
        train("digits", *flags(batch_size=size, run=tmp_path / str(size), **fields))[1] for size in (16, 256)
    )
    assert large - small < 20 * MIB
