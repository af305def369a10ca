"""One step of learning, the same for every method: chunk by chunk, part by part, each through its branch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .attack import Attack, Call, Loss, call_plainly, input_gradient, without_trace
from .batch import Batch, Chunked, as_batch, cut, to_device, to_pixels
from .buffers import no_mixed_statistics
from .checks import Checks
from .ddp import broadcast_early, place_of_rank, syncing, touch_other_branches
from .feed import Feed
from .handoff import Twin
from .loop_checks import LoopChecks
from .marks import marked
from .parts import Common, Losses, Part
from .roles import ALONE, Place
from .seeds import mix, untouched_randomness
from .share import TwinShare, select
from .spans import span
from .splitbn import closed, routed, update_running_stats
from .together import branch_of, check_joint, joined, outputs_by_part
from .wrappers import data_parallel, innermost, precision, unwrap

# What a random number is for, so that different purposes have different seeds.
_ATTACK, _FORWARD = 1, 2
_BRANCH_NUMBER = {"main": 0, "aug": 1, "adv": 2}


class Learner:
    """A model and its loss, and how a batch becomes gradients: in chunks, each with its own BatchNorm statistics.

    Args:
        model: the network, which may be wrapped (DistributedDataParallel, torch.compile).
        loss: from outputs and labels to the mean over the images.
        common: see `Common`.
        branches: the BatchNorm branches that the method trains. With only "main", layers have to be split if there are
            chunks, so that running statistics move once per step.
    """

    def __init__(self, model: nn.Module, loss: Loss, common: Common, branches: tuple[str, ...] = ("main",)) -> None:
        self.model = model
        self.loss = loss
        self.chunk_size = common.get("chunk_size")
        self.seed = common.get("seed")
        self.step = 0
        self._autocast = common.get("autocast")
        self._as_batch = common.get("batch") or as_batch
        self._input_name = common.get("input_name")
        self.together = common.get("together", False)
        self._place = common.get("place", ALONE)
        self._clean: list[Tensor] = []
        self._adv: list[Tensor] = []
        self.losses = Losses(torch.zeros(()), torch.zeros(()))  # of the last step
        if self.chunk_size is not None and self.chunk_size < 1:
            raise ValueError(f"chunk_size {self.chunk_size}: take at least 1 image, or None for the whole batch")
        if not isinstance(model, nn.Module) or isinstance(loss, Attack):
            given = f"({type(model).__name__}, {type(loss).__name__}, ...)"
            raise ValueError(f"a method takes (model, loss, attack) in this order, not {given}")
        if isinstance(loss, type):
            raise ValueError(f"the loss {loss.__name__} is a class: pass one of its objects, {loss.__name__}()")
        if next(model.parameters(), None) is None:
            raise ValueError("a model without parameters has nothing to learn")
        if self.together and self._input_name is not None:
            raise ValueError("together=True joins images only, not what input_name= is passed for: drop one of them")
        self._parallel = data_parallel(model)
        self._watched = branches == ("main",)  # whether no layer was seen to mix the statistics of several branches
        self._joint_modes: set[bool] = set()  # model.training of the joint passes that were compared with separate ones
        alone = self._place is ALONE
        needed = branches if self.chunk_size is not None or not self._watched else ()
        self.checks = Checks(loss, self.chunk_size, alone)
        self.loop_checks = LoopChecks(model, loss, self.chunk_size, needed, alone)

    @property
    def place(self) -> Place:
        """The place of this process among the ranks: as given or, if there is a process group, from its rank."""
        return place_of_rank() if self._place is ALONE else self._place

    @property
    def device(self) -> torch.device:
        """Where the model is now."""
        return next(self.model.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.model.parameters()).dtype

    def require_attack(self, attack: Any) -> None:
        """Refuse what cannot attack, such as a class or the number epsilon."""
        if isinstance(attack, type) or not isinstance(attack, Attack):
            raise ValueError(f"attack {attack!r}: pass an attack, such as conadv.PGD(4/255)")

    def batch(self, item: Any) -> Batch | Chunked:
        """What the loader yielded, as a batch."""
        batch = item if isinstance(item, Batch | Chunked) else self._as_batch(item)
        if not isinstance(batch, Batch | Chunked):
            raise ValueError(f"batch= returned a {type(batch).__name__}: return conadv.Batch(images, labels)")
        return batch

    def chunks(self, item: Any) -> Iterator[Batch]:
        """The chunks of a batch, where the model is and as it takes them."""
        device, dtype = self.device, self.dtype
        chunks = cut(self.batch(item), self.chunk_size)
        while True:
            with span("load"):
                chunk = next(chunks, None)
            if chunk is None:
                return
            own = self.batch(chunk)
            assert isinstance(own, Batch)
            self.checks.look_at_labels(own.labels)
            if own.extra and self._input_name is None:
                raise ValueError("a batch with extra inputs: pass input_name=, the model's argument for the images")
            augmented = None if own.augmented is None else to_pixels(own.augmented, device, dtype)
            images, labels = to_pixels(own.images, device, dtype), to_device(own.labels, device)
            yield Batch(images, labels, augmented, to_device(dict(own.extra), device))

    def clean_parts(self, chunk: Batch, weight: float) -> list[Part]:
        """The images and, where the batch has one, their augmented view, with equal parts of the weight."""
        views = [("main", chunk.images)] + ([] if chunk.augmented is None else [("aug", chunk.augmented)])
        call = self._call(chunk)
        return [Part(name, images, chunk.labels, weight / len(views), call, len(views)) for name, images in views]

    def adv_part(self, twin: Twin, weight: float, share: float = 1.0) -> Part:
        """What is learnt from the twins of a chunk, so that the mean over all twins of a step has `weight`."""
        part = 1.0 if self.chunk_size is None else share
        return Part("adv", twin.images, twin.labels, weight / part, twin.call, part, adversarial=True)

    def scale(self, part: Part, count: int) -> float:
        """What the mean loss of a part is multiplied by, in a step with `count` chunks on this process."""
        return part.weight * self.place.share / count

    def learn(self, parts: Sequence[Part], number: int, count: int) -> None:
        """Add the gradients of chunk `number` of `count` to `.grad`, one pass at a time to save memory.

        DistributedDataParallel all-reduces gradients once per step, with the last pass of the last chunk. A static
        graph does not allow a first backward pass without all_reduce: then all parts share one backward pass.
        """
        if self._is_float16():
            raise ValueError("float16 needs a scaled loss: scaler.scale(method.loss(batch)).backward()")
        at_once = self._parallel is not None and self._parallel.static_graph
        groups = [parts] if at_once else self._passes(parts)
        for some in groups:
            name = "adversarial pass" if some[0].adversarial else "clean pass"
            with span(name), syncing(self._parallel, last=number == count - 1 and some is groups[-1]):
                total = self.objective(some, number, count)
                if self._parallel is not None:
                    total = touch_other_branches(total, self.model, [part.branch for part in some])
                with self.recomputing(some):
                    total.backward()

    def objective(
        self, parts: Sequence[Part], number: int, count: int, step: int | None = None, mark: bool = False
    ) -> Tensor:
        """The loss of some parts of chunk `number` of `count`, scaled, with its graph. Remembers the mean losses.

        Args:
            parts: what is learnt from.
            number: of the chunk, on this process.
            count: of the chunks of a step.
            step: decides what the model draws; None: the present one.
            mark: the caller runs the backward pass, so that the graph itself has to say which branch it is of.
        """
        scaled: list[Tensor] = []
        for some in self._passes(parts):
            losses = self._forward(some, number, self.step if step is None else step)
            for part, loss in zip(some, losses, strict=True):
                if part.tracked or part.adversarial:
                    (self._adv if part.adversarial else self._clean).append(loss.detach() / (count * part.per_chunk))
                own = marked(loss, self.model, branch_of(some)) if mark else loss
                scaled.append(own * self.scale(part, count))
        return scaled[0] if len(scaled) == 1 else sum(scaled[1:], scaled[0])

    def end_step(self) -> Losses:
        """Update the running statistics, unless they are summed over ranks first, and start the next step."""
        place = self.place
        if place.updates_stats:
            update_running_stats(self.model)
        self.loop_checks.end_step()
        self.step += 1
        self.losses = Losses(self._total(self._clean), self._total(self._adv))
        self._clean, self._adv = [], []
        return self.losses

    def has_twins(self, share: TwinShare, batch_number: int, chunk_number: int) -> bool:
        """Whether a chunk of a batch gets twins; without chunks, some of its images do."""
        offset = self.place.chunk_offset
        first = self.place.first_chunk - offset
        return self.chunk_size is None or share.has(self._own_seed(), batch_number, first, offset + chunk_number)

    def twin_images(self, share: TwinShare, chunk: Batch, batch_number: int, chunk_number: int) -> Tensor | None:
        """Which images of a chunk get twins; None: all of them."""
        return share.images_of(chunk, self.attack_seed(batch_number, chunk_number)) if self.chunk_size is None else None

    def attack(self, attack: Attack, chunk: Batch, batch_number: int, chunk_number: int, share: TwinShare) -> Twin:
        """Generate the twins of a chunk."""
        chunk = select(chunk, self.twin_images(share, chunk, batch_number, chunk_number))
        self.checks.look_at_images(attack, chunk.images)
        call = self._call(chunk)
        with span("attack"), precision(self.model), self._precision():
            seed = self.attack_seed(batch_number, chunk_number)
            return Twin(attack(self.model, self.loss, chunk.images, chunk.labels, seed, call), chunk.labels, call)

    def input_gradient(self, parts: Sequence[Part], step: int, number: int, count: int) -> Tensor:
        """The gradient that `learn` would leave on the images of the first part in `step`, bit by bit.

        It leaves no trace. With `together`, the last bits depend on how many images the other parts have, but not on
        these images.
        """
        model, some = unwrap(self.model), self._passes(parts)[0]
        seed = None if self.seed is None else self._seed(step, number, some[0].branch)

        def total(images: Tensor) -> Tensor:
            passed = [some[0]._replace(images=images), *some[1:]]
            with precision(self.model), self._precision():
                losses = self._losses(model, passed)
                scaled = [loss * self.scale(part, count) for part, loss in zip(passed, losses, strict=True)]
                return sum(scaled[1:], scaled[0])

        return input_gradient(model, total, some[0].images, partial(without_trace, model, branch_of(some), None, seed))

    def weight_gradients(self, part: Part, step: int, number: int) -> tuple[Tensor, list[Tensor]]:
        """The mean loss of a part and its gradient by each trainable weight, as in `step`. It leaves no trace."""
        model = unwrap(self.model)
        seed = None if self.seed is None else self._seed(step, number, part.branch)
        weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
        with torch.enable_grad(), without_trace(model, part.branch, None, seed):
            with self._precision():
                loss = self.loss(part.call(model, part.images.detach().clone()), part.labels)
            found = torch.autograd.grad(loss, weights, allow_unused=True)
        known = zip(found, weights, strict=True)
        return loss.detach(), [torch.zeros_like(own) if gradient is None else gradient for gradient, own in known]

    def feed(self, loader: Iterable[Any], *ahead: Any) -> Feed:
        """A loader of the pairs that the method is called with; `ahead`: what `Feed` takes to read ahead."""
        return Feed(loader, self.chunk_size, lambda: self.loop_checks.look_at_feed(self.step), *ahead)

    def begin_step(self, batch: Any, same: Mapping[str, Any], delayed: bool, queued: bool = False) -> None:
        """Check for misuse that would silently train wrongly, in the first steps.

        Args:
            batch: the one to learn from.
            same: what has to be the same on all ranks, see `peers.described`.
            delayed: each call counts as a step, because what it generates is used in a later one.
            queued: `delay` counts calls, not updates, because twins wait in a queue.
        """
        self.loop_checks.begin_step(batch, self.step, delayed, queued, same)
        self.checks.begin_step()

    def attack_seed(self, batch_number: int, chunk_number: int) -> int:
        """What is random in an attack is a function of the seed, the batch and the chunk."""
        return mix(self._own_seed(), _ATTACK, batch_number, self.place.first_chunk + chunk_number)

    def _own_seed(self) -> int:
        return torch.initial_seed() if self.seed is None else self.seed

    def _passes(self, parts: Sequence[Part]) -> Sequence[Sequence[Part]]:
        """The parts that go through the model at once."""
        return [parts] if self.together else [[part] for part in parts]

    def _forward(self, parts: Sequence[Part], number: int, step: int) -> list[Tensor]:
        """The mean loss of each part, from one pass."""
        self._check_joint(parts)
        with (
            self._randomness(step, number, parts[0].branch),
            routed(self.model, branch_of(parts), tracking="step" if parts[0].tracked else "off"),
            self._precision(),
            self._watching(),
        ):
            return self._losses(self.model, parts, look=True)

    def _losses(self, model: nn.Module, parts: Sequence[Part], look: bool = False) -> list[Tensor]:
        losses = []
        for part, outputs in zip(parts, outputs_by_part(parts[0].call(model, joined(parts)), parts), strict=True):
            losses.append(self.loss(outputs, part.labels))
            if look:
                self.checks.look_at_loss(losses[-1], outputs, part.labels, part.images)
        return losses

    def _check_joint(self, parts: Sequence[Part]) -> None:
        """Check only the first joint pass in training mode, and in evaluation mode: this waits for the device."""
        model = innermost(self.model)
        if len(parts) > 1 and model.training not in self._joint_modes:
            check_joint(model, parts, partial(self._losses, model))
            self._joint_modes.add(model.training)

    def _call(self, chunk: Batch) -> Call:
        if self._input_name is None:
            return call_plainly
        extra, name = dict(chunk.extra), self._input_name
        return lambda model, images: model(**{name: images}, **extra)

    def _total(self, losses: list[Tensor]) -> Tensor:
        if not losses:
            return torch.zeros((), device=self.device, dtype=torch.promote_types(self.dtype, torch.float32))
        return losses[0].clone() if len(losses) == 1 else torch.stack(losses).sum()

    @contextmanager
    def _watching(self) -> Iterator[None]:
        """Check only the first forward pass in training mode: this copies the buffers and waits for the device."""
        model = innermost(self.model)
        if self._watched or not model.training:
            yield
        else:
            broadcast_early(self._parallel)
            with no_mixed_statistics(model):
                yield
            self._watched = True

    def recomputing(self, parts: Sequence[Part]) -> AbstractContextManager[None]:
        """Activation checkpointing runs layers again in the backward pass: through the branch of the forward pass."""
        if len(self._passes(parts)) > 1:
            return closed(self.model)
        return routed(self.model, branch_of(parts), tracking="again" if parts[0].tracked else "off")

    def _randomness(self, step: int, number: int, branch: str) -> AbstractContextManager[None]:
        """With a seed, what the model draws (for dropout, say) does not depend on what ran before."""
        return (
            nullcontext() if self.seed is None else untouched_randomness(self.device, self._seed(step, number, branch))
        )

    def _seed(self, step: int, number: int, branch: str) -> int:
        assert self.seed is not None
        return mix(self.seed, _FORWARD, step, self.place.first_chunk + number, _BRANCH_NUMBER[branch])

    def _is_float16(self) -> bool:
        """Whether forward passes run in float16, as the method or the surrounding code says."""
        kind = self.device.type
        autocasts = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
        around = torch.get_autocast_dtype(kind) if autocasts else None
        return torch.float16 in (self._autocast, around)

    def _precision(self) -> AbstractContextManager[None]:
        return nullcontext() if self._autocast is None else torch.autocast(self.device.type, self._autocast)
