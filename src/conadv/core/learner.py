"""One step of learning, shared by all methods: chunk by chunk, part by part, each through its branch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .attack import Attack, Call, Loss, call_by_name, call_plainly, input_gradient, without_trace
from .batch import Batch, Chunked, as_batch, cut, to_device, to_pixels
from .batchnorm.marks import marked
from .batchnorm.splitbn import closed, pending_statistics, routed, update_running_stats
from .checks.buffers import no_mixed_statistics
from .checks.data import Checks
from .checks.loop import LoopChecks
from .ddp import broadcast_early, place_of_rank, syncing, touch_other_branches
from .feed import Feed
from .handoff import Twin
from .parts import Common, Losses, LossSums, Part, check_arguments
from .roles import ALONE, Place
from .seeds import Seeds, untouched_randomness
from .share import TwinShare, select
from .spans import span
from .together import branch_of, check_joint, joined, outputs_by_part
from .wrappers import data_parallel, innermost, is_float16, precision, unwrap


class Learner:
    """Turn batches into gradients of a model, in chunks that have their own BatchNorm statistics.

    Args:
        model: the network, which may be wrapped (DistributedDataParallel, torch.compile).
        loss: from outputs and labels to the mean over the images.
        common: see `Common`.
        twin_branch: the BatchNorm branch that twins go through, "adv" or "main". None: there are no twins, so that the
            layers need to be split only if there are chunks.
    """

    def __init__(self, model: nn.Module, loss: Loss, common: Common, twin_branch: str | None = None) -> None:
        check_arguments(model, loss, common, twin_branch)
        self.model = model
        self.loss = loss
        self.chunk_size = common.get("chunk_size")
        self.seed = common.get("seed")
        self._seeds = Seeds(self.seed)
        self.step = 0
        self._autocast = common.get("autocast")
        self._as_batch = common.get("batch") or as_batch
        self._input_name = common.get("input_name")
        self.together = common.get("together", False)
        self.twin_branch = twin_branch
        self._place = common.get("place", ALONE)
        self._sums = LossSums()
        self.unfinished = False  # whether a step has begun to learn, and not ended: it may have failed
        self.losses = Losses(torch.zeros(()), torch.zeros(()))  # of the last step
        self._parallel = data_parallel(model)
        self._watched = twin_branch is None  # whether no layer was seen to mix the statistics of several branches
        self._joint_modes: set[bool] = set()  # model.training of the joint passes that were compared with separate ones
        alone = self._place is ALONE
        branches = ("main", "adv") if twin_branch == "adv" else ("main",)
        needed = () if twin_branch is None and self.chunk_size is None else branches
        self.checks = Checks(loss, self.chunk_size, alone)
        self.loop_checks = LoopChecks(model, loss, self.chunk_size, needed, alone)

    @property
    def place(self) -> Place:
        """The place of this process among the ranks: as given or, if there is a process group, from its rank."""
        return place_of_rank() if self._place is ALONE else self._place

    @property
    def device(self) -> torch.device:
        """The current device of the model."""
        return next(self.model.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.model.parameters()).dtype

    def batch(self, item: Any) -> Batch | Chunked:
        """Convert what the loader yielded to a batch."""
        batch = item if isinstance(item, Batch | Chunked) else self._as_batch(item)
        if not isinstance(batch, Batch | Chunked):
            raise ValueError(f"batch= returned a {type(batch).__name__}: return conadv.Batch(images, labels)")
        return batch

    def chunks(self, item: Any) -> Iterator[Batch]:
        """Yield the chunks of a batch as the model takes them: on its device, bytes as fractions of the pixel range."""
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
        call, extra = self.call_of(chunk), chunk.extra
        return [
            Part(name, images, chunk.labels, weight / len(views), call, len(views), extra=extra)
            for name, images in views
        ]

    def adv_part(self, twin: Twin, weight: float, share: float = 1.0) -> Part:
        """The part with the twins of a chunk, such that the mean over all twins of a step has `weight`."""
        part = 1.0 if self.chunk_size is None else share
        assert self.twin_branch is not None
        # The running statistics of the main branch are those of the images, unless nothing is learnt from these.
        tracked = self.twin_branch == "adv" or weight == 1
        return Part(self.twin_branch, twin.images, twin.labels, weight / part, twin.call, part, tracked, True)

    def scale(self, part: Part, count: int) -> float:
        """The factor of the mean loss of a part, in a step with `count` chunks on this process."""
        return part.weight * self.place.share / count

    def learn(self, parts: Sequence[Part], number: int, count: int) -> None:
        """Add the gradients of chunk `number` of `count` to `.grad`, one pass at a time to save memory.

        DistributedDataParallel all-reduces gradients once per step, with the last pass of the last chunk. A static
        graph does not allow a first backward pass without all_reduce: then all parts share one backward pass.
        """
        if is_float16(self.device, self._autocast):
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
        """The scaled loss of some parts of chunk `number` of `count`, with its graph. Records the mean losses.

        Args:
            parts: what to learn from.
            number: of the chunk, on this process.
            count: of the chunks of a step.
            step: which the random numbers of the model depend on; None: the current one.
            mark: record the branch in the graph, because the caller runs the backward pass.
        """
        scaled: list[Tensor] = []
        for some in self._passes(parts):
            losses = self._forward(some, number, self.step if step is None else step)
            for part, loss in zip(some, losses, strict=True):
                self._sums.add(part, loss, count)
                own = marked(loss, self.model, branch_of(some)) if mark else loss
                scaled.append(own * self.scale(part, count))
        return scaled[0] if len(scaled) == 1 else sum(scaled[1:], scaled[0])

    def end_step(self) -> Losses:
        """Update the running statistics, unless they are summed over ranks first, and count the step."""
        place = self.place
        if place.updates_stats:
            update_running_stats(self.model)
        self.loop_checks.end_step()
        self.unfinished = False
        self.step += 1
        self.losses, self._sums = self._sums.total(self.device, self.dtype), LossSums()
        return self.losses

    def has_twins(self, share: TwinShare, batch_number: int, chunk_number: int) -> bool:
        """Whether a chunk of a batch gets twins; without chunks, some of its images do."""
        offset = self.place.chunk_offset
        first = self.place.first_chunk - offset
        return self.chunk_size is None or share.has(self._seeds.root, batch_number, first, offset + chunk_number)

    def twin_images(self, share: TwinShare, chunk: Batch, batch_number: int, chunk_number: int) -> Tensor | None:
        """Which images of a chunk get twins; None: all of them."""
        return share.images_of(chunk, self.attack_seed(batch_number, chunk_number)) if self.chunk_size is None else None

    def attack(self, attack: Attack, chunk: Batch, batch_number: int, chunk_number: int, share: TwinShare) -> Twin:
        """Generate the twins of a chunk."""
        chunk = select(chunk, self.twin_images(share, chunk, batch_number, chunk_number))
        self.checks.look_at_images(attack, chunk.images)
        call = self.call_of(chunk)
        with span("attack"), precision(self.model), self.autocasting():
            seed = self.attack_seed(batch_number, chunk_number)
            return Twin(attack(self.model, self.loss, chunk.images, chunk.labels, seed, call), chunk.labels, call)

    def input_gradient(self, parts: Sequence[Part], step: int, number: int, count: int) -> Tensor:
        """The gradient, to the bit, that `learn` would leave on the images of the first part in `step`.

        It leaves no trace. With `together`, the last bits depend on how many images the other parts have, but not on
        these images.
        """
        model, some = unwrap(self.model), self._passes(parts)[0]
        seed = self.pass_seed(step, number, some[0].branch)

        def total(images: Tensor) -> Tensor:
            passed = [some[0]._replace(images=images), *some[1:]]
            with precision(self.model), self.autocasting():
                losses = self._losses(model, passed)
                scaled = [loss * self.scale(part, count) for part, loss in zip(passed, losses, strict=True)]
                return sum(scaled[1:], scaled[0])

        return input_gradient(model, total, some[0].images, partial(without_trace, model, branch_of(some), None, seed))

    def feed(self, loader: Iterable[Any], *ahead: Any) -> Feed:
        """A loader of the pairs that the method is called with; `ahead`: arguments of `Feed` for reading ahead."""
        return Feed(loader, self.chunk_size, lambda: self.loop_checks.look_at_feed(self.step), *ahead)

    def begin_step(self, batch: Any, same: Mapping[str, Any], delayed: bool, queued: bool = False) -> bool:
        """Check the loop for mistakes; for the arguments see `LoopChecks.begin_step`.

        Returns:
            Whether the step before failed, so that what it left behind has to be dropped.
        """
        self.loop_checks.begin_step(batch, self.step, delayed, queued, same)
        self.checks.begin_step()
        return self.drop_unfinished()

    def drop_unfinished(self) -> bool:
        """Drop the losses and statistics of a step that failed, and return whether there was one."""
        failed, self.unfinished = self.unfinished, False
        if failed:
            self._sums = LossSums()
            for statistics in pending_statistics(self.model):
                statistics.zero_()
        return failed

    def attack_seed(self, batch_number: int, chunk_number: int) -> int:
        """The seed of the attack on a chunk of this process."""
        return self._seeds.of_attack(batch_number, self.place.first_chunk + chunk_number)

    def pass_seed(self, step: int, number: int, branch: str) -> int | None:
        """The seed of a forward pass; None: the model's randomness is left alone."""
        return self._seeds.of_pass(step, self.place.first_chunk + number, branch)

    def _passes(self, parts: Sequence[Part]) -> Sequence[Sequence[Part]]:
        """Group the parts by the passes of the model that they go through."""
        return [parts] if self.together else [[part] for part in parts]

    def _forward(self, parts: Sequence[Part], number: int, step: int) -> list[Tensor]:
        """The mean loss of each part, computed in one pass."""
        self._check_joint(parts)
        self.unfinished |= any(part.is_learnt for part in parts)
        with (
            self._randomness(step, number, parts[0].branch),
            routed(self.model, branch_of(parts), tracking="step" if parts[0].tracked else "off"),
            self.autocasting(),
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
        """Check the first joint pass in training mode, and in evaluation mode: more would wait for the device."""
        model = innermost(self.model)
        if len(parts) > 1 and model.training not in self._joint_modes:
            check_joint(model, parts, partial(self._losses, model))
            self._joint_modes.add(model.training)

    def call_of(self, chunk: Batch) -> Call:
        """How to call the model with the images of a chunk."""
        return call_plainly if self._input_name is None else call_by_name(self._input_name, chunk.extra)

    @contextmanager
    def _watching(self) -> Iterator[None]:
        """Check the first forward pass in training mode only: this copies the buffers and waits for the device."""
        model = innermost(self.model)
        if self._watched or not model.training:
            yield
        else:
            broadcast_early(self._parallel)
            with no_mixed_statistics(model):
                yield
            self._watched = True

    def recomputing(self, parts: Sequence[Part]) -> AbstractContextManager[None]:
        """A context for the backward pass, in which activation checkpointing recomputes layers in the same branch."""
        if len(self._passes(parts)) > 1:
            return closed(self.model)
        return routed(self.model, branch_of(parts), tracking="again" if parts[0].tracked else "off")

    def _randomness(self, step: int, number: int, branch: str) -> AbstractContextManager[None]:
        """A context for forward passes: with a seed, dropout does not depend on what ran before."""
        seed = self.pass_seed(step, number, branch)
        return nullcontext() if seed is None else untouched_randomness(self.device, seed)

    def autocasting(self) -> AbstractContextManager[None]:
        """A context with the precision that the method was given."""
        return nullcontext() if self._autocast is None else torch.autocast(self.device.type, self._autocast)
