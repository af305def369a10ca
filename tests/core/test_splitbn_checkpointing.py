"""Activation checkpointing: a layer that runs again takes the branch that it took, and its statistics count once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from conadv import PGD, route, split_batchnorm
from conadv.core.splitbn import update_running_stats
from support.settings import Setting, every_method, small_batches, small_cnn, train


class WithActivation(nn.BatchNorm2d):
    """A subclass with a forward pass of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu()


class Checkpointed(nn.Module):
    """The second block of a net is computed again in the backward pass, within another such block if nested."""

    def __init__(self, norm: Callable[[int], nn.Module], reentrant: bool | None, nested: bool = False) -> None:
        super().__init__()
        self.net = small_cnn(norm=norm)
        self.net.insert(2, nn.Dropout(0.25))
        self.reentrant, self.nested = reentrant, nested

    def forward(self, images: Tensor) -> Tensor:
        outputs: Tensor = self.net[7:](self._again(self._block, self.net[0](images)))
        return outputs

    def _block(self, x: Tensor) -> Tensor:
        x = self.net[1:3](x)
        outputs: Tensor = self._again(self.net[3:7], x) if self.nested else self.net[3:7](x)
        return outputs

    def _again(self, block: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        if self.reentrant is None:
            return block(x)
        outputs: Tensor = checkpoint(block, x, use_reentrant=self.reentrant)
        return outputs


every_way = pytest.mark.parametrize("nested", [False, True])
every_norm = pytest.mark.parametrize("norm", [nn.BatchNorm2d, WithActivation])


def learn(setting: Setting, model: nn.Module, chunk_size: int | None) -> None:
    method = setting.make(model, PGD(8 / 255, 3 / 255, random_start=0.5), chunk_size=chunk_size, seed=5)
    train(method, model, small_batches(4), momentum=0.9)


@cache
def trained_plainly(setting: Setting, norm: Callable[[int], nn.Module], chunk_size: int | None) -> nn.Module:
    """The model that computes nothing again."""
    model = split_batchnorm(Checkpointed(norm, None))
    learn(setting, model, chunk_size)
    return model


@every_way
@every_norm
@every_method
@pytest.mark.parametrize("chunk_size", [None, 4])
def test_a_method_takes_the_same_steps(
    setting: Setting, norm: Callable[[int], nn.Module], nested: bool, chunk_size: int | None
) -> None:
    """Bit by bit, with dropout, through every branch; the first convolution gives the block a gradient to carry."""
    model = split_batchnorm(Checkpointed(norm, False, nested))
    learn(setting, model, chunk_size)
    plain = trained_plainly(setting, norm, chunk_size)
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=0, atol=0)
    assert int(model.net[1].num_batches_tracked) == 4


def test_the_reentrant_kind_is_refused() -> None:
    model = split_batchnorm(Checkpointed(nn.BatchNorm2d, True))
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        PGD(8 / 255)(model, F.cross_entropy, *small_batches(1)[0])


@every_way
@every_norm
@pytest.mark.parametrize("branch", ["main", "adv"])
def test_ones_own_backward_pass_within_the_route(norm: Callable[[int], nn.Module], nested: bool, branch: str) -> None:
    models = [split_batchnorm(Checkpointed(norm, way, nested)) for way in (None, False)]
    for model in models:
        for tracking in ("now", "step"):
            torch.manual_seed(3)
            for images, labels in small_batches(2):
                with route(model, branch, tracking=tracking):  # type: ignore[arg-type]
                    F.cross_entropy(model(images), labels).backward()
            update_running_stats(model)
    torch.testing.assert_close(models[1].state_dict(), models[0].state_dict(), rtol=0, atol=0)
    own, expected = ([weight.grad for weight in model.parameters() if weight.grad is not None] for model in models)
    torch.testing.assert_close(own, expected, rtol=0, atol=0)


@every_way
@every_norm
def test_a_backward_pass_outside_of_the_route_is_refused(norm: Callable[[int], nn.Module], nested: bool) -> None:
    """Which branch a layer took is no longer known there; main would be a guess."""
    model = split_batchnorm(Checkpointed(norm, False, nested))
    images, labels = small_batches(1)[0]
    with route(model, "adv"):
        loss = F.cross_entropy(model(images), labels)
    for some in (loss, F.cross_entropy(model(images), labels)):
        with pytest.raises(RuntimeError, match=r"backward\(\) within the `with route"):
            some.backward()
    with route(model, "main"):
        F.cross_entropy(model(images), labels).backward()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@every_norm
def test_a_compiled_layer_refuses_it_too(norm: Callable[[int], nn.Module], backend: str) -> None:
    torch._dynamo.reset()
    model, alike = (split_batchnorm(Checkpointed(norm, False)) for _ in range(2))
    for layer in (model.net[1], model.net[5]):
        layer.compile(backend=backend, fullgraph=True)
    images, labels = small_batches(1)[0]
    losses = []
    for one in (model, alike):
        one.net[2].p = 0.0
        with route(one, "adv"):
            loss = F.cross_entropy(one(images), labels)
        losses.append(loss + F.cross_entropy(one(images), labels))
    torch.testing.assert_close(losses[0], losses[1], rtol=0, atol=1e-12)  # a forward pass is not refused
    with pytest.raises(RuntimeError, match=r"backward\(\) within the `with route"):
        losses[0].backward()
    torch._dynamo.reset()


@pytest.mark.parametrize("branch", ["adv", "main"])
def test_the_loss_of_a_method_is_refused_too(branch: str) -> None:
    model = split_batchnorm(Checkpointed(nn.BatchNorm2d, False))
    method = Setting("disadv", "conadv", delay=0).make(model, PGD(8 / 255, branch=branch), twin_branch=branch)
    batch = small_batches(1)[0]
    with pytest.raises(RuntimeError, match=r"call method\(batch\) in place of method.loss"):
        method.loss(batch).backward()
    model.zero_grad()
    method(batch)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize("inside", [True, False])
@every_norm
def test_compiled_blocks_inside_and_a_compiled_model_around(norm: Callable[[int], nn.Module], inside: bool) -> None:
    torch._dynamo.reset()
    setting = Setting("disadv", "conadv", delay=0)
    models = [split_batchnorm(Checkpointed(norm, way)) for way in (None, False)]
    models[0].net[2].p = models[1].net[2].p = 0.0  # a compiled dropout draws in another order
    if inside:
        models[1].net[1].compile(backend="eager")
        compiled: nn.Module = models[1]
    else:
        compiled = torch.compile(models[1], backend="aot_eager")  # type: ignore[assignment]
    learn(setting, models[0], 4)
    learn(setting, compiled, 4)
    torch.testing.assert_close(models[1].state_dict(), models[0].state_dict(), rtol=0, atol=1e-12)
    torch._dynamo.reset()
