"""Promise: the attack leaves no trace, and computes no gradients of weights."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from conadv import PGD, split_batchnorm
from conadv.core.attack import Statistics
from support.settings import CLASSES, small_batches, small_cnn

ATTACK = PGD(8 / 255, 3 / 255, steps=2, random_start=0.5)


class Counted(nn.Module):
    """Buffers as people have them: changed in place, and replaced by a new tensor."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.register_buffer("in_place", torch.zeros(3))
        self.register_buffer("replaced", torch.zeros(3))
        self.register_buffer("absent", None)
        self.fails = fails

    def forward(self, x: Tensor) -> Tensor:
        self.in_place += 1
        self.replaced = self.replaced + 1
        if self.fails:
            raise RuntimeError("the model failed")
        return x


def mixed_model(fails: bool = False) -> nn.Module:
    """Split and plain BatchNorm, one of them frozen, dropout, spectral norm and buffers of its own."""
    split = split_batchnorm(small_cnn())
    spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(CLASSES, CLASSES).double())
    rest = (nn.BatchNorm1d(CLASSES), spectral, nn.Dropout(0.3), nn.BatchNorm1d(CLASSES, momentum=None), Counted(fails))
    model = nn.Sequential(split, *rest).double()
    model[4].eval()
    split[4].eval()
    return model


def traces(model: nn.Module) -> dict[str, object]:
    """Everything that an attack could have touched, as it is now."""
    return {
        "weights": [(name, p.detach().clone()) for name, p in model.named_parameters()],
        "gradients": [None if p.grad is None else p.grad.clone() for p in model.parameters()],
        "requires_grad": [p.requires_grad for p in model.parameters()],
        "buffers": [(name, buffer.clone()) for name, buffer in model.named_buffers()],
        "objects": [id(tensor) for tensor in (*model.parameters(), *model.buffers())],
        "versions": [tensor._version for tensor in model.parameters()],
        "flags": [module.training for module in model.modules()],
        "attributes": [sorted(vars(module)) for module in model.modules()],
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "grad mode": torch.is_grad_enabled(),
    }


def assert_same(before: object, after: object) -> None:
    if isinstance(before, Tensor) and isinstance(after, Tensor):
        assert before.dtype == after.dtype and torch.equal(before, after)
    elif isinstance(before, dict) and isinstance(after, dict):
        for key in before:
            assert_same(before[key], after[key])
    elif isinstance(before, (list, tuple)) and isinstance(after, (list, tuple)):
        assert len(before) == len(after)
        for one, other in zip(before, after, strict=True):
            assert_same(one, other)
    else:
        assert before == after


@pytest.mark.parametrize("statistics", ["batch", "running"])
@pytest.mark.parametrize("branch", ["main", "adv"])
@pytest.mark.parametrize("training", [True, False])
def test_everything_is_as_it_was(training: bool, branch: str, statistics: Statistics) -> None:
    model = mixed_model()
    ((images, labels),) = small_batches(1)
    F.cross_entropy(model(images), labels).backward()
    for layer in (model[0][1], model[0][4]):  # type: ignore[index]
        layer.adv.num_batches_tracked.fill_(1)  # pretend, so that it may be evaluated
    next(model.parameters()).requires_grad_(False)
    if not training:
        model.eval()
    before, batch = traces(model), images.clone()
    attack = PGD(8 / 255, 3 / 255, steps=2, random_start=0.5, branch=branch, statistics=statistics)
    twins = attack(model, F.cross_entropy, images, labels)
    assert_same(before, traces(model))
    assert torch.equal(images, batch) and images.grad is None
    assert not twins.requires_grad and not torch.equal(twins, images)


class Tracking(nn.BatchNorm2d):
    """A BatchNorm with a forward pass of its own, and a child that changes buffers."""

    def __init__(self, features: int) -> None:
        super().__init__(features)
        self.child = Counted()

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.child(super().forward(x))
        return outputs


