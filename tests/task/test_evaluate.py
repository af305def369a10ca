"""Evaluation: equals counting image by image, clean, under attack and of twins, and changes nothing in the model."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conadv import PGD, split_batchnorm
from conadv.task.evaluate import TwinTest, count_robust, count_twin_hits, evaluate
from support.settings import small_batches, small_cnn

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
    """Top-1 and top-5 hits and the sum of the losses, image by image, in plain Python."""
    top1 = top5 = 0
    loss = 0.0
    for image, label in zip(images, labels.tolist(), strict=True):
        logits = model((image.double() / 255)[None])[0].tolist()
        rank = sum(other > logits[label] for other in logits)
        top1 += rank == 0
        top5 += rank < 5
        loss += math.log(math.fsum(math.exp(logit - logits[label]) for logit in logits))
    return top1, top5, loss


@pytest.mark.parametrize("size", [1, 5, 23])
def test_equals_a_count_by_hand_in_batches_of_any_size(size: int) -> None:
    images, labels = make_data()
    model = make_model().double()
    expected = counted_by_hand(model.eval(), images, labels)
    result = evaluate(model, in_batches(images, labels, size)).tolist()
    assert result == pytest.approx([IMAGES, *expected], rel=1e-12)
    assert 0 < result[1] < result[2] < IMAGES  # figures that tell them apart


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32])
def test_labels_may_be_any_whole_numbers_and_batches_have_more_parts(dtype: torch.dtype) -> None:
    images, labels = make_data()
    model = make_model()
    expected = evaluate(model, in_batches(images, labels))
    batches = [(part, answers.to(dtype), part) for part, answers in in_batches(images, labels)]
    assert torch.equal(evaluate(model, iter(batches)), expected)


def test_a_short_model_loses_no_digits_of_the_loss() -> None:
    """All logits 0: the loss is log 8 = 2.0794..., of which bfloat16 would leave 2.0781."""

    class Even(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.flatten(1)) * 0

    images, labels = make_data()
    result = evaluate(Even(48, CLASSES).bfloat16(), in_batches(images, labels))
    assert float(result[3]) == pytest.approx(IMAGES * math.log(8), rel=1e-6)


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Nothing that is done within it leaves a trace."""
    before, modes = copy.deepcopy(model.state_dict()), [module.training for module in model.modules()]
    randomness = torch.get_rng_state()
    yield
    assert modes == [module.training for module in model.modules()]
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), randomness)
    assert torch.is_grad_enabled()


def test_leaves_no_trace() -> None:
    images, labels = make_data()
    model = make_model().train()
    model[1].eval()  # type: ignore[index]
    with untouched(model):
        evaluate(model, in_batches(images, labels))
    with untouched(model), pytest.raises(RuntimeError):
        evaluate(model, in_batches(images[:, :2], labels))


EPSILON = 0.03


def test_of_a_linear_model_it_counts_the_margins_above_the_largest_change() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 2)).double()
    images = 0.4 + 0.2 * torch.rand(200, 3, 2, 2, dtype=torch.float64)  # the ball stays within [0, 1]
    labels = torch.randint(2, (200,))
    weight = model[1].weight[1] - model[1].weight[0]
    margin = (images.flatten(1) @ weight + model[1].bias[1] - model[1].bias[0]) * (2 * labels - 1)
    for epsilon in (0.005, 0.03):
        wanted = int((margin > epsilon * weight.abs().sum()).sum())
        assert 0 < wanted < int((margin > 0).sum())
        attack = PGD(epsilon, epsilon / 4, steps=20, random_start=1)
        batches = [(images[:150], labels[:150]), (images[150:], labels[150:])]
        assert count_robust(model, batches, attack) == (wanted, 200)


class Fooling:
    """An attack that makes one more class of images unrecognizable in each call."""

    def __init__(self) -> None:
        self.seeds: list[int] = []
        self.sizes: list[int] = []

    def __call__(self, model: nn.Module, loss: Any, images: Tensor, labels: Tensor, seed: int) -> Tensor:
        self.seeds.append(seed)
        self.sizes.append(len(images))
        own = labels == len(self.seeds)
        return torch.where(own[:, None], -images, images)


class Lookup(nn.Module):
    """The images are their logits."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, images: Tensor) -> Tensor:
        return self.scale * images


def test_an_image_is_robust_if_no_restart_fools_the_model_and_fooled_ones_are_not_attacked_again() -> None:
    labels = torch.tensor([0, 1, 2, 3, 4, 2])
    images = F.one_hot(labels, 5).float()
    images[3] = images[0]  # misclassified as it is
    attack = Fooling()
    assert count_robust(Lookup(), [(images, labels)], attack, restarts=2) == (2, 6)  # classes 0 and 4 remain
    assert attack.sizes == [5, 4]
    assert len(set(attack.seeds)) == 2


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("branch", ["main", "adv"])
def test_twins_are_classified_with_the_statistics_of_their_chunk_and_nothing_changes(
    branch: str, training: bool
) -> None:
    model, plain = split_batchnorm(small_cnn()), small_cnn()
    with torch.no_grad():
        for mine, other in ((model[1], plain[1]), (model[4], plain[4])):
            owner = mine if branch == "main" else mine.adv
            owner.weight.mul_(-1)
            other.weight.mul_(-1)
    model.train(training)
    model[7].eval()
    batches = small_batches(3, size=16)
    attack = PGD(EPSILON, random_start=0, branch=branch)
    with untouched(model):
        found = count_twin_hits(model, batches, TwinTest(attack, branch, 16))
    hits = 0
    for images, labels in batches:
        leaf = images.clone().requires_grad_()
        F.cross_entropy(plain(leaf), labels).backward()
        assert leaf.grad is not None
        twins = (images + EPSILON * leaf.grad.sign()).clamp(0, 1)
        hits += int((plain(twins).argmax(1) == labels).sum())
    assert found == (hits, 48)


def test_twins_are_classified_in_the_groups_that_they_are_learnt_in() -> None:
    model, numbers = Lookup(), torch.arange(12)
    seen: list[list[int]] = []

    def attack(model: nn.Module, loss: Any, images: Tensor, labels: Tensor, seed: int) -> Tensor:
        return images

    model.register_forward_hook(lambda module, inputs, outputs: seen.append((inputs[0].sum(1) / 100).int().tolist()))
    images = F.one_hot(numbers % 5, 5) + 100 * numbers[:, None] / 5  # their sum tells their numbers
    batches = list(zip(images.split(3), (numbers % 5).split(3), strict=True))
    assert count_twin_hits(model, batches, TwinTest(attack, "main", 3, shuffled=2)) == (12, 12)
    assert [sorted(seen[at] + seen[at + 1]) for at in (0, 2)] == [list(range(6)), list(range(6, 12))]
    assert {0, 1, 2} not in (set(seen[0]), set(seen[1]))


def test_attacking_leaves_no_trace_and_gradients_are_for_the_attack_alone() -> None:
    model = small_cnn().train()
    model[1].eval()
    graphs: list[bool] = []
    model.register_forward_hook(lambda module, images, outputs: graphs.append(outputs.requires_grad))

    def one_step(model: nn.Module, loss: Any, images: Tensor, labels: Tensor, seed: int) -> Tensor:
        assert not any(module.training for module in model.modules())
        leaf = images.clone().requires_grad_()
        return images + 0.3 * torch.autograd.grad(loss(model(leaf), labels), leaf)[0].sign()

    with untouched(model), torch.no_grad():
        count_robust(model, small_batches(1, size=32), one_step)
    assert graphs == [False, True, False]
