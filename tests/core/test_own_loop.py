"""Mistakes of a loop that calls a method: each is heard, and what people rightly do is not."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conadv import PGD, ConAdv, Vanilla, split_batchnorm
from settings import SETTINGS, Setting, every_method, small_batches, small_cnn

Batch = tuple[Tensor, Tensor]
returns_a_loss = pytest.mark.parametrize(
    "setting",
    [one for one in SETTINGS if one.method in ("vanilla", "conadv") and not one.queued],
    ids=lambda one: one.name,
)


def prepared(setting: Setting | None = None) -> nn.Module:
    return split_batchnorm(small_cnn())


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def plain(model: nn.Module, batch: Batch, factor: float = 1.0) -> Tensor:
    return factor * F.cross_entropy(model(batch[0]), batch[1])


# --- A feed whose method is never called -----------------------------------------------------------------------


@every_method
@pytest.mark.parametrize("per_epoch", [1, 3, 20])
def test_a_feed_without_calls_is_heard_once(setting: Setting, per_epoch: int) -> None:
    method = setting.make(prepared())
    feeds = (method.feed(small_batches(per_epoch)) for _ in range(20 // per_epoch))
    with pytest.warns(UserWarning, match="8 batches of method.feed") as heard:
        taken = [pair for feed in feeds for pair in feed]
    assert len(taken) > 8
    assert len(heard) == 1
    assert heard[0].filename == __file__


@every_method
def test_a_feed_may_be_read_a_few_batches_ahead(setting: Setting) -> None:
    method = setting.make(prepared())
    waiting = []
    for pair in method.feed(small_batches(20)):
        waiting.append(pair)
        if len(waiting) == 7:
            method(*waiting.pop(0))


@every_method
def test_a_resumed_loop_may_skip_batches(setting: Setting) -> None:
    first = setting.make(prepared())
    for now, ahead in first.feed(small_batches(1)):
        first(now, ahead)
    method = setting.make(prepared())
    method.load_state_dict(first.state_dict())
    for _pair in method.feed(small_batches(20)):
        pass


# --- A loss of the loop's own, in addition ----------------------------------------------------------------------

DOUBLE = "your loop backpropagates its own loss"


@every_method
@pytest.mark.parametrize("factor", [1.0, 1024.0])
@pytest.mark.parametrize("first", [True, False])
def test_a_loss_that_is_backpropagated_twice_is_heard_once(setting: Setting, factor: float, first: bool) -> None:
    method = setting.make(model := prepared())
    optimizer = sgd(model)

    def train() -> None:
        for now, ahead in method.feed(small_batches(4)):
            optimizer.zero_grad()
            if first:
                plain(model, now, factor).backward()
            method(now, ahead)
            if not first:
                plain(model, now, factor).backward()
            optimizer.step()

    with pytest.warns(UserWarning, match=DOUBLE) as heard:
        train()
    assert len(heard) == 1


@pytest.mark.parametrize("first", [True, False])
def test_so_is_one_of_a_loop_that_backpropagates_both(first: bool) -> None:
    method = ConAdv(model := prepared(), F.cross_entropy, PGD(8 / 255))
    optimizer = sgd(model)

    def train() -> None:
        for batch in small_batches(2):
            optimizer.zero_grad(set_to_none=False)
            if first:
                plain(model, batch).backward()
            method.loss(batch).backward()
            if not first:
                plain(model, batch).backward()
            optimizer.step()

    with pytest.warns(UserWarning, match=DOUBLE):
        train()


def test_so_is_one_that_begins_with_the_second_call() -> None:
    method = ConAdv(model := prepared(), F.cross_entropy, PGD(8 / 255))
    first, second = small_batches(2)
    method(first)
    plain(model, second).backward()
    with pytest.warns(UserWarning, match=DOUBLE):
        method(second)


def test_bytes_and_images_by_name_are_recognized() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = prepared()

        def forward(self, *, pixels: Tensor) -> Tensor:
            out: Tensor = self.inner(pixels)
            return out

    method = ConAdv(model := Named(), F.cross_entropy, PGD(8 / 255), input_name="pixels")
    images, labels = small_batches(1)[0]
    images = (255 * images).byte()
    F.cross_entropy(model(pixels=images.double() / 255), labels).backward()
    with pytest.warns(UserWarning, match=DOUBLE):
        method((images, labels))


def cleared(model: nn.Module, method: Any, batch: Batch) -> None:
    """As one compares both gradients."""
    plain(model, batch).backward()
    model.zero_grad()
    method(batch)
    model.zero_grad()
    plain(model, batch).backward()
    model.zero_grad()


def measured(model: nn.Module, method: Any, batch: Batch) -> None:
    """The norm of the plain gradient, for a log."""
    method(batch)
    torch.autograd.grad(plain(model, batch), list(model.parameters()), allow_unused=True)


def logged(model: nn.Module, method: Any, batch: Batch) -> None:
    """The accuracy of the batch, with a graph that no one needs."""
    method(batch)
    plain(model, batch)


def added(model: nn.Module, method: Any, batch: Batch) -> None:
    """More weight for the clean loss, on purpose."""
    (method.loss(batch) + plain(model, batch)).backward()


def other_images(model: nn.Module, method: Any, batch: Batch) -> None:
    plain(model, (batch[0].flip(3), batch[1])).backward()
    method(batch)


def other_loss(model: nn.Module, method: Any, batch: Batch) -> None:
    model(batch[0]).square().mean().backward()
    method(batch)
    model(batch[0]).square().mean().backward()


def of_a_copy(model: nn.Module, method: Any, batch: Batch) -> None:
    other = copy.deepcopy(model)
    plain(other, batch).backward()
    method(batch)
    plain(other, batch).backward()


def another_method(model: nn.Module, method: Any, batch: Batch) -> None:
    Vanilla(model, F.cross_entropy)(batch)
    method(batch)


HABITS = (cleared, measured, logged, added, other_images, other_loss, of_a_copy, another_method)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("habit", HABITS, ids=lambda habit: habit.__name__)
def test_what_is_no_second_loss_stays_silent(habit: Callable[..., None], accumulate: int) -> None:
    method = ConAdv(model := prepared(), F.cross_entropy, PGD(8 / 255))
    optimizer = sgd(model)
    for number, batch in enumerate(small_batches(6)):
        if number % accumulate == 0:
            optimizer.zero_grad()
        habit(model, method, batch)
        if (number + 1) % accumulate == 0:
            optimizer.step()


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_a_method_and_its_model_can_be_copied_and_stored(steps: int) -> None:
    method = ConAdv(model := prepared(), F.cross_entropy, PGD(8 / 255))
    for batch in small_batches(steps):
        method.loss(batch).backward()
    stored = pickle.dumps(model)
    assert b"own_loss" not in stored  # a model without our layers loads without this library
    for other in (copy.deepcopy(method), pickle.loads(pickle.dumps(method))):
        for batch in small_batches(3):
            other(batch)
    assert pickle.loads(stored)(small_batches(1)[0][0]).shape == (8, 5)


def test_nothing_is_left_in_the_model_after_two_calls() -> None:
    method = ConAdv(model := prepared(), F.cross_entropy, PGD(8 / 255))
    for batch in small_batches(2):
        assert len(model._forward_hooks) == 1
        method(batch)
    assert not model._forward_hooks


def test_nor_if_the_method_is_gone() -> None:
    model = prepared()
    method = ConAdv(model, F.cross_entropy, PGD(8 / 255))
    gone = weakref.ref(method._learner)
    del method
    gc.collect()
    assert gone() is None
    assert not model._forward_hooks


# --- A loss that is not backpropagated --------------------------------------------------------------------------


@returns_a_loss
def test_losses_that_are_dropped_are_heard_in_the_third_call(setting: Setting) -> None:
    method = setting.make(model := prepared())
    optimizer = sgd(model)
    batches = small_batches(4)
    for batch in batches[:2]:
        loss = method.loss(batch)
        optimizer.step()
    assert loss.requires_grad
    with pytest.warns(UserWarning, match="2 losses of method.loss were not backpropagated"):
        loss = method.loss(batches[2])
    loss = method.loss(batches[3])  # heard once


def summed(method: Any, batches: list[Batch]) -> None:
    total = torch.zeros(())
    for batch in batches:
        total = total + method.loss(batch)
    total.backward()


def listed(method: Any, batches: list[Batch]) -> None:
    torch.stack([method.loss(batch) for batch in batches]).mean().backward()


def after_a_trial(method: Any, batches: list[Batch]) -> None:
    method.loss(batches[0])
    for batch in batches[1:]:
        method.loss(batch).backward()


def not_finite(method: Any, batches: list[Batch]) -> None:
    """Overflows, which people skip."""
    linear = method._learner.model[7].weight
    kept = linear.detach().clone()
    linear.data.fill_(torch.inf)
    for batch in batches:
        assert not method.loss(batch).isfinite()
    linear.data.copy_(kept)
    method.loss(batches[0]).backward()


def gradients_asked_for(method: Any, batches: list[Batch]) -> None:
    for batch in batches:
        torch.autograd.grad(method.loss(batch), list(method._learner.model.parameters()))


@returns_a_loss
@pytest.mark.parametrize("habit", [summed, listed, after_a_trial, not_finite, gradients_asked_for])
def test_losses_that_are_not_dropped_stay_silent(setting: Setting, habit: Callable[..., None]) -> None:
    model = prepared() if setting.adversarial else small_cnn()
    habit(setting.make(model), small_batches(5))


def test_a_method_keeps_no_loss_of_its_caller_alive() -> None:
    """On Python 3.11 and 3.12, whoever reads a frame's variables keeps them until the frame is left."""

    def losses() -> list[bool]:
        method = ConAdv(prepared(), F.cross_entropy, PGD(8 / 255))
        refs = []
        for batch in small_batches(3):
            loss = method.loss(batch)
            refs.append(weakref.ref(loss))
            loss.backward()
        return [ref() is not None for ref in refs]

    assert losses() == [False, False, True]


