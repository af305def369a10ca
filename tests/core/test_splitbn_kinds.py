"""BatchNorm as people have it: subclasses, tied weights, and what cannot be split."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conadv import route, split_batchnorm
from conadv.core.splitbn import pending_statistics, update_running_stats
from support.settings import small_batches, small_cnn


class Inherits(nn.BatchNorm2d):
    """Another constructor, the same forward pass."""

    def __init__(self, features: int, mark: str = "own") -> None:
        super().__init__(features, momentum=0.2)
        self.mark = mark


class WithActivation(nn.BatchNorm2d):
    """As timm's BatchNormAct2d: normalize, drop, activate, with a child that has weights."""

    def __init__(self, features: int, **options: Any) -> None:
        super().__init__(features, **options)
        self.drop = nn.Dropout(0.0)
        self.act = nn.PReLU(features)

    def forward(self, x: Tensor) -> Tensor:
        activated: Tensor = self.act(self.drop(super().forward(x)))
        return activated


class WithoutParent(nn.BatchNorm2d):
    """A forward pass that calls no parent: the buffers are replaced, not written into."""

    def forward(self, x: Tensor) -> Tensor:
        mean, var = self.running_mean, self.running_var
        assert mean is not None and var is not None and self.momentum is not None
        if self.training:
            var, mean = torch.var_mean(x, (0, 2, 3), correction=0)
            self.running_mean = (1 - self.momentum) * self.running_mean + self.momentum * mean.detach()
            self.running_var = (1 - self.momentum) * self.running_var + self.momentum * var.detach()
            self.num_batches_tracked = self.num_batches_tracked + 1
        scaled = (x - mean.view(-1, 1, 1)) / (var.view(-1, 1, 1) + self.eps).sqrt()
        return scaled * self.weight.view(-1, 1, 1) + self.bias.view(-1, 1, 1)


def cumulative(features: int) -> nn.Module:
    return WithActivation(features, momentum=None)


def without_statistics(features: int) -> nn.Module:
    return WithActivation(features, track_running_stats=False)


