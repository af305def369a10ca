"""One step of learning, the same for every method: chunk by chunk, part by part, each through its branch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .attack import PGD, Loss, input_gradient, without_trace
from .batch import Batch, Chunk, cut, to_pixels
from .branches import split_layers
from .buffers import no_mixed_statistics
from .handoff import Twin
from .roles import ALONE, Place
from .seeds import mix, untouched_randomness
from .splitbn import closed, plain_layers, routed, update_running_stats
from .wrappers import data_parallel, innermost, unwrap

# What a random number is for: seeds of different purposes never meet.
_ATTACK, _FORWARD = 1, 2
_BRANCH_NUMBER = {"main": 0, "aug": 1, "adv": 2}


class Part(NamedTuple):
    """Images that a step learns from, the branch they go through, and their weight in the loss."""

    branch: str
    images: Tensor
    labels: Tensor
    weight: float


def clean_parts(chunk: Chunk, weight: float) -> list[Part]:
    """The images and, where the batch has one, their augmented view, with equal parts of the weight."""
    images, labels, *augmented = chunk
    share = weight / (1 + len(augmented))
    return [Part("main", images, labels, share), *(Part("aug", view, labels, share) for view in augmented)]


def adv_part(twin: Twin, weight: float) -> Part:
    return Part("adv", twin.images, twin.labels, weight)


class Losses(NamedTuple):
    """Mean losses over this process' share of the batch, without a graph; zero where it has no part in one."""

    clean: Tensor
    adv: Tensor


