"""Memory does not grow with the batch: images, twins and activations are those of one chunk at a time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from support import tiny
from support.launcher import TESTS
from task.data.samples import jpeg_set, write_folder

MIB = 2**20


def memory_of(words: list[str]) -> int:
    """The most bytes that `conadv train` had in memory."""
    command = [sys.executable, "-m", "conadv", "train", *words, "--quiet"]
    # What is freed is given back at once, so that the peak is that of the tensors and not of a scattered heap.
    environment = {**os.environ, "PYTHONPATH": str(TESTS), "MALLOC_MMAP_THRESHOLD_": "65536"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    return usage.ru_maxrss * 1024


def test_a_batch_sixteen_times_as_large_takes_no_more_memory(tmp_path: Path) -> None:
    """Whole, the further 240 images of a batch would be 34 MiB as bytes, and 138 MiB as floats."""
    samples = jpeg_set(256, height=32, width=32)
    fields = {
        "model": "support.tiny:pooled",
        "precision": "float32",
        "chunk_size": 16,
        "max_steps": 2,
        "data__name": "none",
        "data__path": write_folder(tmp_path / "images", samples, samples[::32]),
        "data__train_size": "none",
        "data__image_size": 224,
        "data__augment": "resized-crop",
    }
    small, large = (memory_of(tiny.words(batch_size=size, run=tmp_path / str(size), **fields)) for size in (16, 256))
    assert large - small < 20 * MIB
