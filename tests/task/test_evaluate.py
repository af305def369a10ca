"""Evaluation: equals counting image by image, and changes nothing in the model."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from conadv.core.splitbn import split_batchnorm
from conadv.task.evaluate import evaluate

Batches = list[tuple[Tensor, Tensor]]
IMAGES, CLASSES = 23, 8


def make_data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (IMAGES, 3, 4, 4), generator=generator, dtype=torch.uint8)
    return images, torch.randint(CLASSES, (IMAGES,), generator=generator)


def make_model(classes: int = CLASSES) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.Dropout(0.5), nn.Flatten(), nn.Linear(24, classes))


def in_batches(images: Tensor, labels: Tensor, size: int = 5) -> Batches:
    return list(zip(images.split(size), labels.split(size), strict=True))


def counted_by_hand(model: nn.Module, images: Tensor, labels: Tensor) -> tuple[float, float, float]:
    """top-1, top-5 and loss, image by image, in plain Python."""
    top1 = top5 = 0
    loss = 0.0
    for image, label in zip(images, labels.tolist(), strict=True):
        logits = model((image.double() / 255)[None])[0].tolist()
        rank = sum(other > logits[label] for other in logits)
        top1 += rank == 0
        top5 += rank < 5
        loss += math.log(math.fsum(math.exp(logit - logits[label]) for logit in logits))
    return 100 * top1 / len(labels), 100 * top5 / len(labels), loss / len(labels)


@pytest.mark.parametrize("size", [1, 5, 22, 23])
def test_equals_a_count_by_hand_in_batches_of_any_size(size: int) -> None:
    images, labels = make_data()
    model = make_model().double()
    expected = counted_by_hand(model.eval(), images, labels)
    result = evaluate(model, in_batches(images, labels, size))
    assert (result.top1, result.top5, result.loss) == pytest.approx(expected, rel=1e-12)
    assert result.images == IMAGES
    assert 0 < result.top1 < result.top5 < 100  # figures that tell them apart


def test_bytes_and_fractions_are_the_same_images() -> None:
    images, labels = make_data()
    model = make_model()
    as_bytes = evaluate(model, in_batches(images, labels))
    assert evaluate(model, in_batches(images.float() / 255, labels)) == as_bytes
    assert evaluate(model, in_batches(images.double() / 255, labels)).top1 == as_bytes.top1


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
def test_labels_may_be_any_whole_numbers_and_batches_have_more_parts(dtype: torch.dtype) -> None:
    images, labels = make_data()
    model = make_model()
    expected = evaluate(model, in_batches(images, labels))
    batches = [(part, answers.to(dtype), part) for part, answers in in_batches(images, labels)]
    assert evaluate(model, iter(batches)) == expected


@pytest.mark.parametrize("classes", [2, 4, 5])
def test_top5_of_few_classes_is_all_of_them(classes: int) -> None:
    images, labels = make_data()
    result = evaluate(make_model(classes), in_batches(images, labels % classes))
    assert result.top5 == 100
    assert result.top1 < 100


def test_a_loss_of_ones_own_is_averaged_over_images() -> None:
    images, labels = make_data()
    result = evaluate(make_model(), in_batches(images, labels), loss=lambda logits, labels: labels.double().mean())
    assert result.loss == pytest.approx(sum(labels.tolist()) / IMAGES)


def test_a_short_model_loses_no_digits_of_the_loss() -> None:
    """All logits 0: the loss is log 8 = 2.0794..., of which bfloat16 would leave 2.0781."""

    class Even(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.flatten(1)) * 0

    images, labels = make_data()
    result = evaluate(Even(48, CLASSES).bfloat16(), in_batches(images, labels))
    assert result.loss == pytest.approx(math.log(8), rel=1e-6)


def test_leaves_no_trace() -> None:
    images, labels = make_data()
    model = make_model().train()
    model[1].eval()  # type: ignore[index]
    before = {key: value.clone() for key, value in model.state_dict().items()}
    randomness = torch.get_rng_state()
    evaluate(model, in_batches(images, labels))
    assert [module.training for module in model.modules()] == [True, True, False, True, True, True]
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), randomness)
    assert torch.is_grad_enabled()


def test_modes_are_restored_after_an_error() -> None:
    images, labels = make_data()
    model = make_model().train()
    with pytest.raises(RuntimeError):
        evaluate(model, in_batches(images[:, :2], labels))
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize("branches", [("main", "adv"), ("main", "aug", "adv")])
def test_a_split_model_is_evaluated_as_the_plain_one_it_was(branches: tuple[str, ...]) -> None:
    images, labels = make_data()
    model = make_model()
    expected = evaluate(model, in_batches(images, labels))
    split = split_batchnorm(model, branches)
    for key, value in split.state_dict().items():
        if ".adv." in key or ".aug." in key:
            value.fill_(7)
    assert evaluate(split, in_batches(images, labels)) == expected


@pytest.mark.parametrize(
    ("label", "message"), [(8, "label 8 is not one of the model's 8"), (-1, "label -1"), (99, "99")]
)
def test_a_label_outside_the_classes_is_named(label: int, message: str) -> None:
    images, labels = make_data()
    labels[13] = label
    with pytest.raises(ValueError, match=message):
        evaluate(make_model(), in_batches(images, labels))


def test_labels_that_are_no_whole_numbers_are_an_error() -> None:
    images, labels = make_data()
    with pytest.raises(ValueError, match="float32"):
        evaluate(make_model(), in_batches(images, labels.float()))


def test_nothing_to_evaluate_is_an_error() -> None:
    def spent() -> Iterator[tuple[Tensor, Tensor]]:
        return iter([])

    with pytest.raises(ValueError, match="no images"):
        evaluate(make_model(), spent())
    images, labels = make_data()
    with pytest.raises(ValueError, match="no images"):
        evaluate(make_model(), [(images[:0], labels[:0])])
    with_a_hole = [(images[:4], labels[:4]), (images[:0], labels[:0]), (images[4:], labels[4:])]
    assert evaluate(make_model(), with_a_hole).images == IMAGES


def test_the_device_can_be_named() -> None:
    images, labels = make_data()
    model = make_model()
    batches = in_batches(images, labels)
    assert evaluate(model, batches, device="cpu") == evaluate(model, batches, device=torch.device("cpu"))
    assert evaluate(nn.Flatten(), [(torch.eye(4).reshape(4, 1, 2, 2), torch.arange(4))]).top1 == 100
