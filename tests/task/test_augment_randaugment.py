"""RandAugment against the table that torchvision documents, with each operation written in NumPy alone."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from PIL import Image

from conadv.task.augment import augmentation, autoaugment
from conadv.task.augment.autoaugment import OPERATIONS, RandAugment, operate, strength
from conadv.task.data.source import Arrays, Source
from conadv.task.draws import mix_all, uniforms
from task import test_augment_autoaugment as written_apart
from task.test_augment_autoaugment import FILL, autocontrast, equalize, moved, random_image

SEEDS = mix_all(77, np.arange(14_000))
# torchvision's table at magnitude 9 of its 31 bins: 0.3 of each range. True: the sign is drawn.
AT_9: dict[str, tuple[float, bool]] = {
    "Identity": (0.0, False),
    "ShearX": (0.09, True),
    "ShearY": (0.09, True),
    "TranslateX": (0.3 * 150 / 331, True),  # of the width
    "TranslateY": (0.3 * 150 / 331, True),
    "Rotate": (9.0, True),
    "Brightness": (0.27, True),
    "Color": (0.27, True),
    "Contrast": (0.27, True),
    "Sharpness": (0.27, True),
    "Posterize": (7, False),
    "Solarize": (178.5, False),
    "AutoContrast": (0.0, False),
    "Equalize": (0.0, False),
}


def oracle(image: np.ndarray, name: str, sign: int) -> tuple[np.ndarray, np.ndarray]:
    """What the table says an operation does to an (H, W, 3) image, and the pixels where rounding was a close call."""
    value, signed = AT_9[name]
    value *= sign if signed else 1
    never = np.zeros(image.shape[:2], bool)
    match name:
        case "ShearX":
            return moved(image, np.array([[1, value], [0, 1]]), np.zeros(2))
        case "ShearY":
            return moved(image, np.array([[1, 0], [value, 1]]), np.zeros(2))
        case "TranslateX" | "TranslateY":
            along = np.array([1, 0]) if name[-1] == "X" else np.array([0, 1])
            pixels = sign * int(abs(value) * image.shape[1 if name[-1] == "X" else 0])
            return moved(image, np.eye(2), pixels * along)[0], never
        case "Rotate":
            return written_apart.rotate(image, 9 * abs(value) / 30, sign)
        case "Brightness" | "Color" | "Contrast" | "Sharpness":
            return getattr(written_apart, name.lower())(image, 1 + value), never
        case "Posterize":
            return image & 0b11111110, never
        case "Solarize":
            return np.where(image < 178.5, image, 255 - image).astype(np.uint8), never
        case "AutoContrast":
            return autocontrast(image), never
        case "Equalize":
            return equalize(image), never
    return image, never


def test_the_operations_are_those_of_the_table() -> None:
    assert tuple(AT_9) == OPERATIONS


@pytest.mark.parametrize("name", OPERATIONS[1:])
@pytest.mark.parametrize("sign", [1, -1])
def test_each_operation_is_as_documented(name: str, sign: int) -> None:
    for seed in range(25):
        image = random_image(seed)
        ours = np.asarray(operate(Image.fromarray(image), name, strength(name), sign, FILL))
        expected, close = oracle(image, name, sign)
        assert close.mean() < 0.2
        exact = 1 if name in ("Brightness", "Color", "Contrast", "Sharpness", "AutoContrast") else 0
        assert np.abs(ours.astype(int) - expected)[~close].max() <= exact


def seen_operations(monkeypatch: pytest.MonkeyPatch) -> list[list[tuple[str, int]]]:
    """For each image the operations and signs that it got."""
    monkeypatch.setattr(autoaugment, "OPERATIONS", OPERATIONS[1:])  # nothing is passed over
    chosen = map(RandAugment()._choose, uniforms(SEEDS, 4).tolist())
    return [[(name, sign) for name, _, sign in operations] for operations in chosen]


def test_operations_and_directions_are_equally_likely_and_independent(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = seen_operations(monkeypatch)
    for place in (0, 1):
        counts = Counter(operations[place] for operations in seen)
        assert len(counts) == 2 * 13
        expected = len(SEEDS) / 26
        assert max(abs(count - expected) for count in counts.values()) < 5 * np.sqrt(expected)
    same = sum(first[0] == second[0] for first, second in seen)
    assert abs(same - len(SEEDS) / 13) < 5 * np.sqrt(len(SEEDS) / 13)


def test_two_operations_follow_one_another() -> None:
    """The whole way from the draws to the pixels, for images whose operations leave no doubt about rounding."""
    image = random_image(3)
    plain = {"Identity", "TranslateX", "TranslateY", "Posterize", "Solarize", "Equalize"}
    checked = 0
    results = RandAugment(fill=FILL)(np.stack([image.transpose(2, 0, 1)] * 600), SEEDS[:600])
    for result, draws in zip(results, uniforms(SEEDS[:600], 4).tolist(), strict=True):
        names = [OPERATIONS[int(14 * draws[place])] for place in (0, 2)]
        signs = [1 if draws[place] < 0.5 else -1 for place in (1, 3)]
        if set(names) <= plain:
            expected = oracle(oracle(image, names[0], signs[0])[0], names[1], signs[1])[0]
            np.testing.assert_array_equal(result.transpose(1, 2, 0), expected)
            checked += 1
    assert checked > 50


def test_an_image_is_augmented_alike_in_any_company() -> None:
    source = Source(Arrays(np.stack([random_image(i, 16, 16) for i in range(6)])), np.arange(6), tuple("abcdef"))
    augment = augmentation("randaugment")
    (whole,) = augment(source, np.arange(6), SEEDS[:6])
    for index in range(6):
        (alone,) = augment(source, np.array([index]), SEEDS[index : index + 1])
        np.testing.assert_array_equal(alone[0], whole[index])
    assert (whole != augment(source, np.arange(6), SEEDS[6:12])[0]).any()


def test_grey_images_and_no_others() -> None:
    assert RandAugment()(np.zeros((40, 1, 9, 9), np.uint8), SEEDS[:40]).shape == (40, 1, 9, 9)
    with pytest.raises(ValueError, match="images with 2 channels cannot be augmented: convert them to 1 or 3"):
        RandAugment()(np.zeros((1, 2, 9, 9), np.uint8), SEEDS[:1])