KINDS: dict[str, Callable[[int], nn.Module]] = {
    "plain": nn.BatchNorm2d,
    "inherits": Inherits,
    "activation": WithActivation,
    "cumulative": cumulative,
    "without statistics": without_statistics,
    "without parent": WithoutParent,
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def gradients(model: nn.Module, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    F.cross_entropy(model(images), labels).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@every_kind
@pytest.mark.parametrize("branches", [("main", "adv"), ("main", "aug", "adv")], ids=len)
def test_each_branch_is_a_layer_of_its_own(kind: str, branches: tuple[str, ...]) -> None:
    """Each branch trains as a model of its own does; what is not the layer's own is left alone here."""
    plain = small_cnn(norm=KINDS[kind])
    apart = {branch: copy.deepcopy(plain) for branch in branches}
    model = split_batchnorm(plain, branches)
    for images, labels in small_batches(4):
        for number, branch in enumerate(branches):
            seen = images * (1 + number)  # each branch sees other images
            with route(model, branch, tracking="step"):
                got = gradients(model, seen, labels)
            expected = gradients(apart[branch], seen, labels)
            prefix = "" if branch == "main" else f"{branch}."
            for position in (1, 4):
                for name, _ in apart[branch][position].named_parameters(recurse=False):
                    own = f"{position}.{prefix}{name}"
                    torch.testing.assert_close(got[own], expected[f"{position}.{name}"], rtol=0, atol=1e-12)
            torch.testing.assert_close(got["0.weight"], expected["0.weight"], rtol=0, atol=1e-12)
        update_running_stats(model)
        for branch, other in apart.items():
            for position in (1, 4):
                for name, buffer in other[position].named_buffers(recurse=False):
                    own = model[position].owner(branch)._buffers[name]
                    torch.testing.assert_close(own, buffer, rtol=1e-12, atol=1e-12)


@every_kind
@pytest.mark.parametrize("chunks", [2, 4])
def test_statistics_move_once_a_step_with_the_mean_over_chunks(kind: str, chunks: int) -> None:
    """A moving average of the mean is the mean of moving averages, each from the same start."""
    model = split_batchnorm(nn.Sequential(KINDS[kind](2)).double())
    for step in range(3):
        copies = [copy.deepcopy(model) for _ in range(chunks)]
        for one, (images, _) in zip(copies, small_batches(chunks, seed=step), strict=True):
            with route(model, "adv", tracking="step"):
                model(images)
            with route(one, "adv"):
                one(images)
        before = copy.deepcopy(model.state_dict())
        update_running_stats(model)
        assert all(not pending.any() for pending in pending_statistics(model))
        for key, value in model.state_dict().items():
            expected = torch.stack([one.state_dict()[key].double() for one in copies]).mean(0).to(value.dtype)
            torch.testing.assert_close(value, expected, rtol=0, atol=1e-12)
            assert "adv" in key or torch.equal(value, before[key])


@every_kind
def test_attributes_hooks_and_copies_survive(kind: str) -> None:
    model = small_cnn(norm=KINDS[kind])
    calls: list[str] = []
    model[1].register_forward_hook(lambda *_: calls.append("forward"))
    model[1].register_full_backward_hook(lambda *_: calls.append("backward"))
    model[1].weight.requires_grad_(False)
    model[4].weight._no_weight_decay = True
    model[4].eval()
    kept = [(layer.weight, list(layer.buffers())) for layer in (model[1], model[4])]
    split_batchnorm(model)
    for layer, (weight, buffers) in zip((model[1], model[4]), kept, strict=True):
        assert layer.weight is weight
        own = [buffer for name, buffer in layer._buffers.items() if name != "pending" and buffer is not None]
        assert all(one is other for one, other in zip(own, buffers, strict=True))
        assert layer.adv.weight.dtype == weight.dtype and layer.adv.training == layer.training
    assert not model[1].adv.weight.requires_grad and model[4].adv.weight.requires_grad
    assert model[4].adv.weight._no_weight_decay
    images, labels = small_batches(1)[0]
    with route(model, "adv"):
        gradients(model, images, labels)
    assert calls == ["forward", "backward"]
    calls.clear()
    pickled = io.BytesIO()
    torch.save(split_batchnorm(small_cnn(norm=KINDS[kind])), pickled)
    pickled.seek(0)
    for other in (copy.deepcopy(model), torch.load(pickled, weights_only=False)):
        assert type(other[1]) is type(model[1])
        with route(other, "adv"):
            assert other(images).isfinite().all()


def test_tied_weights_stay_tied_in_every_branch() -> None:
    model = small_cnn()
    model[1] = nn.BatchNorm2d(4).double()
    model.insert(2, nn.BatchNorm2d(4).double())
    model[2].weight = model[1].weight
    split_batchnorm(model, ("main", "aug", "adv"))
    for branch in ("adv", "aug"):
        one, other = model[1].owner(branch), model[2].owner(branch)
        assert one.weight is other.weight
        assert one.bias is not other.bias and one.weight is not model[1].weight


@every_kind
def test_frozen_layers_keep_to_their_running_statistics(kind: str) -> None:
    model = small_cnn(norm=KINDS[kind])
    for images, _ in small_batches(3, seed=7):
        model(images)
    split_batchnorm(model)
    expected = copy.deepcopy(model).eval()
    model[1].eval()
    model[4].eval()
    before = copy.deepcopy(model.state_dict())
    images = small_batches(1)[0][0]
    for branch in ("main", "adv"):
        for statistics in (None, "batch", "running"):
            with route(model, branch, statistics=statistics, tracking="step"):  # type: ignore[arg-type]
                torch.testing.assert_close(model(images), expected(images), rtol=0, atol=1e-12)
    update_running_stats(model)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


@every_kind
@pytest.mark.parametrize("training", [True, False])
def test_buffers_may_be_overwritten_before_the_backward_pass(kind: str, training: bool) -> None:
    """As DistributedDataParallel does where it broadcasts buffers."""
    plain, model = (small_cnn(norm=KINDS[kind]).train(training) for _ in range(2))
    split_batchnorm(model)
    images, labels = small_batches(1)[0]
    expected = gradients(plain, images, labels)
    loss = F.cross_entropy(model(images), labels)
    for buffer in model.buffers():
        buffer.add_(1)
    loss.backward()
    torch.testing.assert_close(model[0].weight.grad, expected["0.weight"], rtol=0, atol=1e-12)


# --- errors ------------------------------------------------------------------------------------------------------


def replaced() -> nn.Module:
    layer = nn.BatchNorm2d(3)
    layer.forward = lambda x: x  # type: ignore[method-assign]
    return layer


def parametrized() -> nn.Module:
    layer = nn.BatchNorm2d(3)
    nn.utils.parametrize.register_parametrization(layer, "weight", nn.Softplus())
    return layer


def named_adv() -> nn.Module:
    layer = WithActivation(3)
    layer.adv = nn.Identity()
    return layer


def counting() -> nn.Module:
    layer = WithActivation(3)
    layer.register_buffer("seen", torch.tensor(0))
    return layer


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (nn.LazyBatchNorm2d, "its size is not known yet; run one batch"),
        (replaced, "its forward method was replaced"),
        (parametrized, "it is parametrized"),
        (named_adv, "it has an attribute 'adv' already"),
        (counting, "its buffer 'seen' is none that BatchNorm has"),
    ],
)
def test_what_cannot_be_split_is_named_and_nothing_is_changed(make: Callable[[], nn.Module], message: str) -> None:
    model = nn.Sequential(nn.BatchNorm2d(3), make())
    keys = list(model.state_dict())
    with pytest.raises(ValueError, match=rf"cannot split 1 \(\w+\): {message}"):
        split_batchnorm(model)
    assert type(model[0]) is nn.BatchNorm2d and list(model.state_dict()) == keys


def test_statistics_that_two_layers_share_are_refused() -> None:
    model = nn.Sequential(nn.BatchNorm2d(4), nn.BatchNorm2d(4))
    model[1].running_var = model[0].running_var
    with pytest.raises(ValueError, match="share a running statistic: give each its own"):
        split_batchnorm(model)
