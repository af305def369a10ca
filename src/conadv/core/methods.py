"""The ways to take a step: a method takes a batch and leaves gradients in `.grad`, nothing else.

Vanilla    x_t ──► main ──► gradients
ConAdv     x_t ──► main ──┬► gradients         x_{t+delay} ──► attack with these weights ──► hand-off
           hand-off ► adv ┘                    (delay 0: the twins of x_t itself, which is DisAdv)
Recycled   x_t ──► main ──┬► gradients         the same backward pass, one layer further ──► hand-off
           hand-off ► adv ┘                    (recycled.py)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import nn

from .attack import PGD, Loss
from .batch import Batch, Chunk, count_chunks
from .handoff import Handoff, Queue, empty, queue_of
from .learner import Learner, Losses, adv_part, clean_parts
from .roles import ALONE, Place, Role
from .splitbn import plain_layers

# What a step sees of the data: the batch to learn from, and the one to attack; None where a role needs none.
Pair = tuple[Batch | None, Batch | None]


class Method(Protocol):
    """What a training loop knows of a method."""

    duties: Role
    delay: int

    @property
    def step(self) -> int:
        """How many steps were taken."""

    def feed(self, batches: Iterable[Batch | None]) -> Iterator[Pair]:
        """What the method is called with, step by step. Batches may be None for a role that sees none."""

    def __call__(self, now: Batch | None, ahead: Batch | None = None) -> Losses:
        """Add the gradients of one step to `.grad`."""

    def in_flight(self, step: int) -> range:
        """The numbers of the batches whose twins are in flight before `step`, each made one step after the last."""

    def prime(self, batch: Batch, number: int) -> None:
        """Put the twins of batch `number`, made with the weights as they are, in flight."""

    def resume(self, step: int) -> None:
        """Go on at `step`; what was in flight is to be primed again."""

    def state_dict(self) -> dict[str, Any]:
        """What the next step needs beside the weights, as numbers and tensors; of a process that stands alone."""

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Vanilla:
    """Learn from the images as they are: the baseline, by the same calls."""

    duties = Role.CLEAN
    delay = 0

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        *,
        chunk_size: int | None = None,
        seed: int | None = None,
        autocast: torch.dtype | None = None,
        place: Place = ALONE,
    ) -> None:
        self._learner = Learner(model, loss, chunk_size, seed, autocast, place)
        if chunk_size is not None and plain_layers(model):  # chunks need statistics that move once a step
            self._learner.require_branches("main")

    @property
    def step(self) -> int:
        return self._learner.step

    def feed(self, batches: Iterable[Batch | None]) -> Iterator[Pair]:
        for batch in batches:
            yield batch, None

    def __call__(self, now: Batch | None, ahead: Batch | None = None) -> Losses:
        assert now is not None
        count = count_chunks(now, self._learner.chunk_size)
        for number, chunk in enumerate(self._learner.chunks(now)):
            self._learner.learn(clean_parts(chunk, 1.0), number, count)
        return self._learner.end_step()

    def in_flight(self, step: int) -> range:
        return range(0)

    def prime(self, batch: Batch, number: int) -> None:
        """Nothing is ever in flight."""

    def resume(self, step: int) -> None:
        self._learner.step = step

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.resume(state["step"])


class ConAdv:
    """Learn from the images and from their twins, generated `delay` steps ago with the weights at that step.

    The update at step t follows (1 - adv_weight)·∇L(x_t) + adv_weight·∇L(x̂_t), x̂_t made with the weights of step
    t - delay (the first ones: with the weights at the start). delay 1 is the paper's ConAdv, delay 0 is DisAdv.

    `stale_weights` is for a rank that attacks and learns: a context in which the model has the weights of `delay`
    steps ago. Twins are then generated when they are learnt from, one chunk at a time, and none wait in memory.
    """

    duties = Role.CLEAN | Role.ADV | Role.ATTACK

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        attack: PGD,
        *,
        delay: int = 1,
        adv_weight: float = 0.5,
        chunk_size: int | None = None,
        seed: int | None = None,
        autocast: torch.dtype | None = None,
        place: Place = ALONE,
        handoff: Handoff | None = None,
        stale_weights: Callable[[], AbstractContextManager[None]] | None = None,
    ) -> None:
        if delay < 0:
            raise ValueError(f"delay {delay}: take 0 (DisAdv), 1 (ConAdv) or more")
        if not 0 <= adv_weight <= 1:
            raise ValueError(f"adv_weight {adv_weight}: a part of the loss, from 0 to 1")
        self.attack = attack
        self.delay = delay
        self.adv_weight = adv_weight
        self.handoff: Handoff = Queue() if handoff is None else handoff
        self._stale_weights = nullcontext if stale_weights is None else stale_weights
        self._ahead = delay if stale_weights is None else 0  # how many batches are in flight between steps
        self._attacked = 0  # the number of the next batch to attack
        self._loaded = False
        self._learner = Learner(model, loss, chunk_size, seed, autocast, place)
        self._learner.require_branches("main", "adv")

    @property
    def step(self) -> int:
        return self._learner.step

    def feed(self, batches: Iterable[Batch | None]) -> Iterator[Pair]:
        """Pair each batch with the one to attack beside it. The first ones are attacked here, before the first step."""
        if not self._loaded:
            self._forget()
        self._loaded = False
        delay = self._ahead if self._does(Role.ATTACK) else 0
        window: deque[Batch | None] = deque()
        for batch in batches:
            window.append(batch)
            if len(window) > delay:
                yield self._pair(window.popleft(), batch)
            elif len(window) > self._attacked - self.step:
                assert batch is not None
                self.prime(batch, self._attacked)
        while window:
            yield self._pair(window.popleft(), None)

    def __call__(self, now: Batch | None, ahead: Batch | None = None) -> Losses:
        self._check_ahead(ahead)
        clean = self._chunks(now)
        attacked = self._chunks(None if ahead is now else ahead)  # chunks of the same batch are made once
        count = self._count(now, ahead)
        for number in range(count):
            chunk = next(clean, None)
            self._attack(chunk if ahead is now else next(attacked, None), self._attacked, number)
            parts = [] if chunk is None else clean_parts(chunk, 1 - self.adv_weight)
            if self._does(Role.ADV):
                parts.append(adv_part(self.handoff.take(), self.adv_weight))
            if parts:
                self._learner.learn(parts, number, count)
        for number, chunk in enumerate(attacked, count):  # the batch ahead may be the larger one
            self._attack(chunk, self._attacked, number)
        self._attacked += ahead is not None
        return self._learner.end_step()

    def in_flight(self, step: int) -> range:
        return range(step, step + self._ahead)

    def prime(self, batch: Batch, number: int) -> None:
        for chunk_number, chunk in enumerate(self._chunks(batch)):
            self._attack(chunk, number, chunk_number)
        self._attacked = number + 1

    def resume(self, step: int) -> None:
        empty(self.handoff)
        self._learner.step = self._attacked = step
        self._loaded = True

    def state_dict(self) -> dict[str, Any]:
        counts = {"step": self.step, "attacked": self._attacked, "chunk_size": self._learner.chunk_size}
        return {**counts, "twins": queue_of(self.handoff).state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["attacked"] - state["step"] > self.delay or state["chunk_size"] != self._learner.chunk_size:
            raise ValueError("the state is of a method with another delay or chunk_size: make this one alike")
        self._learner.step, self._attacked = state["step"], state["attacked"]
        queue_of(self.handoff).restore(state["twins"], self._learner.device)
        self._loaded = True

    def _chunks(self, batch: Batch | None) -> Iterator[Chunk]:
        return iter(()) if batch is None else self._learner.chunks(batch)

    def _attack(self, chunk: Chunk | None, batch_number: int, chunk_number: int) -> None:
        """Put the twins of a chunk in flight."""
        if chunk is not None:
            with self._stale_weights():
                twin = self._learner.attack(self.attack, chunk, batch_number, chunk_number)
            self.handoff.put(twin)

    def _check_ahead(self, ahead: Batch | None) -> None:
        if ahead is not None and self._attacked - self.step != self._ahead:
            raise ValueError(
                f"{self._attacked - self.step} batches are in flight where delay {self.delay} asks for {self._ahead}: "
                "take the batches from `method.feed(loader)`"
            )

    def _does(self, duty: Role) -> bool:
        return duty in self._learner.place.role

    def _pair(self, now: Batch | None, ahead: Batch | None) -> Pair:
        return now if self._does(Role.CLEAN) else None, ahead if self._does(Role.ATTACK) else None

    def _count(self, now: Batch | None, ahead: Batch | None) -> int:
        batch = now if now is not None else ahead
        if batch is not None:
            return count_chunks(batch, self._learner.chunk_size)
        return self._learner.place.chunks or 0

    def _forget(self) -> None:
        """Twins left by a feed that was not finished belong to batches that do not come again."""
        if self._attacked > self.step:
            self.handoff.clear()
            self._attacked = self.step
