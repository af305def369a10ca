"""Mixup and CutMix as published, one number after the other, and their draws as functions of a seed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from conadv.config import load_recipe
from conadv.core.batch import Chunked
from conadv.task.augment import augmentation
from conadv.task.augment.mixup import Mix, beta, cut_box, cutmix, mixup, soft_labels
from conadv.task.data.arrays import digits
from conadv.task.draws import mix_all
from conadv.task.stream import Stream
from conadv.trainer.build import build_stream
from conadv.trainer.build_task import build_task

IMAGES = np.random.default_rng(0).integers(0, 256, (5, 3, 8, 6), dtype=np.uint8)
LABELS = np.array([0, 2, 2, 1, 3])


@given(st.floats(0, 1))
def test_mixup_is_a_weighted_mean_with_the_image_before(share: float) -> None:
    ours = mixup(IMAGES, share)
    for place in range(5):
        exact = share * IMAGES[place].astype(float) + (1 - share) * IMAGES[place - 1].astype(float)
        assert np.abs(ours[place] - exact).max() <= 0.5 + 1e-4


@given(st.floats(0, 1))
def test_labels_are_shares_of_two_classes(share: float) -> None:
    ours = soft_labels(LABELS, 4, share)
    assert ours.dtype == np.float32
    for place, label in enumerate(LABELS):
        expected = np.zeros(4)
        expected[label] += share
        expected[LABELS[place - 1]] += 1 - share
        np.testing.assert_allclose(ours[place], expected, atol=1e-6)


@given(st.integers(1, 40), st.integers(1, 40), st.floats(0, 1), st.floats(0, 0.999), st.floats(0, 0.999))
def test_a_box_is_that_of_the_publication(height: int, width: int, share: float, across: float, down: float) -> None:
    """Of sides W √(1-λ) and H √(1-λ) around a uniform pixel, cut off at the border."""
    left, top, right, bottom = cut_box(height, width, share, np.array([across, down]))
    assert 0 <= left <= right <= width
    assert 0 <= top <= bottom <= height
    x, y = int(across * width), int(down * height)
    wide, high = width * np.sqrt(1 - share), height * np.sqrt(1 - share)
    assert abs(left - max(0, x - wide / 2)) <= 1
    assert abs(right - min(width, x + wide / 2)) <= 1
    assert abs(top - max(0, y - high / 2)) <= 1
    assert abs(bottom - min(height, y + high / 2)) <= 1


def test_a_box_of_the_image_before_is_pasted() -> None:
    ours = cutmix(IMAGES, (1, 2, 4, 7))
    for place in range(5):
        for y in range(8):
            for x in range(6):
                source = place - 1 if 1 <= x < 4 and 2 <= y < 7 else place
                assert (ours[place, :, y, x] == IMAGES[source, :, y, x]).all()


@pytest.mark.parametrize("alpha", [0.1, 1.0, 30.0])
def test_shares_follow_the_beta_distribution(alpha: float) -> None:
    drawn = [beta(alpha, mix_all(5, index)) for index in range(3000)]
    assert stats.kstest(drawn, stats.beta(alpha, alpha).cdf).pvalue > 1e-3


def test_an_alpha_near_0_leaves_images_nearly_as_they_are() -> None:
    drawn = np.array([beta(1e-6, mix_all(1, index)) for index in range(200)])
    assert ((drawn < 1e-9) | (drawn > 1 - 1e-9)).all()


def mixed(mix: Mix, seed: int) -> tuple[np.ndarray, np.ndarray]:
    (images,), labels = mix((IMAGES,), LABELS, 4, mix_all(seed))
    return images, labels


@pytest.mark.parametrize("seed", range(20))
def test_the_labels_of_cutmix_count_the_pixels(seed: int) -> None:
    """On images that are all of one colour each, the share of a label is that of its colour."""
    flat = np.broadcast_to(np.arange(5, dtype=np.uint8)[:, None, None, None], (5, 1, 8, 6))
    (images,), labels = Mix(cutmix=1.0)((flat,), np.arange(5), 5, mix_all(seed))
    for image, label in zip(images, labels, strict=True):
        np.testing.assert_allclose(np.bincount(image.ravel(), minlength=5) / 48, label, atol=1e-6)


def test_with_both_each_chunk_has_one_of_them() -> None:
    outcomes = []
    for seed in range(200):
        images, _ = mixed(Mix(mixup=1.0, cutmix=1.0), seed)
        candidates = [mixed(alone, seed)[0] for alone in (Mix(mixup=1.0), Mix(cutmix=1.0))]
        outcomes.append([np.array_equal(images, one) for one in candidates])
    chosen = np.array(outcomes)
    assert chosen.any(axis=1).all()
    assert abs(chosen[:, 0].mean() - 0.5) < 0.18


def test_views_are_mixed_alike() -> None:
    (first, second), _ = Mix(mixup=0.4)((IMAGES, 255 - IMAGES), LABELS, 4, mix_all(3))
    assert np.abs(first.astype(int) + second - 255).max() <= 1


def test_alphas_that_say_nothing_are_refused() -> None:
    for alphas in ((0.0, 0.0), (-1.0, 0.0)):
        with pytest.raises(ValueError, match="choose alphas of 0 or more, not both 0"):
            Mix(*alphas)


def make_stream(batch_size: int, workers: int = 0) -> Stream:
    return Stream(digits(100).train, batch_size, 10, 4, augmentation("crop-flip"), workers, mix=Mix(1.0, 1.0))


def joined(batch: Chunked) -> list[torch.Tensor]:
    return [torch.cat(parts) for parts in zip(*batch.chunks, strict=True)]


def test_a_stream_mixes_each_chunk_whoever_asks_for_it() -> None:
    stream = make_stream(50)
    for workers, chunks in ((0, range(5)), (2, range(5)), (0, (3,)), (2, (1, 4))):
        for step, batch in enumerate(make_stream(50, workers).batches(0, 5, chunks)):
            expected = [torch.cat(parts) for parts in zip(*(stream.chunk(step, c) for c in chunks), strict=True)]
            assert all(map(torch.equal, joined(batch), expected))


def test_a_stream_gives_shares_of_the_classes_and_other_ones_in_each_step() -> None:
    images, labels = make_stream(50).chunk(0, 0)
    assert (images.dtype, labels.dtype, tuple(labels.shape)) == (torch.uint8, torch.float32, (10, 10))
    torch.testing.assert_close(labels.sum(1), torch.ones(10))
    shares = {tuple(sorted(make_stream(50).chunk(step, c)[1].unique().tolist())) for step in range(4) for c in range(5)}
    assert len(shares) == 20


@pytest.mark.parametrize("precision", ["float32", "float64", "bfloat16"])
def test_the_loss_of_a_mixture_is_the_mixture_of_losses(precision: str) -> None:
    """Cross-entropy is linear in the label."""
    recipe = load_recipe("digits", {"data.mixup": "0.4", "precision": precision, "label_smoothing": "0.1"})
    task = build_task(recipe, torch.device("cpu"))
    labels = torch.tensor([1, 4, 4])
    outputs = torch.randn(3, 10, dtype=torch.float64).to(torch.bfloat16 if precision == "bfloat16" else torch.float64)
    soft = torch.from_numpy(soft_labels(labels.numpy(), 10, 0.3))
    own, before = (
        F.cross_entropy(outputs.double(), which, label_smoothing=0.1, reduction="none")
        for which in (labels, labels.roll(1))
    )
    torch.testing.assert_close(task.loss(outputs, soft).double(), (0.3 * own + 0.7 * before).mean(), rtol=1e-6, atol=0)
    assert build_stream(recipe, task).chunk(0, 0)[1].shape == (100, 10)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"data.mixup": "0.2", "chunk_size": "1"}, "--chunk-size is 1: raise it"),
        ({"data.cutmix": "1", "attack.targeted": "true"}, r"drop --attack\.targeted, or --data\.mixup"),
        ({"data.mixup": "-1"}, r"data\.mixup"),
    ],
)
def test_what_cannot_be_mixed_is_refused(fields: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_recipe("digits", fields)
