"""Methods: each takes a batch and leaves gradients in `.grad`, or returns a loss.

Vanilla    x_t ──► main ──► gradients
ConAdv     x_t ──► main ──┬► gradients         x_{t+delay} ──► attack with these weights ──► hand-off
           hand-off ► adv ┘                    (delay 0: the twins of x_t itself, which is DisAdv)
Recycled   x_t ──► main ──┬► gradients         the same backward pass, one layer further ──► hand-off
           hand-off ► adv ┘                    (recycled.py)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol, Unpack

import torch
from torch import Tensor, nn

from .attack import Loss
from .batch import count_chunks
from .checks.peers import described
from .feed import Feed
from .learner import Learner
from .parts import Common, Losses, Part
from .roles import Role
from .state import State, pack, unpack

# The parts that a step learns from in one chunk, the number of the chunk, and how many there are.
Work = tuple[list[Part], int, int]


class Method(Protocol):
    """What a training loop needs from a method."""

    duties: Role

    @property
    def delay(self) -> int:
        """Steps between generating a twin and learning from it."""

    @property
    def step(self) -> int:
        """How many steps were taken."""

    def feed(self, loader: Iterable[Any]) -> Feed:
        """Wrap a loader so that it yields what the method is called with. A role that sees no batch gets None."""

    def __call__(self, now: Any, ahead: Any = None) -> Losses:
        """Add the gradients of one step to `.grad`."""

    def loss(self, now: Any, ahead: Any = None) -> Tensor:
        """The loss of one step, which the caller backpropagates; it holds the graph of the whole batch."""

    @property
    def losses(self) -> Losses:
        """The mean losses of the last step, which a call returns, and `loss` does not."""

    def hand_over(self) -> None:
        """Queue the twins that the backward pass of `loss` generated; otherwise the next step does it."""

    def in_flight(self, step: int) -> range:
        """The numbers of the batches whose twins are in flight before `step`, generated in consecutive steps."""

    def prime(self, batch: Any, number: int) -> None:
        """Generate the twins of batch `number` with the current weights, and put them in flight."""

    def resume(self, step: int) -> None:
        """Continue at `step`; the caller primes the batches that were in flight."""

    def state_dict(self, all_ranks: bool = False) -> State:
        """The state besides the weights that the next step needs, as tensors by name."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""


class Vanilla:
    """Learn from the images as they are: the baseline, with the same interface.

    Args:
        model: the network; with `chunk_size`, its BatchNorm layers are split (`split_batchnorm(model, ("main",))`).
        loss: from outputs and labels to the mean loss over the images.
        common: what every method takes, see `conadv.Common`: chunk_size, seed, autocast, batch, input_name, together,
            place.
    """

    __slots__ = ("_learner",)  # setting any other attribute is an error

    duties = Role.CLEAN
    delay = 0

    def __init__(self, model: nn.Module, loss: Loss, **common: Unpack[Common]) -> None:
        self._learner = Learner(model, loss, common)

    @property
    def step(self) -> int:
        return self._learner.step

    def feed(self, loader: Iterable[Any]) -> Feed:
        return self._learner.feed(loader)

    def __call__(self, now: Any, ahead: Any = None) -> Losses:
        for work in self._work(now):
            self._learner.learn(*work)
        return self._learner.end_step()

    def loss(self, now: Any, ahead: Any = None) -> Tensor:
        return total_loss(self._learner, list(self._work(now)))

    @property
    def losses(self) -> Losses:
        return self._learner.losses

    def hand_over(self) -> None:
        """Do nothing: there are no twins."""

    def in_flight(self, step: int) -> range:
        return range(0)

    def prime(self, batch: Any, number: int) -> None:
        """Do nothing: there are no twins."""

    def resume(self, step: int) -> None:
        self._learner.step = step

    def state_dict(self, all_ranks: bool = False) -> State:
        return pack({"method": "Vanilla", "step": self.step}, {}, own=False, all_ranks=all_ranks)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        about, _ = unpack(state, {"method": "Vanilla"}, own=False)
        self.resume(about["step"])

    def _work(self, now: Any) -> Iterator[Work]:
        batch = self._learner.batch(now)
        self._learner.begin_step(batch, described("Vanilla"), delayed=False)
        count = count_chunks(batch, self._learner.chunk_size)
        for number, chunk in enumerate(self._learner.chunks(batch)):
            yield self._learner.clean_parts(chunk, 1.0), number, count


def total_loss(learner: Learner, work: Iterable[Work]) -> Tensor:
    """Add up the scaled losses of a step, with their graph, and end the step.

    A process that learns from nothing has a loss of 0, which can be backpropagated too.
    """
    totals = [learner.objective(*item, mark=True) for item in work]
    learner.end_step()
    if not totals:
        return torch.zeros((), device=learner.device, requires_grad=True)
    total = totals[0] if len(totals) == 1 else sum(totals[1:], totals[0])
    learner.loop_checks.await_backward(total)
    return total
