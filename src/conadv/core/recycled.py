"""Recycled: the twins of a batch come with its own backward pass, and are learnt from beside the next batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .attack import PGD, Loss
from .batch import Batch, Chunked, count_chunks
from .handoff import Handoff, Queue, Twin, empty, queue_of
from .learner import Learner, Losses, Part, adv_part, clean_parts
from .methods import Pair
from .roles import ALONE, Place, Role


class Recycled:
    """Learn from the images and from the twins of the last batch, which its own backward pass gave almost for free.

    The update at step t follows (1 - adv_weight)·∇L(x_t) + adv_weight·∇L(x̂_{t-1}), x̂_{t-1} made with the weights
    of step t - 1; the first step takes the twins of its own batch. The attack is one step from the image itself,
    through the main branch: `random_start`, `branch` and `statistics` of the attack do not apply.
    """

    duties = Role.CLEAN | Role.ADV
    delay = 1

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        attack: PGD,
        *,
        adv_weight: float = 0.5,
        chunk_size: int | None = None,
        seed: int | None = None,
        autocast: torch.dtype | None = None,
        place: Place = ALONE,
        handoff: Handoff | None = None,
    ) -> None:
        if attack.steps != 1 or attack.targeted:
            raise ValueError(
                "recycled takes one untargeted step along the gradient that it has: steps=1, targeted=False"
            )
        if not 0 <= adv_weight < 1:
            raise ValueError(f"adv_weight {adv_weight}: from 0 to below 1, since the clean loss brings the gradient")
        self.attack = attack
        self.adv_weight = adv_weight
        self.handoff: Handoff = Queue() if handoff is None else handoff
        self._primed = False
        self._learner = Learner(model, loss, chunk_size, seed, autocast, place)
        self._learner.require_branches("main", "adv")

    @property
    def step(self) -> int:
        return self._learner.step

    def feed(self, batches: Iterable[Batch | None]) -> Iterator[Pair]:
        for batch in batches:
            if not self._primed and batch is not None:
                if isinstance(batch, Chunked):  # it is read twice
                    batch = Chunked(batch.count, list(batch.chunks))
                self.prime(batch, self.step)
            yield batch, None

    def __call__(self, now: Batch | None, ahead: Batch | None = None) -> Losses:
        count = self._count(now)
        clean = self._learner.chunks(now) if now is not None else None
        for number in range(count):
            parts = []
            if clean is not None:
                images, *rest = next(clean)
                parts = clean_parts((images.detach().requires_grad_(), *rest), 1 - self.adv_weight)
            if Role.ADV in self._learner.place.role:
                parts.append(adv_part(self.handoff.take(), self.adv_weight))
            self._learner.learn(parts, number, count)
            if clean is not None:  # the backward pass left the gradient on the images
                self.handoff.put(self._twin(parts[0], parts[0].images.grad, count, self.step, number))
        return self._learner.end_step()

    def in_flight(self, step: int) -> range:
        return range(step - 1, step)

    def prime(self, batch: Batch, number: int) -> None:
        count = count_chunks(batch, self._learner.chunk_size)
        for chunk_number, chunk in enumerate(self._learner.chunks(batch)):
            self._learner.require_pixels(self.attack, chunk[0])
            part = clean_parts(chunk, 1 - self.adv_weight)[0]
            gradient = self._learner.input_gradient(part, number, chunk_number, count)
            self.handoff.put(self._twin(part, gradient, count, number, chunk_number))
        self._primed = True

    def resume(self, step: int) -> None:
        empty(self.handoff)
        self._learner.step = step
        self._primed = False

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "twins": queue_of(self.handoff).state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._learner.step = state["step"]
        queue_of(self.handoff).restore(state["twins"], self._learner.device)
        self._primed = len(state["twins"]) > 0

    def _twin(self, part: Part, gradient: Tensor | None, count: int, batch_number: int, chunk_number: int) -> Twin:
        """The twin of a chunk, from the gradient of its weighted loss."""
        assert gradient is not None
        images = part.images.detach()
        if self.attack.direction == "noise":
            gradient = self.attack.noise(images, self._learner.generator(batch_number, chunk_number))
        # The loss was a weighted mean; the loss of an attack is a sum over images.
        scale = part.weight * self._learner.place.share / (count * len(images))
        return Twin(self.attack.step(images, images, gradient / scale), part.labels)

    def _count(self, now: Batch | None) -> int:
        if now is None:
            return self._learner.place.chunks or 0
        count = count_chunks(now, self._learner.chunk_size)
        if isinstance(self.handoff, Queue) and len(self.handoff) != count:
            raise ValueError(
                f"a batch of {count} chunks, after one of {len(self.handoff)}: recycled needs `method.feed(loader)` "
                "around a loader whose batches have one size (drop_last=True drops the smaller last one)"
            )
        return count
