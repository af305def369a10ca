"""Ranks that see other data than rank 0, or none, end with one line on all ranks."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from support import tiny
from task.data.samples import jpeg_set, write_folder, write_shards_by_hand

WRITERS = {"folder": write_folder, "shards": write_shards_by_hand}


def write(kind: str, root: Path, images: int) -> str:
    """So many training images in two classes; 8 pixels, which the small net takes."""
    samples = jpeg_set(images, height=8, width=8)
    return str(WRITERS[kind](root, samples, samples[::4]))


def words(data: Path) -> list[str]:
    fields = {"data.name": "none", "data.train_size": "none", "data.augment": "none", "data.path": data}
    return tiny.words(**fields)


def test_data_that_rank_0_cannot_use_is_one_line_on_all_ranks(start, tmp_path):
    root = write_folder(tmp_path / "data", jpeg_set(24, height=8, width=8), jpeg_set(4, height=8, width=8))
    (root / "train" / "empty").mkdir()
    run = start(words(root), 2)
    assert run.statuses() == [2, 2], run.said()
    (line,) = run.complaints()
    said = f"{root / 'train' / 'empty'}: a class without images; "
    assert line.startswith(f"error: rank 0 (lane 0, clean+adv+attack): {said}")
    assert not run.folder.exists()


def test_a_rank_with_other_pixels_is_named(start, tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    write("folder", here, 24)
    shutil.copytree(here, there)
    other = jpeg_set(25, height=8, width=8)[-1][0]
    (there / "train" / "class0" / "0000.JPEG").write_bytes(other)
    run = start(words(here), 2, odd=words(there))
    assert run.statuses() == [2, 2], run.said()
    (line,) = run.complaints()
    assert line.startswith("error: rank 1 (lane 1, clean+adv+attack): training pixels is ")


@pytest.mark.parametrize("kind", ["folder", "shards"])
def test_a_rank_without_the_data_is_named(kind, start, tmp_path):
    write(kind, tmp_path / "here", 24)
    run = start(words(tmp_path / "here"), 2, odd=words(tmp_path / "nowhere"))
    assert run.statuses() == [2, 2], run.said()
    (line,) = run.complaints()
    assert line.startswith("error: rank 1 (lane 1, clean+adv+attack): ") and str(tmp_path / "nowhere") in line, line
