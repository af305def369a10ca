"""Each operation against its definition in NumPy, and the draws against the published policies."""

from __future__ import annotations

import hashlib
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageEnhance

from conadv.task import autoaugment
from conadv.task.autoaugment import CIFAR10, IMAGENET, AutoAugment, operate
from conadv.task.draws import mix_all

FILL = 128


def moved(image: np.ndarray, matrix: np.ndarray, shift: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The nearest pixel at matrix @ (x, y) + shift for the middle of each pixel, and where that was a close call."""
    height, width = image.shape[:2]
    y, x = np.mgrid[:height, :width] + 0.5
    places = np.stack([x, y], axis=-1) @ matrix.T + shift
    across, down = (np.floor(places[..., axis]).astype(int) for axis in (0, 1))
    inside = (across >= 0) & (across < width) & (down >= 0) & (down < height)
    result = np.full_like(image, FILL)
    result[inside] = image[down[inside], across[inside]]
    close = (np.abs(places - np.round(places)) < 2e-3).any(axis=-1)
    return result, close


def shear_x(image: np.ndarray, level: int, sign: int) -> tuple[np.ndarray, np.ndarray]:
    return moved(image, np.array([[1, sign * 0.3 * level / 9], [0, 1]]), np.zeros(2))


def shear_y(image: np.ndarray, level: int, sign: int) -> tuple[np.ndarray, np.ndarray]:
    return moved(image, np.array([[1, 0], [sign * 0.3 * level / 9, 1]]), np.zeros(2))


def rotate(image: np.ndarray, level: int, sign: int) -> tuple[np.ndarray, np.ndarray]:
    """Against the clock for a positive angle, about the centre; the matrix leads back."""
    angle = np.radians(sign * 30 * level / 9)
    matrix = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    centre = np.array([image.shape[1], image.shape[0]]) / 2
    return moved(image, matrix, centre - matrix @ centre)


def translate(image: np.ndarray, level: int, sign: int, axis: int) -> np.ndarray:
    distance = sign * int(150 / 331 * image.shape[axis] * level / 9)
    result = np.full_like(image, FILL)
    for place in range(image.shape[axis]):
        if 0 <= place + distance < image.shape[axis]:
            np.moveaxis(result, axis, 0)[place] = np.moveaxis(image, axis, 0)[place + distance]
    return result


def random_image(seed: int, height: int = 21, width: int = 30) -> np.ndarray:
    """Noise over a part of the range, so that stretching it does something."""
    random = np.random.default_rng(seed)
    low, high = sorted(random.choice(256, 2, replace=False))
    return random.integers(low, high + 1, (height, width, 3), dtype=np.uint8)


def ours(image: np.ndarray, name: str, level: int, sign: int) -> np.ndarray:
    return np.asarray(operate(Image.fromarray(image), name, level / 9, sign, FILL))


cases = given(st.integers(0, 10_000), st.integers(0, 9), st.sampled_from([1, -1]))


@pytest.mark.parametrize(("name", "oracle"), [("ShearX", shear_x), ("ShearY", shear_y), ("Rotate", rotate)])
@settings(max_examples=20, deadline=None)
@cases
def test_turning_and_shearing(name: str, oracle, seed: int, level: int, sign: int) -> None:
    image = random_image(seed)
    expected, close = oracle(image, level, sign)
    assert close.mean() <= 0.2 or level == 0
    np.testing.assert_array_equal(ours(image, name, level, sign)[~close], expected[~close])


@pytest.mark.parametrize(("name", "axis"), [("TranslateX", 1), ("TranslateY", 0)])
@settings(max_examples=20, deadline=None)
@cases
def test_moving(name: str, axis: int, seed: int, level: int, sign: int) -> None:
    image = random_image(seed)
    np.testing.assert_array_equal(ours(image, name, level, sign), translate(image, level, sign, axis))


@pytest.mark.parametrize("name", ["Color", "Contrast", "Brightness", "Sharpness"])
@settings(max_examples=10, deadline=None)
@cases
def test_enhancing(name: str, seed: int, level: int, sign: int) -> None:
    """From 0.1 to 1.9 of the effect."""
    image = random_image(seed)
    expected = getattr(ImageEnhance, name)(Image.fromarray(image)).enhance(1 + sign * 0.1 * level)
    assert np.abs(ours(image, name, level, sign).astype(int) - np.asarray(expected)).max() <= 1


KEPT_BITS = (8, 8, 7, 7, 6, 6, 5, 5, 4, 4)  # of Posterize, by level
VALUES = {
    "Invert": lambda plane, level: 255 - plane,
    "Posterize": lambda plane, level: plane // 2 ** (8 - KEPT_BITS[level]) * 2 ** (8 - KEPT_BITS[level]),
    "Solarize": lambda plane, level: np.where(plane < 256 - 256 * level / 9, plane, 255 - plane),
}


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("size", [(1, 1), (15, 17), (23, 40)])
def test_values_change_by_their_definition(name: str, size: tuple[int, int]) -> None:
    random = np.random.default_rng(0)
    for level in range(10):
        for low, high in [(0, 256), (7, 8), (100, 102), (200, 256), (0, 3)]:
            image = random.integers(low, high, (*size, 3), dtype=np.uint8)
            expected = np.stack([VALUES[name](plane, level) for plane in np.moveaxis(image, -1, 0)], axis=-1)
            np.testing.assert_array_equal(ours(image, name, level, 1), expected)
            np.testing.assert_array_equal(ours(image[..., 0], name, level, 1), expected[..., 0])


# The published appendix in another hand: operation, tenths of its probability, level; pairs in their order.
PUBLISHED_IMAGENET = """
posterize 4 8 rotate 6 9 | solarize 6 5 autocontrast 6 5 | equalize 8 8 equalize 6 3 | posterize 6 7 posterize 6 6
equalize 4 7 solarize 2 4 | equalize 4 4 rotate 8 8 | solarize 6 3 equalize 6 7 | posterize 8 5 equalize 10 2
rotate 2 3 solarize 6 8 | equalize 6 8 posterize 4 6 | rotate 8 8 color 4 0 | rotate 4 9 equalize 6 2
equalize 0 7 equalize 8 8 | invert 6 4 equalize 10 8 | color 6 4 contrast 10 8 | rotate 8 8 color 10 2
color 8 8 solarize 8 7 | sharpness 4 7 invert 6 8 | shearx 6 5 equalize 10 9 | color 4 0 equalize 6 3
equalize 4 7 solarize 2 4 | solarize 6 5 autocontrast 6 5 | invert 6 4 equalize 10 8 | color 6 4 contrast 10 8
equalize 8 8 equalize 6 3"""
PUBLISHED_CIFAR10 = """
invert 1 7 contrast 2 6 | rotate 7 2 translatex 3 9 | sharpness 8 1 sharpness 9 3 | sheary 5 8 translatey 7 9
autocontrast 5 8 equalize 9 2 | sheary 2 7 posterize 3 7 | color 4 3 brightness 6 7 | sharpness 3 9 brightness 7 9
equalize 6 5 equalize 5 1 | contrast 6 7 sharpness 6 5 | color 7 7 translatex 5 8 | equalize 3 7 autocontrast 4 8
translatey 4 3 sharpness 2 6 | brightness 9 6 color 2 8 | solarize 5 2 invert 0 3 | equalize 2 0 autocontrast 6 0
equalize 2 8 equalize 6 4 | color 9 9 equalize 6 6 | autocontrast 8 4 solarize 2 8 | brightness 1 3 color 7 0
solarize 4 5 autocontrast 9 3 | translatey 9 9 translatey 7 9 | autocontrast 9 2 solarize 8 3 | equalize 8 8 invert 1 3
translatey 7 9 autocontrast 9 1"""


@pytest.mark.parametrize(("policy", "published"), [(IMAGENET, PUBLISHED_IMAGENET), (CIFAR10, PUBLISHED_CIFAR10)])
def test_the_tables_are_those_published(policy, published: str) -> None:
    rows = [
        " ".join(f"{name.lower()} {round(10 * probability)} {level}" for name, probability, level in pair)
        for pair in policy
    ]
    assert len(rows) == 25
    assert rows == published.strip().replace("\n", " | ").split(" | ")


def single(operation: str, probability: float) -> AutoAugment:
    return AutoAugment(((("Invert", 0.0, 0), (operation, probability, 9)),), FILL)


SEEDS = mix_all(99, np.arange(10_000))


@pytest.mark.parametrize("policy", [IMAGENET, CIFAR10])
def test_sub_policies_and_operations_are_drawn_as_often_as_published(policy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over 10,000 images: each pair 1/25 of the time, each operation with its probability, each direction half."""
    tagged = tuple(
        tuple((f"{row}:{place}", probability, level) for place, (_, probability, level) in enumerate(pair))
        for row, pair in enumerate(policy)
    )
    seen: Counter[tuple[str, int]] = Counter()

    def note(image: Image.Image, name: str, level: int, sign: int, fill: int) -> Image.Image:
        seen[name, sign] += 1
        return image

    monkeypatch.setattr(autoaugment, "operate", note)
    AutoAugment(tagged, FILL)(np.zeros((10_000, 1, 2, 2), np.uint8), SEEDS)
    for row, pair in enumerate(policy):
        for place, (_, probability, _) in enumerate(pair):
            counts = [seen[f"{row}:{place}", sign] for sign in (1, -1)]
            share = probability / 25
            spread = np.sqrt(10_000 * share * (1 - share))
            assert abs(sum(counts) - 10_000 * share) <= 5 * spread
            assert abs(counts[0] - counts[1]) <= 5 * np.sqrt(sum(counts) + 1)


def test_the_two_operations_of_a_pair_are_drawn_independently() -> None:
    pair = ((("Invert", 0.5, 0), ("Posterize", 0.5, 9)),)
    results = AutoAugment(pair, FILL)(np.full((10_000, 1, 1, 1), 200, np.uint8), SEEDS).ravel().tolist()
    counts = Counter(results)  # 255 - 200 = 55; the high half of 200 is 192, of 55 it is 48
    assert set(counts) == {200, 55, 192, 48}
    assert max(abs(count - 2500) for count in counts.values()) < 5 * np.sqrt(2500)


def test_the_images_given_are_not_written_to() -> None:
    images = np.stack([random_image(seed).transpose(2, 0, 1) for seed in range(20)])
    before = hashlib.sha256(images.tobytes()).hexdigest()
    for given_images in (images, images.transpose(0, 1, 3, 2)):
        single("Invert", 1.0)(given_images, SEEDS[:20])
        assert hashlib.sha256(images.tobytes()).hexdigest() == before


@pytest.mark.parametrize("augment", [AutoAugment(IMAGENET, FILL), AutoAugment(CIFAR10, FILL)])
def test_grey_images_are_augmented_as_rgb_ones_of_that_grey_and_others_refused(augment) -> None:
    grey = np.stack([random_image(seed).transpose(2, 0, 1)[:1] for seed in range(100)])
    rgb = augment(grey.repeat(3, axis=1), SEEDS[:100])
    assert np.abs(augment(grey, SEEDS[:100]).astype(int) - rgb[:, :1]).max() <= 1
    with pytest.raises(ValueError, match="images with 2 channels cannot be augmented: convert them to 1 or 3"):
        augment(np.zeros((1, 2, 4, 4), np.uint8), SEEDS[:1])
