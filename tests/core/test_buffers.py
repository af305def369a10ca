"""Statistics that no branch owns are refused by name; buffers that are no statistics are not."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conadv import split_batchnorm
from support.settings import Setting, adversarial_methods, every_method, small_batches, small_cnn, train


class RunningScale(nn.Module):
    """A norm of one's own, with a moving average in a buffer; `replaces` it instead of writing into it."""

    def __init__(self, features: int, replaces: bool = False) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(features, dtype=torch.float64))
        self.replaces = replaces

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x / self.scale.view(-1, 1, 1)
        scale = x.detach().square().mean((0, 2, 3)).sqrt()
        if self.replaces:
            self.scale = 0.9 * self.scale + 0.1 * scale
        else:
            self.scale.lerp_(scale, 0.1)
        return x / (scale.view(-1, 1, 1) + 1e-3)


class ByHand(nn.Module):
    """A model that holds a BatchNorm layer, but normalizes with its tensors by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(2).double()
        self.rest = small_cnn()

    def forward(self, x: Tensor) -> Tensor:
        norm = self.norm
        x = F.batch_norm(x, norm.running_mean, norm.running_var, norm.weight, norm.bias, self.training)
        outputs: Tensor = self.rest(x)
        return outputs


class Harmless(nn.Module):
    """Buffers as people have them that are no statistics: tables, masks, counters, caches, nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.full((6, 6), float("-inf")).triu(1))
        self.register_buffer("unknown", torch.tensor(float("nan")))
        self.register_buffer("ids", torch.arange(6))
        self.register_buffer("steps", torch.tensor(0))
        self.register_buffer("running_mean", torch.zeros(2))  # frozen statistics, as in detection models
        self.register_buffer("cache", torch.zeros(0), persistent=False)
        self.register_buffer("absent", None)

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        self.cache = torch.ones(x.shape[-1])
        return x - self.running_mean.view(-1, 1, 1)


def with_norm(norm: nn.Module) -> nn.Sequential:
    return nn.Sequential(norm, *small_cnn())


def take_steps(setting: Setting, model: nn.Module) -> None:
    train(setting.make(model), model, small_batches(2))


@adversarial_methods
@pytest.mark.parametrize("replaces", [False, True])
def test_a_layer_with_statistics_of_its_own_is_refused_by_name(setting: Setting, replaces: bool) -> None:
    model = split_batchnorm(with_norm(RunningScale(2, replaces)))
    for _ in range(2):  # also a second time
        with pytest.raises(ValueError, match=r"^0 \(RunningScale\) tracks .*: replace it by a layer without such"):
            take_steps(setting, model)


def test_vanilla_has_nothing_to_mix() -> None:
    take_steps(Setting("vanilla", "vanilla"), split_batchnorm(with_norm(RunningScale(2)), ("main",)))


def test_a_model_that_starts_in_eval_mode_is_looked_at_later() -> None:
    model = split_batchnorm(with_norm(RunningScale(2)))
    for layer in (model[2], model[5]):
        layer.adv.num_batches_tracked.fill_(1)
    method = Setting("disadv", "conadv", delay=0).make(model.eval())
    batch = small_batches(1)[0]
    with pytest.warns(UserWarning, match="eval mode"):
        method(batch, batch)
    model.train()
    with pytest.raises(ValueError, match="tracks statistics of images in its buffer scale"):
        method(batch, batch)


def test_a_layer_whose_tensors_are_used_without_calling_it_is_refused() -> None:
    """Its images would never meet a branch, without a word."""
    with pytest.raises(ValueError, match=r"norm \(SplitBatchNorm2d\) tracks statistics of images"):
        take_steps(Setting("conadv", "conadv"), split_batchnorm(ByHand()))


@every_method
def test_buffers_that_are_no_statistics_are_left_alone(setting: Setting) -> None:
    model = small_cnn()
    model[0] = nn.utils.parametrizations.spectral_norm(model[0])
    model[7] = nn.utils.spectral_norm(model[7])  # the older kind, by a hook
    model = nn.Sequential(Harmless(), model).double()
    take_steps(setting, split_batchnorm(model))
