"""Promise: every method takes the step that its definition says, computed here in plain PyTorch.

The reference has two ordinary models that share all but their BatchNorm layers, keeps a whole copy of them for every
step instead of a hand-off, and has a PGD of its own.
"""

from __future__ import annotations

import copy
import itertools
from dataclasses import dataclass, field

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conadv import PGD, Recycled, split_batchnorm
from support.settings import RHO, SETTINGS, Setting, every_method, small_batches, small_cnn

EPSILON = 8 / 255
LR, MOMENTUM = 0.2, 0.9
Batch = tuple[Tensor, Tensor]


@dataclass
class Reference:
    """Models for clean images and for twins, and the running statistics of each, kept by hand."""

    clean: nn.Sequential
    adv: nn.Sequential
    running: dict[str, list[Tensor]] = field(default_factory=dict)

    @staticmethod
    def make() -> Reference:
        clean = small_cnn()
        for layer in (clean[1], clean[4]):
            layer.momentum = 1.0  # the buffers then hold the statistics of the last forward pass
        adv = copy.deepcopy(clean)
        for place in (0, 3, 7):
            adv[place] = clean[place]
        return Reference(clean, adv)

    def parameters(self) -> list[nn.Parameter]:
        return list(dict.fromkeys([*self.clean.parameters(), *self.adv.parameters()]))

    def statistics(self, name: str) -> list[Tensor]:
        model = {"clean": self.clean, "adv": self.adv}[name]
        return [tensor.clone() for place in (1, 4) for tensor in (model[place].running_mean, model[place].running_var)]

    def move_running(self, name: str, passes: list[list[Tensor]]) -> None:
        means = [torch.stack(tensors).mean(0) for tensors in zip(*passes, strict=True)]
        start = [value for mean in means[::2] for value in (torch.zeros_like(mean), torch.ones_like(mean))]
        before = self.running.get(name, start)
        self.running[name] = [0.9 * old + 0.1 * new for old, new in zip(before, means, strict=True)]


def attacked(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """One step of PGD on a copy of the model."""
    leaf = images.clone().requires_grad_()
    F.cross_entropy(copy.deepcopy(model)(leaf), labels, reduction="sum").backward()
    assert leaf.grad is not None
    twins = images + EPSILON * leaf.grad.sign()
    return torch.min(torch.max(twins, images - EPSILON), images + EPSILON).clamp(0, 1)


def chunks_of(batch: Batch, count: int) -> list[Batch]:
    return list(zip(batch[0].chunk(count), batch[1].chunk(count), strict=True))


def twins_for(setting: Setting, history: list[Reference], batches: list[Batch], step: int, count: int) -> list[Batch]:
    """What step `step` learns from beside its clean batch, by definition."""
    if setting.method == "vanilla":
        return []
    if setting.method == "recycled":
        source = max(step - 1, 0)
        model, victims = history[source].clean, batches[source]
    else:
        model, victims = history[max(step - setting.delay, 0)].adv, batches[step]
    return [(attacked(model, images, labels), labels) for images, labels in chunks_of(victims, count)]


def add_gradient_uphill(model: nn.Module, batch: Batch, count: int) -> None:
    """SAM by its definition, on a copy: the gradient at weights that were moved along that of the same images."""
    moved = copy.deepcopy(model)
    uphill = torch.autograd.grad(F.cross_entropy(moved(batch[0]), batch[1]), list(moved.parameters()))
    length = torch.cat([own.flatten() for own in uphill]).norm()
    moved.zero_grad()
    with torch.no_grad():
        for own, gradient in zip(moved.parameters(), uphill, strict=True):
            own += RHO * gradient / length
    (F.cross_entropy(moved(batch[0]), batch[1]) / count).backward()
    for own, other in zip(model.parameters(), moved.parameters(), strict=True):
        own.grad = other.grad if own.grad is None else own.grad + other.grad


def train_reference(setting: Setting, batches: list[Batch], count: int, adv_weight: float) -> Reference:
    reference = Reference.make()
    optimizer = torch.optim.SGD(reference.parameters(), lr=LR, momentum=MOMENTUM)
    history: list[Reference] = []
    for step, batch in enumerate(batches):
        history.append(copy.deepcopy(reference))
        optimizer.zero_grad()
        parts = [("clean", reference.clean, chunks_of(batch, count), 1.0)]
        if setting.adversarial:
            twins = twins_for(setting, history, batches, step, count)
            parts = [("clean", reference.clean, chunks_of(batch, count), 1 - adv_weight)]
            parts += [("adv", reference.adv, twins, adv_weight)]
        for name, model, chunks, weight in parts:
            passes = []
            for images, labels in chunks:
                if setting.method == "sam":
                    add_gradient_uphill(model, (images, labels), count)
                    model(images)  # whose statistics count
                else:
                    (weight / count * F.cross_entropy(model(images), labels)).backward()
                passes.append(reference.statistics(name))
            reference.move_running(name, passes)
        optimizer.step()
    return reference


def assert_equals_reference(model: nn.Sequential, reference: Reference, adversarial: bool) -> None:
    def check(got: Tensor, expected: Tensor) -> None:
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)

    for place in (0, 3, 7):
        check(model[place].weight, reference.clean[place].weight)
    branches = {"clean": lambda layer: layer, "adv": lambda layer: layer.adv}
    for name, branch in branches.items():
        source = {"clean": reference.clean, "adv": reference.adv}[name]
        for place in (1, 4):
            check(branch(model[place]).weight, source[place].weight)
            check(branch(model[place]).bias, source[place].bias)
        if name == "clean" or adversarial:
            owners = [branch(model[place]) for place in (1, 4)]
            got = [tensor for owner in owners for tensor in (owner.running_mean, owner.running_var)]
            for one, other in zip(got, reference.running[name], strict=True):
                check(one, other)