# --- Images with NaN --------------------------------------------------------------------------------------------


def broken(batch: Batch, value: float = torch.nan) -> Batch:
    images = batch[0].clone()
    images[2, 1, 3, 3] = value
    return images, batch[1]


@every_method
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_first_images_that_are_not_finite_are_refused(setting: Setting, value: float) -> None:
    method = setting.make(prepared(), PGD(0.1, random_start=0, low=None, high=None))
    pairs = iter(method.feed([broken(batch, value) for batch in small_batches(3)]))
    now, ahead = next(pairs)
    with pytest.raises(ValueError, match="the images have NaN or infinity"):
        method(now, ahead)


@every_method
def test_nan_in_later_images_reaches_the_loss(setting: Setting) -> None:
    method = setting.make(prepared())
    losses = []
    batches = [broken(batch) if number == 3 else batch for number, batch in enumerate(small_batches(6))]
    for now, ahead in method.feed(batches):
        losses.append(method(now, ahead))
    assert losses[3].clean.isnan() or setting.method == "sam"
    late = 4 if setting.name == "recycled" else 3
    assert losses[late].adv.isnan() or setting.method == "vanilla"
    assert all(loss.clean.isfinite() and loss.adv.isfinite() for loss in losses[:3])


@pytest.mark.parametrize("norm", ["linf", "l2"])
@pytest.mark.parametrize("direction", ["sign", "unit", "raw", "noise"])
@pytest.mark.parametrize("options", [{}, {"mean": (0.4, 0.5), "std": (0.2, 0.3)}, {"low": None, "high": None}], ids=str)
def test_a_twin_is_nan_where_its_image_is(norm: Any, direction: Any, options: dict[str, Any]) -> None:
    images, labels = broken(small_batches(1)[0])
    model = nn.Sequential(nn.Flatten(), nn.Linear(72, 5)).double()
    attack = PGD(0.1, steps=2, norm=norm, direction=direction, random_start=0.5, **options)
    assert attack(model, F.cross_entropy, images, labels)[images.isnan()].isnan().all()
    assert attack.along(images, torch.rand_like(images))[images.isnan()].isnan().all()


def test_a_model_that_takes_nan_for_missing_values_is_welcome() -> None:
    class Filled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.where(x.isnan(), 0.5, x)

    method = ConAdv(nn.Sequential(Filled(), prepared()), F.cross_entropy, PGD(0.1, low=None, high=None))
    for batch in small_batches(2):
        assert method(broken(batch)).adv.isfinite()
