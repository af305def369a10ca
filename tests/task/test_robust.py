"""Robust accuracy: where the worst attack is known by formula, what restarts do, and twins as training sees them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conadv import PGD, split_batchnorm
from conadv.task.evaluate import count_robust, count_twin_hits
from support.settings import small_batches, small_cnn

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

    def __call__(
        self, model: nn.Module, loss: Any, images: Tensor, labels: Tensor, seed: int, call: Any = None
    ) -> Tensor:
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
    before, modes = copy.deepcopy(model.state_dict()), [module.training for module in model.modules()]
    batches = small_batches(3, size=16)
    attack = PGD(EPSILON, random_start=0, branch=branch)
    found = count_twin_hits(model, batches, attack, branch)
    hits = 0
    for images, labels in batches:
        leaf = images.clone().requires_grad_()
        F.cross_entropy(plain(leaf), labels).backward()
        assert leaf.grad is not None
        twins = (images + EPSILON * leaf.grad.sign()).clamp(0, 1)
        hits += int((plain(twins).argmax(1) == labels).sum())
    assert found == (hits, 48)
    assert modes == [module.training for module in model.modules()]
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_twins_are_classified_in_the_groups_that_they_are_learnt_in() -> None:
    model, numbers = Lookup(), torch.arange(12)
    seen: list[list[int]] = []

    def attack(model: nn.Module, loss: Any, images: Tensor, labels: Tensor, seed: int) -> Tensor:
        return images

    model.register_forward_hook(lambda module, inputs, outputs: seen.append((inputs[0].sum(1) / 100).int().tolist()))
    images = F.one_hot(numbers % 5, 5) + 100 * numbers[:, None] / 5  # their sum tells their numbers
    batches = list(zip(images.split(3), (numbers % 5).split(3), strict=True))
    assert count_twin_hits(model, batches, attack, "main", shuffled=2) == (12, 12)
    assert [sorted(seen[at] + seen[at + 1]) for at in (0, 2)] == [list(range(6)), list(range(6, 12))]
    assert {0, 1, 2} not in (set(seen[0]), set(seen[1]))


def test_attacking_leaves_no_trace_and_gradients_are_for_the_attack_alone() -> None:
    model = small_cnn().train()
    model[1].eval()
    before, modes = copy.deepcopy(model.state_dict()), [module.training for module in model.modules()]
    randomness = torch.get_rng_state()
    graphs: list[bool] = []
    model.register_forward_hook(lambda module, images, outputs: graphs.append(outputs.requires_grad))

    def one_step(model: nn.Module, loss: Any, images: Tensor, labels: Tensor, seed: int) -> Tensor:
        assert not any(module.training for module in model.modules())
        leaf = images.clone().requires_grad_()
        return images + 0.3 * torch.autograd.grad(loss(model(leaf), labels), leaf)[0].sign()

    with torch.no_grad():
        count_robust(model, small_batches(1, size=32), one_step)
    assert graphs == [False, True, False]
    assert modes == [module.training for module in model.modules()]
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), randomness)
    assert torch.is_grad_enabled()