@every_method
@pytest.mark.parametrize("count", [1, 2, 4])
def test_every_step_is_that_of_the_definition(setting: Setting, count: int) -> None:
    batches = small_batches(6)
    model = split_batchnorm(small_cnn())
    method = setting.make(model, PGD(EPSILON, random_start=0), chunk_size=8 // count, adv_weight=0.3)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    for now, ahead in method.feed(batches):
        optimizer.zero_grad()
        method(now, ahead)
        optimizer.step()
    assert method.step == 6
    assert_equals_reference(model, train_reference(setting, batches, count, adv_weight=0.3), setting.adversarial)


def test_no_two_methods_take_the_same_steps() -> None:
    """So that the comparison above tells them apart."""
    batches = small_batches(6)
    weights = [train_reference(setting, batches, 1, 0.5).clean[0].weight.detach() for setting in SETTINGS]
    for one, other in itertools.combinations(weights, 2):
        assert float((one - other).abs().max()) > 1e-6


@pytest.mark.parametrize("count", [1, 2])
def test_the_gradient_that_recycled_uses_equals_one_computed_apart(count: int) -> None:
    """The raw direction shows the gradient itself: its scale must be that of the loss summed over images."""
    model, clean = split_batchnorm(small_cnn()), small_cnn()
    images, labels = small_batches(1)[0]
    images = images * 0.5 + 0.25
    size = 1e-3
    attack = PGD(0.2, size, direction="raw", random_start=0)
    method = Recycled(model, F.cross_entropy, attack, chunk_size=8 // count, adv_weight=0.3)
    for now, ahead in method.feed([(images, labels)]):
        method(now, ahead)
    state = method.state_dict()
    twins = [state[f"twins.{number}.images"] for number in range(count)]
    for twin, (chunk, chunk_labels) in zip(twins, chunks_of((images, labels), count), strict=True):
        leaf = chunk.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(F.cross_entropy(clean(leaf), chunk_labels, reduction="sum"), leaf)
        torch.testing.assert_close(twin, chunk + size * gradient, rtol=0, atol=1e-12)
