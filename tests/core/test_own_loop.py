"""Loops of a user's own: mistakes that would silently train wrongly, and habits that are none."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import optimizer as optimizers

from conadv import PGD, ConAdv, split_batchnorm
from support.settings import Setting, every_method, small_batches, small_cnn

Batch = tuple[Tensor, Tensor]
ATTACK = PGD(8 / 255, random_start=0)


def prepared() -> nn.Module:
    return split_batchnorm(small_cnn())


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def train(method: Any, optimizer: torch.optim.Optimizer, steps: int = 5, accumulate: int = 1) -> None:
    for number, batch in enumerate(small_batches(steps), 1):
        method(batch)
        if number % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()


def test_a_step_in_eval_mode_warns_once_and_frozen_layers_do_not() -> None:
    model = prepared()
    method = ConAdv(model, F.cross_entropy, ATTACK)
    train(method, sgd(model), steps=3)  # every branch is trained, also with stale weights
    model.get_submodule("1").eval()  # a frozen layer
    train(method, sgd(model), steps=1)
    model.eval()
    with pytest.warns(UserWarning, match=r"eval mode.*model.train\(\)") as told:
        train(method, sgd(model), steps=2)
    assert len(told) == 1
    assert told[0].filename == __file__


# --- Whose weights the optimizer has -----------------------------------------------------------------------------


@pytest.mark.parametrize("accumulate", [1, 2, 4])
def test_several_models_and_optimizers_of_one_architecture_stay_silent(accumulate: int) -> None:
    """As with two networks that teach each other: one accumulates gradients while the other is updated."""
    models = [prepared(), prepared()]
    methods = [ConAdv(model, F.cross_entropy, ATTACK) for model in models]
    optimizers = [sgd(model) for model in models]
    for number, batch in enumerate(small_batches(9), 1):
        for one, (method, optimizer) in enumerate(zip(methods, optimizers, strict=True)):
            method(batch)
            if one or number % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()


def test_branches_may_have_optimizers_of_their_own() -> None:
    model = prepared()
    named = dict(model.named_parameters())
    parts = [[own for name, own in named.items() if (".adv." in name) == adv] for adv in (False, True)]
    optimizers = [torch.optim.SGD(part, lr=0.1) for part in parts]
    method = ConAdv(model, F.cross_entropy, ATTACK)
    for batch in small_batches(4):
        method(batch)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def test_master_weights_in_an_optimizer_stay_silent() -> None:
    """Mixed precision by hand: the optimizer has copies, which are copied back."""
    model = prepared()
    masters = [own.detach().clone().requires_grad_() for own in model.parameters()]
    optimizer = torch.optim.SGD(masters, lr=0.1)
    method = ConAdv(model, F.cross_entropy, ATTACK)
    for batch in small_batches(4):
        model.zero_grad()
        method(batch)
        for master, own in zip(masters, model.parameters(), strict=True):
            master.grad = own.grad
        optimizer.step()
        with torch.no_grad():
            for master, own in zip(masters, model.parameters(), strict=True):
                own.copy_(master)


def test_no_hook_of_optimizers_is_left_after_the_first_update() -> None:
    before = len(optimizers._global_optimizer_pre_hooks)
    methods = [ConAdv(model, F.cross_entropy, ATTACK) for model in (prepared(), prepared())]
    for method in methods:
        train(method, sgd(method._step.model), steps=2)
    assert len(optimizers._global_optimizer_pre_hooks) == before


def test_a_method_may_go_while_optimizers_step() -> None:
    """What is collected in the middle of an update must not change the hooks that PyTorch iterates over."""
    method = [ConAdv(prepared(), F.cross_entropy, ATTACK)]

    def collect(*_: Any) -> None:
        method.clear()
        gc.collect()

    handle = optimizers.register_optimizer_step_pre_hook(collect)
    try:
        train(ConAdv(model := prepared(), F.cross_entropy, ATTACK), sgd(model), steps=2)
    finally:
        handle.remove()


# --- Images with NaN --------------------------------------------------------------------------------------------


@every_method
def test_nan_in_later_images_reaches_the_loss(setting: Setting) -> None:
    method = setting.make(prepared())
    losses, batches = [], small_batches(6)
    batches[3][0][2, 1, 3, 3] = torch.nan
    for now, ahead in method.feed(batches):
        losses.append(method(now, ahead))
    assert losses[3].clean.isnan() or setting.method == "sam"
    late = 4 if setting.name == "recycled" else 3
    assert losses[late].adv.isnan() or setting.method == "vanilla"
    assert all(loss.clean.isfinite() and loss.adv.isfinite() for loss in losses[:3])
