"""Ranks that see other data than rank 0, or none, end with one line on all ranks."""

from __future__ import annotations

import shutil
from pathlib import Path

from support import tiny
from task.data.samples import jpeg_set, write_folder

SAMPLES = jpeg_set(25, height=8, width=8)  # which the small net takes


def words(data: Path) -> list[str]:
    fields = {"data.name": "none", "data.train_size": "none", "data.augment": "none", "data.path": data}
    return tiny.words(**fields)


def test_a_rank_with_other_pixels_is_named(start, tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    write_folder(here, SAMPLES[:24], SAMPLES[::4])
    shutil.copytree(here, there)
    (there / "train" / "class0" / "0000.JPEG").write_bytes(SAMPLES[24][0])
    run = start(words(here), 2, odd=words(there))
    assert run.statuses() == [2, 2], run.said()
    (line,) = run.complaints()
    assert line.startswith("error: rank 1 (lane 1, clean+adv+attack): training pixels is ")


def test_a_rank_without_the_data_is_named(start, tmp_path):
    write_folder(tmp_path / "here", SAMPLES[:24], SAMPLES[::4])
    run = start(words(tmp_path / "here"), 2, odd=words(tmp_path / "nowhere"))
    assert run.statuses() == [2, 2], run.said()
    (line,) = run.complaints()
    assert line.startswith("error: rank 1 (lane 1, clean+adv+attack): ") and str(tmp_path / "nowhere") in line, line