class Learner:
    """A model and its loss, and how a batch becomes gradients: in chunks, each with its own BatchNorm statistics."""

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        chunk_size: int | None,
        seed: int | None,
        autocast: torch.dtype | None,
        place: Place,
    ) -> None:
        if chunk_size is not None and chunk_size < 1:
            raise ValueError(f"chunk_size {chunk_size}: take at least 1 image, or None for the whole batch")
        if autocast == torch.float16:
            raise ValueError("autocast torch.float16 needs a scaled loss, which a method does not do: torch.bfloat16")
        self.model = model
        self.loss = loss
        self.chunk_size = chunk_size
        self.seed = seed
        self.autocast = autocast
        self._parallel = data_parallel(model)
        self.place = _of_rank(self._parallel) if place is ALONE and self._parallel is not None else place
        self.step = 0
        parameter = next(model.parameters(), None)
        if parameter is None:
            raise ValueError("a model without parameters has nothing to learn")
        self.device, self.dtype = parameter.device, parameter.dtype
        self._losses = torch.zeros(2, device=self.device, dtype=torch.promote_types(self.dtype, torch.float32))
        self._looked = False  # whether the images were seen to be pixels
        self._watched = True  # whether no layer was seen to mix the statistics of several branches

    def require_branches(self, *branches: str) -> None:
        """Refuse a model that would mix the statistics of clean and adversarial images without a word."""
        self._watched = len(branches) == 1
        call = f"conadv.split_batchnorm(model, branches={branches}) before making the optimizer and the method"
        for name in plain_layers(self.model):
            raise ValueError(f"{name} is a plain BatchNorm layer: call {call}")
        for layer in split_layers(self.model):
            if not set(branches) <= set(layer.branches):
                raise ValueError(f"the model has only the branches {', '.join(layer.branches)}: call {call}")
        if "adv" in branches and self._parallel is not None and self._parallel.find_unused_parameters:
            raise ValueError("two branches in a step look unused in turn: wrap with find_unused_parameters=False")

    def chunks(self, batch: Batch) -> Iterator[Chunk]:
        """The chunks of a batch, where the model is and as it takes them."""
        for images, labels, *augmented in cut(batch, self.chunk_size):
            first, *rest = (to_pixels(view, self.device, self.dtype) for view in (images, *augmented))
            yield first, labels.to(self.device, non_blocking=True), *rest

    def learn(self, parts: list[Part], number: int, count: int) -> None:
        """Add the gradients of chunk `number` of `count` to `.grad`: a part at a time, whose activations then go.

        DistributedDataParallel exchanges gradients once a step, with the last part of the last chunk. A static graph
        does not allow a first backward pass without an exchange: there all parts are learnt from at once.
        """
        if number == 0:
            self._require_cleared_branches()
        together = [parts] if self._parallel and self._parallel.static_graph else [[part] for part in parts]
        losses = []
        for some in together:
            with self._syncing(last=number == count - 1 and some is together[-1]):
                elsewhere = [part.branch for part in parts if all(part is not one for one in some)]
                losses += self._learn(some, elsewhere, number, count)
        clean = sum(part.branch != "adv" for part in parts)
        for part, loss in zip(parts, losses, strict=True):
            place, mates = (1, 1) if part.branch == "adv" else (0, clean)
            self._losses[place] += loss / (mates * count)

    def end_step(self) -> Losses:
        """Let the running statistics move, unless others have a part in them, and start the next step."""
        if self.place.updates_stats:
            update_running_stats(self.model)
        self.step += 1
        losses = Losses(*self._losses.clone())
        self._losses.zero_()
        return losses

    def attack(self, attack: PGD, chunk: Chunk, batch_number: int, chunk_number: int) -> Twin:
        images, labels = chunk[:2]
        self.require_pixels(attack, images)
        generator = self.generator(batch_number, chunk_number)
        with self._precision():
            return Twin(attack(self.model, self.loss, images, labels, generator), labels)

    def input_gradient(self, part: Part, step: int, number: int, count: int) -> Tensor:
        """The gradient that `learn` would leave on the images of a part in `step`, bit by bit. It leaves no trace."""
        model = unwrap(self.model)
        seed = None if self.seed is None else self._seed(step, number, part.branch)

        def total(images: Tensor) -> Tensor:
            with self._precision():
                loss = self.loss(model(images), part.labels)
            return (part.weight * loss).mul(self.place.share / count)

        return input_gradient(model, total, part.images, partial(without_trace, model, part.branch, None, seed))

    def require_pixels(self, attack: PGD, images: Tensor) -> None:
        """Look at the first images only: it waits for the device."""
        if not self._looked:
            attack.check_range(images)
            self._looked = True

    def generator(self, batch_number: int, chunk_number: int) -> torch.Generator:
        """What is random in an attack is a function of the seed, the batch and the chunk."""
        seed = torch.initial_seed() if self.seed is None else self.seed
        return torch.Generator().manual_seed(mix(seed, _ATTACK, batch_number, self.place.first_chunk + chunk_number))

    def _learn(self, parts: list[Part], elsewhere: list[str], number: int, count: int) -> list[Tensor]:
        """Learn from some parts; `elsewhere` are the branches of the other parts of the chunk."""
        losses = [self._forward(part, number) for part in parts]
        weighted = [part.weight * loss for part, loss in zip(parts, losses, strict=True)]
        total = torch.stack(weighted).sum().mul(self.place.share / count)
        if self._parallel is not None:  # it waits for every parameter, also for those of the other branches
            total = _Touch.apply(total, *self._weights_of(elsewhere))
        with self._recomputing(parts):
            total.backward()
        return [loss.detach() for loss in losses]

    def _weights_of(self, branches: list[str]) -> list[nn.Parameter]:
        owners = [layer.owner(branch) for layer in split_layers(self.model) for branch in branches]
        return [p for owner in owners for p in owner.parameters(recurse=False) if p.requires_grad]

    def _recomputing(self, parts: list[Part]) -> AbstractContextManager[None]:
        """Activation checkpointing runs layers again in the backward pass: through the branch of the forward pass."""
        one = len(parts) == 1
        return routed(self.model, parts[0].branch, tracking="again") if one else closed(self.model)

    def _forward(self, part: Part, number: int) -> Tensor:
        with (
            self._randomness(self.step, number, part.branch),
            routed(self.model, part.branch, tracking="step"),
            self._precision(),
            self._watching(),
        ):
            # A model may work in place, which a leaf of the graph (images whose gradient is wanted) does not allow.
            images = part.images.clone() if part.images.requires_grad else part.images
            return self.loss(self.model(images), part.labels)

    @contextmanager
    def _watching(self) -> Iterator[None]:
        """Look at the first forward pass in training mode only: it copies the buffers, and waits for the device."""
        model = innermost(self.model)
        if self._watched or not model.training:
            yield
        else:
            with no_mixed_statistics(model):
                yield
            self._watched = True

    def _require_cleared_branches(self) -> None:
        """Refuse an optimizer that does not know the branches: it would never move them, without a word."""
        for layer in split_layers(self.model)[:1]:
            weights = {name: next(owner.parameters(recurse=False), None) for name, owner in layer.owners().items()}
            main = weights["main"]
            if main is not None and main.requires_grad and main.grad is None:
                kept = [name for name, weight in weights.items() if weight is not None and weight.grad is not None]
                if kept:
                    raise ValueError(
                        f"the {kept[0]} branch kept the gradients of the last step: "
                        "make the optimizer after split_batchnorm, and clear all gradients"
                    )

    def _syncing(self, last: bool) -> AbstractContextManager[None]:
        return nullcontext() if last or self._parallel is None else self._parallel.no_sync()

    def _randomness(self, step: int, number: int, branch: str) -> AbstractContextManager[None]:
        """With a seed, what the model draws (for dropout, say) does not depend on what ran before."""
        return (
            nullcontext() if self.seed is None else untouched_randomness(self.device, self._seed(step, number, branch))
        )

    def _seed(self, step: int, number: int, branch: str) -> int:
        assert self.seed is not None
        return mix(self.seed, _FORWARD, step, self.place.first_chunk + number, _BRANCH_NUMBER[branch])

    def _precision(self) -> AbstractContextManager[None]:
        return nullcontext() if self.autocast is None else torch.autocast(self.device.type, self.autocast)


class _Touch(torch.autograd.Function):
    """The loss itself, whose backward pass also reaches the weights, without a gradient for them."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, *weights: Tensor) -> Tensor:
        ctx.weights = len(weights)
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return (gradient, *[None] * ctx.weights)


def _of_rank(model: DistributedDataParallel) -> Place:
    """Ranks of a loop of one's own, which often share a seed, take numbers of chunks that never meet."""
    return Place(first_chunk=dist.get_rank(model.process_group) << 32)
