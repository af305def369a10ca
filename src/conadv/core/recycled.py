"""Recycled: the backward pass of a batch also generates its twins, which the next step learns from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from .attack import Attack, Loss, check_attack
from .batch import Batch, Chunked, count_chunks
from .checks.peers import described
from .feed import Feed
from .handoff import Handoff, Queue, Twin, empty, queue_of
from .learner import Learner
from .methods import Work, total_loss
from .parts import Common, Losses, Part
from .roles import Role
from .share import TwinShare, select
from .spans import span
from .state import State, below, pack, unpack


class Recycled:
    """Learn from the images and from the twins of the last batch, which its own backward pass gave almost for free.

    The update at step t follows `(1 - adv_weight)·∇L(x_t) + adv_weight·∇L(x̂_{t-1})`, where `x̂_{t-1}` was generated with
    the weights of step t - 1; the first step takes the twins of its own batch. The attack is one step from the image
    itself, through the main branch: `random_start`, `branch` and `statistics` of the attack do not apply. A step is
    a call: with gradient accumulation, the twins are those of the batch before, and within a group of accumulated
    batches they were generated with the current weights.

    Args:
        model: the network, after `split_batchnorm`.
        loss: from outputs and labels to the mean loss over the images.
        attack: its step is taken along the gradient of the clean loss.
        adv_weight: share of the twins in the loss, below 1; the clean images have the rest.
        twin_share: the part of a batch's chunks that gets twins, such as "1/4"; other chunks in each step. Without
            chunks: the part of its images. The loss takes the mean over the twins.
        twin_branch: the BatchNorm branch that twins go through. "adv", as in the paper: they have their own statistics
            and affine parameters. "main": the affine parameters are those of the images; twins are normalized with
            the statistics of their batch, and the running statistics remain those of the images.
        handoff: where twins wait for the next step; None: in memory.
        common: what every method takes, see `conadv.Common`: chunk_size, seed, autocast, batch, input_name, together,
            place.
    """

    __slots__ = (
        "_adv_weight",
        "_attack_used",
        "_awaited",
        "_learner",
        "_made",
        "_primed",
        "_share",
        "handoff",
    )  # setting any other attribute is an error

    duties = Role.CLEAN | Role.ADV
    delay = 1

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        attack: Attack,
        *,
        adv_weight: float = 0.5,
        twin_share: float | str = 1,
        twin_branch: str = "adv",
        handoff: Handoff | None = None,
        **common: Unpack[Common],
    ) -> None:
        self.adv_weight = adv_weight
        self.handoff: Handoff = Queue() if handoff is None else handoff
        self._share = TwinShare.from_number(twin_share)
        self._primed = False
        self._made: int | None = None  # the batch whose twins are in flight; None: that of the step before
        self._awaited: dict[int, Twin | None] = {}  # twins of a loss that the caller backpropagates, by chunk
        self._learner = Learner(model, loss, common, twin_branch)
        self.attack = attack

    @property
    def attack(self) -> Attack:
        """Whose step is taken along the gradient; it may be replaced between steps."""
        return self._attack_used

    @attack.setter
    def attack(self, attack: Attack) -> None:
        check_attack(attack)
        attack.check_reusable()
        self._attack_used = attack

    @property
    def adv_weight(self) -> float:
        """The share of the twins in the loss; it may be changed between steps."""
        return self._adv_weight

    @adv_weight.setter
    def adv_weight(self, adv_weight: float) -> None:
        if not 0 <= adv_weight < 1:
            raise ValueError(f"adv_weight {adv_weight}: from 0 to below 1, since the clean loss brings the gradient")
        self._adv_weight = adv_weight

    @property
    def step(self) -> int:
        return self._learner.step

    def feed(self, loader: Iterable[Any]) -> Feed:
        """A loader of the pairs that the method is called with; see `Feed`."""
        return self._learner.feed(loader)

    def __call__(self, now: Any, ahead: Any = None) -> Losses:
        for parts, number, count in self._work(now):
            if parts:
                self._learner.learn(parts, number, count)
            gradient = parts[0].images.grad if parts and parts[0].branch == "main" else None
            if gradient is not None:  # the backward pass left it on the images
                with span("hand-off"):
                    self.handoff.put(self._twin(parts[0], gradient, count, self.step, number))
        self._made = None
        return self._learner.end_step()

    def loss(self, now: Any, ahead: Any = None) -> Tensor:
        work = [item for item in self._work(now) if item[0]]
        step, self._made = self.step, None
        total = total_loss(self._learner, work)
        factor: list[Tensor] = []  # what the caller's framework multiplied the loss by: scaling, accumulation
        total.register_hook(lambda gradient: factor.append(gradient.detach()))
        for parts, number, count in work:
            if not parts[0].images.requires_grad:
                continue
            self._awaited[number] = None
            parts[0].images.register_hook(partial(self._receive, parts[0], factor, count, step, number))
        return total

    @property
    def losses(self) -> Losses:
        """The mean losses of the last step."""
        return self._learner.losses

    def hand_over(self) -> None:
        """Queue the twins that the backward pass of the last loss generated, in the order of their chunks."""
        twins = [self._awaited[number] for number in sorted(self._awaited)]
        self._awaited = {}
        if None in twins:
            self._drop_twins()
            raise ValueError("backpropagate the loss of each step: recycled takes the twins from there")
        for twin in twins:
            assert twin is not None
            self.handoff.put(twin)

    def in_flight(self, step: int) -> range:
        return range(step - 1, step)

    def prime(self, batch: Any, number: int) -> None:
        own = self._learner.batch(batch)
        count = count_chunks(own, self._learner.chunk_size)
        for chunk_number, chunk in enumerate(self._learner.chunks(own)):
            if self._learner.has_twins(self._share, number, chunk_number):
                self.handoff.put(self._generate(chunk, number, chunk_number, count))
        self._primed, self._made = True, number

    def resume(self, step: int, in_flight: bool = False) -> None:
        """Continue at `step`.

        Args:
            step: how many steps were taken.
            in_flight: the twins of the batch before are in flight already; otherwise the caller primes them.
        """
        if not in_flight:
            empty(self.handoff)
        self._learner.step = step
        self._primed, self._made = in_flight, None

    def state_dict(self, all_ranks: bool = False) -> State:
        """The state besides the weights that the next step needs, as tensors for torch.save or safetensors.

        Args:
            all_ranks: on several ranks, gather the twins of all; every rank calls it.
        """
        self.hand_over()
        twins = {f"twins.{name}": tensor for name, tensor in queue_of(self.handoff).state().items()}
        return pack({**self._identity(), "step": self.step}, twins, own=True, all_ranks=all_ranks)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        about, tensors = unpack(state, self._identity(), own=True)
        self._learner.step = about["step"]
        twins = below("twins.", tensors)
        queue_of(self.handoff).restore(twins, self._learner.device)
        self._primed, self._made = len(twins) > 0, None

    def _identity(self) -> dict[str, Any]:
        own = {"method": "Recycled", "twin_share": float(self._share), "twin_branch": self._learner.twin_branch}
        return {**own, "chunk_size": self._learner.chunk_size, "seed": self._learner.seed}

    def _work(self, now: Any) -> Iterator[Work]:
        now = None if now is None else self._learner.batch(now)
        twins = {"twin_share": float(self._share), "twin_branch": self._learner.twin_branch}
        same = described("Recycled", self.attack, adv_weight=self.adv_weight, **twins)
        if self._learner.begin_step(now, same, delayed=True):
            self._drop_twins()
        self.hand_over()
        batch = None if now is None else self._primed_batch(now)
        count = self._count(batch)
        clean = self._learner.chunks(batch) if batch is not None else None
        made = max(self.step - 1, 0) if self._made is None else self._made
        for number in range(count):
            parts = []
            if clean is not None:
                chunk = next(clean)
                wanted = self._learner.has_twins(self._share, self.step, number)
                images = chunk.images.detach().requires_grad_(wanted)
                parts = self._learner.clean_parts(replace(chunk, images=images), 1 - self.adv_weight)
            if Role.ADV in self._learner.place.role and self._learner.has_twins(self._share, made, number):
                with span("hand-off"):
                    twin = self.handoff.take()
                parts.append(self._learner.adv_part(twin, self.adv_weight, float(self._share)))
            yield parts, number, count

    def _drop_twins(self) -> None:
        """Drop the twins in flight, of a step that failed: the next step takes those of its own batch, as the first."""
        empty(self.handoff)
        self._awaited, self._primed, self._made = {}, False, None

    def _primed_batch(self, batch: Batch | Chunked) -> Batch | Chunked:
        """Generate the twins of the first batch, which its own step learns from, and return the batch."""
        if not self._primed:
            if isinstance(batch, Chunked):  # it is iterated twice
                batch = Chunked(batch.count, list(batch.chunks))
            empty(self.handoff)  # a call that failed may have left some
            self.prime(batch, self.step)
        return batch

    def _generate(self, chunk: Batch, batch_number: int, chunk_number: int, count: int) -> Twin:
        """Generate the twins of a chunk with the current weights, in a separate backward pass."""
        self._learner.checks.look_at_images(self.attack, chunk.images)
        parts = self._learner.clean_parts(chunk, 1 - self.adv_weight)
        made = max(batch_number - 1, 0)
        learnt = Role.ADV in self._learner.place.role and self._learner.has_twins(self._share, made, chunk_number)
        if self._learner.together and learnt:
            # Stand-ins for the twins of that pass: convolutions of another size may round differently.
            some = select(chunk, self._learner.twin_images(self._share, chunk, batch_number, chunk_number))
            twin = Twin(some.images, some.labels, parts[0].call)
            parts.append(self._learner.adv_part(twin, self.adv_weight, float(self._share)))
        gradient = self._learner.input_gradient(parts, batch_number, chunk_number, count)
        return self._twin(parts[0], gradient, count, batch_number, chunk_number)

    def _twin(self, part: Part, gradient: Tensor, count: int, batch_number: int, chunk_number: int) -> Twin:
        """Generate the twin of a chunk from the gradient of its scaled loss."""
        images = part.images.detach()
        # The loss was a scaled mean; the loss of an attack is a sum over images.
        gradient = gradient / (self._learner.scale(part, count) / len(images))
        whole = Batch(images, part.labels, extra=part.extra)
        some = self._learner.twin_images(self._share, whole, batch_number, chunk_number)
        chosen = select(whole, some)
        seed = self._learner.attack_seed(batch_number, chunk_number)
        twins = self.attack.along(chosen.images, gradient if some is None else gradient[some], seed)
        return Twin(twins, chosen.labels, self._learner.call_of(chosen))

    def _receive(self, part: Part, factor: list[Tensor], count: int, step: int, number: int, gradient: Tensor) -> None:
        """Generate a twin when the caller's backward pass reaches the images."""
        # An overflow in 16 bits leaves no direction; the twin is the image itself there.
        own = torch.nan_to_num(gradient.detach() / factor[-1], nan=0.0)
        self._awaited[number] = self._twin(part, own, count, step, number)

    def _count(self, batch: Batch | Chunked | None) -> int:
        if batch is None:
            return self._learner.place.chunks or 0
        count = count_chunks(batch, self._learner.chunk_size)
        if not isinstance(self.handoff, Queue):
            return count
        twins = count if self._learner.chunk_size is None else self._share.count(count)
        if len(self.handoff) != twins:
            raise ValueError(
                f"a batch with {twins} chunks of twins follows one with {len(self.handoff)}: recycled needs batches of "
                "one size (drop_last=True drops the smaller last one)"
            )
        return count