class Checkpointed(nn.Module):
    """BatchNorm of its own kind that runs again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.rest = small_cnn(norm=Tracking)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.rest[3:](checkpoint(self.rest[1:3], self.rest[0](x), use_reentrant=False))
        return outputs


@pytest.mark.parametrize("statistics", ["batch", "running"])
@pytest.mark.parametrize("branch", ["main", "adv"])
def test_also_with_other_kinds_of_layers_and_checkpointing(branch: str, statistics: Statistics) -> None:
    model = split_batchnorm(Checkpointed())
    ((images, labels),) = small_batches(1)
    F.cross_entropy(model(images), labels).backward()
    for layer in (model.rest[1], model.rest[4]):
        layer.adv.num_batches_tracked.fill_(1)
    before = traces(model)
    attack = PGD(8 / 255, 3 / 255, steps=2, random_start=0.5, branch=branch, statistics=statistics)
    assert not torch.equal(attack(model, F.cross_entropy, images, labels), images)
    assert_same(before, traces(model))


def test_also_when_the_model_fails() -> None:
    model = mixed_model(fails=True)
    ((images, labels),) = small_batches(1)
    before = traces(model)
    with pytest.raises(RuntimeError, match="the model failed"):
        ATTACK(model, F.cross_entropy, images, labels)
    assert_same(before, traces(model))


def test_also_without_gradients_around_it() -> None:
    model = mixed_model()
    ((images, labels),) = small_batches(1)
    expected = ATTACK(model, F.cross_entropy, images, labels)
    with torch.no_grad():
        before = traces(model)
        assert torch.equal(ATTACK(model, F.cross_entropy, images, labels), expected)
        assert_same(before, traces(model))


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("frozen", [True, False])
def test_a_graph_made_before_can_be_walked_after(split: bool, frozen: bool) -> None:
    """One's own loop may attack between a forward pass and its backward."""
    model = split_batchnorm(small_cnn()) if split else small_cnn()
    if frozen:
        for layer in (model[1], model[4]):
            layer.eval()
    ((images, labels),) = small_batches(1)
    loss = F.cross_entropy(model(images), labels)
    ATTACK(model, F.cross_entropy, images, labels)
    (attacked,) = torch.autograd.grad(loss, model[0].weight)
    (alone,) = torch.autograd.grad(F.cross_entropy(model(images), labels), model[0].weight)
    assert torch.equal(attacked, alone)


def test_images_that_belong_to_a_graph_stay_out_of_it() -> None:
    model = small_cnn()
    ((images, labels),) = small_batches(1)
    images.requires_grad_()
    twins = ATTACK(model, F.cross_entropy, images * 1, labels)
    assert images.grad is None and not twins.requires_grad


def test_a_buffer_of_two_modules_stays_one() -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones(1, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            self.scale.mul_(-1)
            return x

    class Reads(nn.Module):
        def __init__(self, scale: Tensor) -> None:
            super().__init__()
            self.register_buffer("scale", scale)

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale

    writes = Writes()
    model = nn.Sequential(writes, Reads(writes.scale), small_cnn())
    ((images, labels),) = small_batches(1)
    attack = PGD(8 / 255, random_start=0)
    other_way = attack(nn.Sequential(Reads(-torch.ones(1).double()), model[2]), F.cross_entropy, images, labels)
    assert torch.equal(attack(model, F.cross_entropy, images, labels), other_way)
    assert float(writes.scale) == 1 and model[1].scale is writes.scale


def test_the_twins_are_those_of_an_untouched_model() -> None:
    """The layers that are switched for the attack are switched back: a second one finds the same model."""
    model = mixed_model()
    ((images, labels),) = small_batches(1)
    expected = ATTACK(copy.deepcopy(model), F.cross_entropy, images, labels)
    for _ in range(2):
        assert torch.equal(ATTACK(model, F.cross_entropy, images, labels), expected)


@pytest.mark.parametrize("wrap", [split_batchnorm, lambda model: model], ids=["split", "plain"])
def test_no_gradient_of_a_weight_is_computed(wrap: Callable[[nn.Module], nn.Module]) -> None:
    model = wrap(small_cnn())
    ((images, labels),) = small_batches(1)
    for parameter in model.parameters():
        parameter.register_hook(lambda _: pytest.fail("the gradient of a weight was computed"))

    def flops(run: Callable[[], object]) -> int:
        with FlopCounterMode(display=False) as counter:
            run()
        return counter.get_total_flops()

    with torch.no_grad():
        forward = flops(lambda: model(images))
    assert forward > 0
    # Once forward and once back for each step: the gradient of a layer's input costs what the layer costs.
    for steps in (1, 3):
        attack = PGD(8 / 255, steps=steps)
        assert flops(lambda: attack(model, F.cross_entropy, images, labels)) == 2 * steps * forward  # noqa: B023
