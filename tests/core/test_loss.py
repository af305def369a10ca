"""The method as a loss that the caller backpropagates: the same gradients, whatever the caller does with it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import conadv
from conadv import PGD, ConAdv, Recycled, Vanilla, split_batchnorm
from support.settings import Setting, every_method, image_methods, small_batches, small_cnn, train

ATTACK = PGD(8 / 255, random_start=0.5)


@image_methods
@pytest.mark.parametrize("chunk_size", [None, 4])
@pytest.mark.parametrize("factor", [1.0, 1024.0, 0.25])
def test_a_loss_that_the_caller_backpropagates_takes_the_same_steps(
    setting: Setting, chunk_size: int | None, factor: float
) -> None:
    """`factor` is what a gradient scaler would apply and undo."""
    attack = PGD(8 / 255, 0.1, direction="raw", random_start=0.5)  # whose step depends on the length of the gradient
    one, other = (split_batchnorm(small_cnn()) for _ in range(2))
    called, method = (
        setting.make(model, attack, chunk_size=chunk_size, seed=1, adv_weight=0.3) for model in (one, other)
    )
    train(called, one, small_batches(5), lr=0.2, momentum=0.9)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.2, momentum=0.9)
    for now, ahead in method.feed(small_batches(5)):
        optimizer.zero_grad()
        (factor * method.loss(now, ahead)).backward()
        for parameter in other.parameters():
            if parameter.grad is not None:
                parameter.grad /= factor
        optimizer.step()
    torch.testing.assert_close(other.state_dict(), one.state_dict(), rtol=0, atol=1e-12)


def test_recycled_survives_an_overflow() -> None:
    """A gradient scaler skips a step whose gradients are not finite; the twins of that step are the images."""
    method = Recycled(split_batchnorm(small_cnn()), F.cross_entropy, PGD(8 / 255, direction="raw"))
    batches = small_batches(2)
    (method.loss(batches[0]) * float("inf")).backward()
    state = method.state_dict()
    assert torch.equal(state["twins.0.images"], batches[0][0])


def test_float16_needs_a_scaled_loss() -> None:
    method = Vanilla(split_batchnorm(small_cnn()).float(), F.cross_entropy, autocast=torch.float16)
    with pytest.raises(ValueError, match="float16 needs a scaled loss"):
        method((torch.rand(8, 2, 6, 6), torch.zeros(8, dtype=torch.long)))


# --- batches as people have them ---------------------------------------------------------------------------------


class Scaled(nn.Module):
    """A model with two inputs that returns a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = split_batchnorm(small_cnn())

    def forward(self, pixels: Tensor, scale: Tensor) -> dict[str, Tensor]:
        return {"logits": self.inner(pixels) * scale[:, None]}


@image_methods
def test_dicts_several_inputs_and_structured_targets(setting: Setting) -> None:
    def loss(outputs: dict[str, Tensor], labels: tuple[Tensor, Tensor]) -> Tensor:
        return (F.cross_entropy(outputs["logits"], labels[0], reduction="none") * labels[1]).mean()

    def as_batch(item: dict[str, Tensor]) -> conadv.Batch:
        return conadv.Batch(item["x"], (item["y"], item["w"]), extra={"scale": item["s"]})

    items = [
        {"x": x, "y": y, "w": torch.linspace(0.5, 2, 8).double(), "s": torch.linspace(1, 3, 8).double()}
        for x, y in small_batches(3)
    ]
    model = Scaled()
    method = setting.make(model, PGD(0, random_start=0), chunk_size=4, batch=as_batch, input_name="pixels")
    method._step.loss = loss
    reference = small_cnn()
    for number, (now, ahead) in enumerate(method.feed(items)):
        model.zero_grad()
        method(now, ahead)
        if number == 0:
            total = sum(
                loss({"logits": reference(part["x"]) * part["s"][:, None]}, (part["y"], part["w"])) / 2
                for part in ({k: v[:4] for k, v in now.items()}, {k: v[4:] for k, v in now.items()})
            )
            total.backward()
            torch.testing.assert_close(model.inner[0].weight.grad, reference[0].weight.grad, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("item", "what", "hint"),
    [
        ([np.zeros(3), torch.zeros(3)], "a list of ndarray and Tensor", r"torch.as_tensor\(item\[0\]\)"),
        ({"x": torch.zeros(3)}, "a dict with the keys x", r"item\['x'\], item\['images'\]"),
    ],
)
def test_what_is_not_images_and_labels_is_refused(item: Any, what: str, hint: str) -> None:
    method = Vanilla(split_batchnorm(small_cnn()), F.cross_entropy)
    with pytest.raises(ValueError, match=rf"{what}, not \(images, labels\) as tensors: say how to get them.*{hint}"):
        method(item)


def test_a_pair_of_feed_that_is_passed_as_one_argument_is_refused() -> None:
    method = ConAdv(split_batchnorm(small_cnn()), F.cross_entropy, ATTACK)
    (pair,) = method.feed(small_batches(1))
    with pytest.raises(ValueError, match=r"for now, ahead in method.feed\(loader\): method\(now, ahead\)"):
        method(pair)


# --- checks ------------------------------------------------------------------------------------------------------


def test_delay_cannot_be_changed() -> None:
    method = ConAdv(split_batchnorm(small_cnn()), F.cross_entropy, ATTACK)
    with pytest.raises(AttributeError):
        method.delay = 2


@every_method
def test_a_method_follows_its_model(setting: Setting) -> None:
    """Made before the model gets its dtype (or device): the steps are those of a method made after it."""
    early, late = split_batchnorm(small_cnn()).float(), split_batchnorm(small_cnn()).float().double()
    one = setting.make(early, PGD(8 / 255, random_start=0))
    early.double()
    other = setting.make(late, PGD(8 / 255, random_start=0))
    train(one, early, small_batches(3))
    train(other, late, small_batches(3))
    torch.testing.assert_close(late.state_dict(), early.state_dict(), rtol=0, atol=0)


def test_lbfgs_is_refused_where_a_call_counts_as_a_step() -> None:
    model, batch = split_batchnorm(small_cnn()), small_batches(1)[0]
    method = Recycled(model, F.cross_entropy, ATTACK)
    with pytest.raises(ValueError, match="LBFGS evaluates its closure several times"):
        torch.optim.LBFGS(model.parameters()).step(lambda: method(batch).clean)


def test_a_mistake_that_was_refused_is_refused_again() -> None:
    """Also in a second try of the same loop, as in a notebook."""
    method = Vanilla(small_cnn(), lambda x, y: F.cross_entropy(x, y, reduction="sum"))
    for _ in range(2):
        with pytest.raises(ValueError, match="the mean over the images"):
            method(*next(iter(method.feed(small_batches(1)))))
