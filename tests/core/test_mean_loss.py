"""A loss that is not the mean over the images is refused in the first step, with every kind of output."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conadv import PGD, ConAdv, Vanilla, split_batchnorm
from conadv.core import validate
from conadv.core.validate import close
from support.settings import CLASSES, small_batches, small_cnn

WEIGHTS = torch.arange(1.0, CLASSES + 1, dtype=torch.float64)
ATTACK = PGD(8 / 255)


class Held:
    def __init__(self, logits: Tensor) -> None:
        self.logits = logits
        self.shared = torch.ones(3)


class Named(NamedTuple):
    logits: Tensor
    auxiliary: Tensor


OUTPUTS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "tensor": (lambda logits: logits, lambda outputs: outputs),
    "dict": (lambda logits: {"logits": logits}, lambda outputs: outputs["logits"]),
    "tuple": (lambda logits: Named(logits, logits.mean()), lambda outputs: outputs.logits),
    "object": (Held, lambda outputs: outputs.logits),
}


class Wrapped(nn.Module):
    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.net = split_batchnorm(small_cnn())
        self.make = make

    def forward(self, images: Tensor) -> Any:
        return self.make(self.net(images))


def step(output: str, chunk_size: int | None, **of_loss: Any) -> None:
    make, logits = OUTPUTS[output]
    model = Wrapped(make)

    def loss(outputs: Any, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits(outputs), labels, **of_loss)

    ConAdv(model, loss, ATTACK, chunk_size=chunk_size)(small_batches(1)[0])


@pytest.mark.parametrize("output", OUTPUTS)
def test_a_loss_that_is_no_mean_is_refused(output: str) -> None:
    with pytest.raises(ValueError, match="a method needs the mean over the images"):
        step(output, None, reduction="sum")
    with pytest.raises(ValueError, match="is not the mean of their losses"):
        step(output, 4, weight=WEIGHTS)


@pytest.mark.parametrize("output", OUTPUTS)
def test_a_mean_is_taken(output: str) -> None:
    step(output, 4, label_smoothing=0.1)
    step(output, None, weight=WEIGHTS)
    step(output, 8, weight=WEIGHTS)  # the batch is its only chunk


def test_a_loss_that_is_not_one_number_is_refused() -> None:
    with pytest.raises(ValueError, match="not one number"):
        Vanilla(small_cnn(), lambda outputs, _: outputs)(small_batches(1)[0])


def test_an_index_that_the_loss_ignores_is_looked_for_in_every_batch() -> None:
    model = split_batchnorm(small_cnn())
    method = ConAdv(model, nn.CrossEntropyLoss(ignore_index=2), ATTACK, chunk_size=4)
    images, labels = small_batches(1)[0]
    method((images, torch.where(labels == 2, 1, labels)))
    with pytest.raises(ValueError, match="labels that the loss ignores"):
        method((images, torch.full_like(labels, 2)))


def test_labels_that_cannot_be_cut_are_refused() -> None:
    images, labels = small_batches(1)[0]
    with pytest.raises(ValueError, match="4 labels for 8 images"):
        ConAdv(split_batchnorm(small_cnn()), F.cross_entropy, ATTACK, chunk_size=4)((images, labels[:4]))


def test_chunks_are_compared_in_the_first_16_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look waits for the device, and labels that a loss ignores may come late."""
    looks: list[bool] = []
    monkeypatch.setattr(validate, "check_mean", lambda *given: looks.append(given[-1]))
    chunked = ConAdv(split_batchnorm(small_cnn()), F.cross_entropy, ATTACK, chunk_size=4)
    whole = ConAdv(split_batchnorm(small_cnn()), F.cross_entropy, ATTACK)
    for batch in small_batches(20):
        chunked(batch)
        whole(batch)
    assert (looks.count(True), looks.count(False)) == (16 * 4, 1)


def test_what_has_no_loss_for_some_of_the_images_is_not_compared() -> None:
    """Such as a loss of pairs of images, which a part of a batch may not have."""

    def loss(outputs: Tensor, labels: Any) -> Tensor:
        assert len(outputs) % 2 == 0
        return (outputs[::2] * outputs[1::2]).mean()

    outputs = torch.rand(6)
    validate.check_mean(loss, loss(outputs, None), outputs, None, 6, True)
    with pytest.raises(ValueError, match="is not the mean of their losses"):
        validate.check_mean(
            lambda outputs, _: outputs.max(), torch.tensor(0.3), torch.tensor([0.1, 0.3]), None, 2, True
        )


def test_halves_of_an_odd_chunk_count_by_their_images() -> None:
    outputs = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0])
    validate.check_mean(lambda outputs, _: outputs.mean(), outputs.mean(), outputs, None, 5, True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_losses_are_the_same_up_to_16_times_the_rounding_of_the_outputs(dtype: torch.dtype) -> None:
    """To the power of 3/4, relative and absolute: twice as much around 1."""
    outputs, one = torch.ones(2, dtype=dtype), torch.tensor(1.0, dtype=torch.float64)
    most = 2 * 16 * torch.finfo(dtype).eps ** 0.75
    assert close(one + 0.99 * most, one, outputs)
    assert not close(one + 1.01 * most, one, outputs)
