"""The benchmark of loaders runs, compares the same work, and says what it compared."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import data
from conadv.study.bench.alternate import silent
from data import Reading, measure, natural_noise, plain_image

SMALL = Reading(images=4, size=16, batch_size=2, workers=(0, 1))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONADV_CACHE", str(tmp_path / "cache"))


def test_each_number_of_workers_has_its_ratio_and_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "_FORMATS", [(30, 40)])
    monkeypatch.setattr(data, "load", lambda name: None)
    told = []
    found = measure(SMALL, 2, lambda done, total: told.append((done, total)))
    names = [result.to_json()["name"] for result in found.results]
    assert names == [
        *("plain/conadv, 0 workers", "conadv, 0 workers", "plain, 0 workers"),
        *("plain/conadv, 1 workers", "conadv, 1 workers", "plain, 1 workers"),
    ]
    assert all(result.spread.n == 2 and result.spread.median > 0 for result in found.results)
    assert "without webdataset, which is not installed" in found.notes[-1]
    assert told == [(1, 3), (2, 3), (3, 3)] * 2


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # webdataset leaves its files open
def test_another_loader_reads_the_same_images(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "_FORMATS", [(30, 40)])
    found = measure(Reading(images=4, size=16, batch_size=2, workers=(0,)), 1, silent)
    assert "webdataset/conadv, 0 workers" in [result.to_json()["name"] for result in found.results]


def test_a_users_own_images_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "_FORMATS", [(30, 40)])
    monkeypatch.setattr(data, "load", lambda name: None)
    data._make_images(tmp_path / "own", 5)
    own = Reading(tmp_path / "own", images=4, size=16, batch_size=2, workers=(0,))
    assert len(measure(own, 1, silent).results) == 3
    with pytest.raises(ValueError, match="own: 5 training images; take 5 or fewer"):
        measure(Reading(tmp_path / "own", images=6, batch_size=2), 1, silent)


def test_arrays_have_nothing_to_decode(tmp_path: Path) -> None:
    for part in ("train", "test"):
        np.save(tmp_path / f"{part}_images.npy", np.zeros((4, 3, 3), np.uint8))
        np.save(tmp_path / f"{part}_labels.npy", np.zeros(4, int))
    with pytest.raises(ValueError, match="holds arrays"):
        measure(Reading(tmp_path, images=4, batch_size=2), 1, silent)


@pytest.mark.parametrize(
    "wrong", [{"images": 5, "batch_size": 2}, {"batch_size": 0}, {"workers": ()}, {"workers": (-1,)}]
)
def test_wrong_sizes_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"images in batches|workers"):
        Reading(**wrong)


def test_the_plain_loop_makes_the_same_kind_of_tensor() -> None:
    file = io.BytesIO()
    Image.fromarray(natural_noise(np.random.default_rng(0), 50, 60)).save(file, "JPEG")
    crop = plain_image(file.getvalue(), 24)
    assert crop.shape == (3, 24, 24)
    assert str(crop.dtype) == "torch.uint8"


def test_made_images_compress_as_photographs_do() -> None:
    """ImageNet's have about 110 kB at 500 × 375; white noise would have three times that, smooth colours a tenth."""
    file = io.BytesIO()
    Image.fromarray(natural_noise(np.random.default_rng(0), 375, 500)).save(file, "JPEG", quality=88)
    assert 70_000 < len(file.getvalue()) < 140_000
