"""One step of any method: its passes run chunk by chunk, and gradients are left in `.grad`, like `loss.backward()`.

    chunk k ──► method.passes(k, chunk) ──► Pass(branch, images, weight) ──► forward ──► backward ──► .grad
    end     ──► running statistics move once, with the mean over the passes ──► t + 1

`Method` is what a training loop sees. It names branches and weights; `Step` lives as long as the method, and knows
chunks, seeds, precision, the ranks of a data-parallel loop and running statistics.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NamedTuple, NoReturn, TypedDict

import torch
from torch import Tensor, nn

from conadv.roles import Place, Role
from conadv.wrappers import (
    Given,
    autocast_dtype,
    broadcast_early,
    data_parallel,
    innermost,
    precision,
    rank_and_size,
    refuse_options,
    span,
    touched,
    trainable,
    unwrap,
)

from .attack import Attack, Loss, without_trace
from .batch import Batch, Chunked, Feed, as_batch, count_chunks, cut, to_device, to_pixels
from .branches import split_layers
from .pgd import PGD
from .seeds import ATTACK, BRANCH_NUMBER, PASS, mix, untouched_randomness
from .splitbn import pending_statistics, route, update_running_stats
from .state import State, pack, unpack
from .twins import Shuffle, Twins, as_share, is_chosen
from .validate import Checks, check_arguments, check_keywords, described, no_mixed_statistics


class Common(TypedDict, total=False):
    """The keyword arguments that every method takes."""

    chunk_size: int | None
    """Images that share BatchNorm statistics and are worked on at once; it divides the batch. None: the whole batch."""
    seed: int | None
    """Decides everything random in the method and the model. None: PyTorch's global seed, and dropout as it comes."""
    autocast: torch.dtype | None
    """Run forward passes in this precision; None: that of the surrounding torch.autocast, if there is one."""
    batch: Callable[[Any], Batch] | None
    """From what the loader yields to a `Batch`; None: it yields (images, labels)."""
    input_name: str | None
    """The model's keyword argument for the images, where a batch has `extra` inputs. None: the first argument."""
    after_chunk: Callable[[], None] | None
    """Called after each chunk has added its gradients to `.grad`, such as `conadv.SignalToNoise.add`."""


class Losses(NamedTuple):
    """Mean losses over the batch of this process (of a `Team`: of all ranks), without a graph."""

    clean: Tensor
    """Over the images and their augmented views; 0 with adv_weight 1."""
    adv: Tensor
    """Over the twins; of `Sam` over the images, at the moved weights; 0 for `Vanilla`."""

    def backward(self) -> NoReturn:
        raise ValueError("already done by the method: remove this line (or call method.loss(batch).backward())")


class Pass(NamedTuple):
    """One forward and backward pass of a chunk: the images, their branch, and their weight in the loss."""

    branch: str
    batch: Batch
    weight: float
    per_chunk: float = 1
    """How many passes of this kind a chunk has on average (views, or the share with twins), for the mean loss."""
    tracking: Literal["step", "off"] = "step"
    """Whether its BatchNorm statistics count for the running ones, at the end of the step."""
    adversarial: bool = False
    """Whether its loss is adversarial: of changed images, or at changed weights."""
    chunk: int | None = None
    """The number of the chunk that its random numbers depend on; None: the one that is worked on."""
    within: AbstractContextManager[Any] = nullcontext()
    """A context for its forward and backward pass."""
    receive: Callable[[Tensor], None] | None = None
    """Is given the gradient of the scaled loss with respect to the images, a leaf that requires it."""


class Step:
    """Run the passes of a method, in chunks that have their own BatchNorm statistics; `twin_branch` None: no twins."""

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        common: Common,
        twin_branch: str | None = None,
        twin_share: float | str = 1,
        shuffle_twins: int = 1,
    ) -> None:
        self.chunk_size, self.seed = common.get("chunk_size"), common.get("seed")
        check_keywords(common, Common.__annotations__)
        check_arguments(model, loss, self.chunk_size, twin_branch)
        self.model, self.loss, self.twin_branch = model, loss, twin_branch
        self.share, self.shuffle = as_share(twin_share), Shuffle(shuffle_twins)
        if self.share < 1 and self.chunk_size is None:
            raise ValueError(f"twin_share {twin_share}: a part of the chunks of each batch, so pass chunk_size, too")
        own = {"twin_share": float(self.share), "twin_branch": twin_branch, "shuffle_twins": shuffle_twins}
        self.fixed: dict[str, Any] = {} if twin_branch is None else own
        """Settings that cannot be changed."""
        self.t = 0
        """How many steps were taken."""
        self.count = 0
        """How many chunks the batch of this step has."""
        self.twin_count: int | None = None
        """How many of them get twins; None on the ranks of a layout, which share them out."""
        self.place, self.in_layout = Place(), False
        self.averaging: Callable[[Callable[[], Tensor]], Tensor] | None = None
        """Of a rank of a layout: DistributedDataParallel around the last loss of a step (`ranks/member.py`)."""
        self.losses = Losses(torch.zeros(()), torch.zeros(()))  # of the last step
        self._unfinished = False  # a step has begun and not ended
        self._means: tuple[list[Tensor], list[Tensor]] = [], []  # the losses of this step so far, clean and adversarial
        self._autocast, self.input_name = common.get("autocast"), common.get("input_name")
        self._as_batch = common.get("batch") or as_batch
        self._after_chunk = common.get("after_chunk")
        self._parallel = data_parallel(model)
        refuse_options(self._parallel, twin_branch == "adv")
        if self._after_chunk is not None and self._parallel is not None:
            raise ValueError("after_chunk sees the gradients of one process: not with DistributedDataParallel")
        self._watched = twin_branch is None  # whether no layer was seen to mix the statistics of several branches
        branches = ("main", "adv") if twin_branch == "adv" else ("main",)
        needed = () if twin_branch is None and self.chunk_size is None else branches
        self.checks = Checks(model, loss, self.chunk_size, needed)

    @property
    def device(self) -> torch.device:
        """The current device of the model."""
        return next(self.model.parameters()).device

    def join(self, place: Place) -> None:
        """Be a rank of a layout: these check the loop, and sum gradients and pending statistics, themselves."""
        self.place, self.in_layout, self.checks.own_loop = place, True, False

    def begin(self, batch: Batch | Chunked, settings: Callable[[], dict[str, Any]], delayed: bool) -> None:
        """Begin a step; for `settings` and `delayed` see `Checks.begin`."""
        if self._unfinished:
            raise ValueError(
                "the step before failed in the middle: clear the gradients, and load a state (method.load_state_dict) "
                "or begin a new epoch (take the batches from method.feed(loader))"
            )
        self.checks.begin(settings, delayed)
        self.shuffle.held = []  # a step that failed may have left some
        self.count = count_chunks(batch, self.chunk_size)
        if not self.in_layout:
            # Ranks of a data-parallel loop often share a seed: their chunks get different numbers.
            self.place = Place(first_chunk=rank_and_size()[0] << 32)
            self.twin_count = self._count_twins()
        self._unfinished = True

    def run(self, batch: Batch | Chunked, passes: Callable[[int, Batch], Iterable[Pass]]) -> None:
        """Run the passes of every chunk, and add their gradients to `.grad`, one pass at a time to save memory."""
        if torch.float16 in (self._autocast, autocast_dtype(self.device)):
            raise ValueError("float16 needs a scaled loss: scaler.scale(method.loss(batch)).backward()")
        last = None
        for k, chunk in enumerate(self.chunks(batch)):
            some = list(passes(k, chunk))
            for each in some:
                last = k == self.count - 1 and each is some[-1]
                self._learn(each, k, last)
            if some and self._after_chunk is not None:
                self._after_chunk()
        if self.averaging is not None and not last:  # this rank learns nothing from the last chunk
            self.averaging(self._nothing).backward()

    def total(self, batch: Batch | Chunked, passes: Callable[[int, Batch], Iterable[Pass]]) -> Tensor:
        """The loss of the whole batch, which the caller backpropagates."""
        # All attacks come before: while a graph lives, the weights must stay.
        work = [(k, each) for k, chunk in enumerate(self.chunks(batch)) for each in passes(k, chunk)]
        losses: list[Tensor] = []
        for k, each in work:
            with route(self.model, each.branch, tracking=each.tracking):
                losses.append(self._forward(each, self.t, k, self.model))
        total = sum(losses[1:], losses[0]) if losses else self._nothing()
        return total if self._parallel is None else touched(total, self._unreached({each.branch for _, each in work}))

    def end(self) -> None:
        """Move the running statistics, unless they are summed over ranks first, and count the step."""
        if not self.in_layout:
            update_running_stats(self.model)
        first = next(self.model.parameters())
        none = torch.zeros((), device=first.device, dtype=torch.promote_types(first.dtype, torch.float32))
        clean, adv = self._means
        self.losses = Losses(torch.stack(clean).sum() if clean else none, torch.stack(adv).sum() if adv else none)
        self._means = [], []
        self._unfinished = False
        self.t += 1

    def reset(self) -> bool:
        """Drop what a step that failed has left behind, except in `.grad`; return whether one did."""
        failed, self._unfinished = self._unfinished, False
        if failed:
            self._means = [], []
            for statistics in pending_statistics(self.model):
                statistics.zero_()
        return failed

    def batch(self, item: Any) -> Batch | Chunked:
        """Convert what the loader yielded to a batch."""
        batch = item if isinstance(item, Batch | Chunked) else self._as_batch(item)
        if not isinstance(batch, Batch | Chunked):
            raise ValueError(f"batch= returned a {type(batch).__name__}: return conadv.Batch(images, labels)")
        return batch

    def chunks(self, batch: Batch | Chunked) -> Iterator[Batch]:
        """Yield the chunks of a batch as the model takes them: on its device, bytes as fractions of the pixel range."""
        first = next(self.model.parameters())
        device, dtype = first.device, first.dtype
        chunks = cut(batch, self.chunk_size)
        while True:
            with span("load"):
                chunk = next(chunks, None)
            if chunk is None:
                return
            own = self.batch(chunk)
            assert isinstance(own, Batch)
            if own.extra and self.input_name is None:
                raise ValueError("a batch with extra inputs: pass input_name=, the model's argument for the images")
            self.checks.look_at_labels(own.labels)
            augmented = None if own.augmented is None else to_pixels(own.augmented, device, dtype)
            labels, extra = to_device((own.labels, dict(own.extra)), device)
            yield Batch(to_pixels(own.images, device, dtype), labels, augmented, extra)

    def clean(self, chunk: Batch, weight: float) -> list[Pass]:
        """The passes of the images and, where the batch has one, of their augmented view, with equal weights."""
        if chunk.augmented is None:
            return [Pass("main", chunk, weight)]
        views = {"main": chunk.images, "aug": chunk.augmented}
        several = {name: replace(chunk, images=images, augmented=None) for name, images in views.items()}
        return [Pass(name, batch, weight / 2, 2) for name, batch in several.items()]

    def adversarial(self, twin: Batch, k: int, weight: float) -> list[Pass]:
        """The passes after the twins of chunk k have come, such that the mean over all twins of a step has `weight`."""
        part = float(self.share)
        assert self.twin_branch is not None
        # The running statistics of the main branch are those of the images, unless nothing is learnt from these.
        tracking: Literal["step", "off"] = "step" if self.twin_branch == "adv" or weight == 1 else "off"
        some = Pass(self.twin_branch, twin, weight / part, part, tracking, adversarial=True)
        if self.shuffle.group == 1:
            return [some]
        due = self.shuffle.add(k, twin, self.attack_seed(self.t, k))
        return [some._replace(batch=batch, chunk=number) for number, batch in due]

    def has_twin(self, t: int, k: int) -> bool:
        """Whether chunk k of the batch of step t gets twins."""
        if self.share == 1:
            return True
        # Groups are counted from the first chunk of this process or, in a layout, of the global batch.
        first = 0 if self.in_layout else self.place.first_chunk
        return is_chosen(self.share, self.root_seed, t, first, self.place.first_chunk - first + k)

    def _count_twins(self) -> int:
        """How many chunks of the batch get twins; a batch that cannot be shared out is an error."""
        twins = self.share * self.count
        if twins.denominator > 1:
            raise ValueError(
                f"twin_share {self.share} of {self.count} chunks: take a number of chunks that "
                f"{self.share.denominator} divides (change the batch or the chunk size)"
            )
        if twins % self.shuffle.group:
            raise ValueError(
                f"shuffle_twins {self.shuffle.group} does not divide the chunks with twins of a batch, {twins}: choose "
                "a number that does, or another batch or chunk size"
            )
        return int(twins)

    def attack(self, attack: Attack, t: int, k: int, chunk: Batch) -> Batch:
        """Attack chunk k of the batch of step t, with the weights that the model has."""
        self.checks.look_at_images(attack, chunk.images)
        model, seed = unwrap(self.model), self.attack_seed(t, k)
        # PGD chooses the branch and its statistics itself; any other attack just calls the model.
        branch = self.twin_branch or "main"
        routed = nullcontext() if isinstance(attack, PGD) else without_trace(model, branch, None, seed >> 1)
        if self.input_name is not None:
            model = Given(model, self.input_name, chunk.extra)
        with span("attack"), precision(self.model), self._autocasting(), routed:
            images = attack(model, self.loss, chunk.images, chunk.labels, seed)
        return Batch(images, chunk.labels, extra=chunk.extra)

    @property
    def root_seed(self) -> int:
        """The seed that all others are made from."""
        return torch.initial_seed() if self.seed is None else self.seed

    def attack_seed(self, t: int, k: int) -> int:
        """The seed of the attack on chunk k of the batch of step t."""
        return mix(self.root_seed, ATTACK, t, self.place.first_chunk + k)

    def scale(self, some: Pass) -> float:
        """The factor of the mean loss of a pass in the loss of the step."""
        return some.weight * self.place.averaged / (self.place.total or self.count)

    def gradient(self, passes: Sequence[Pass], t: int, k: int, by: Sequence[Tensor]) -> list[Tensor]:
        """The gradient of the loss of chunk k with respect to `by`, to the bit that a backward pass in step t leaves.

        Nothing goes into `.grad`. Passes without tracking leave no other trace, either. Not through
        DistributedDataParallel, which expects one backward pass for each forward pass.
        """
        model = unwrap(self.model)
        found: list[Tensor] = []
        no_trace = passes[0].tracking == "off"
        with without_trace(model, "main", None, None) if no_trace else nullcontext():
            for each in passes:
                batch = replace(each.batch, images=each.batch.images.clone())  # a model may work in place
                with route(self.model, each.branch, tracking=each.tracking):
                    total = self._forward(each._replace(batch=batch), t, k, model)
                    own = torch.autograd.grad(total, by, allow_unused=True, materialize_grads=True)
                found = list(torch._foreach_add(found, own)) if found else list(own)
        return found

    def _learn(self, some: Pass, k: int, last: bool) -> None:
        """Add the gradients of a pass to `.grad`; all-reduce them over the ranks in the last pass of a step."""
        parallel = self._parallel
        exchange = nullcontext() if last or parallel is None else parallel.no_sync()
        name = "adversarial pass" if some.adversarial else "clean pass"
        # Within the route, activation checkpointing recomputes layers in the same branch.
        with span(name), exchange, some.within, route(self.model, some.branch, tracking=some.tracking):
            forward = partial(self._forward, some, self.t, k, self.model)
            total = self.averaging(forward) if last and self.averaging is not None else forward()
            if parallel is not None:
                total = touched(total, self._unreached({some.branch}))
            total.backward()

    def _nothing(self) -> Tensor:
        """A loss of zero, whose backward pass reaches a weight."""
        return 0 * trainable(self.model)[0].sum()

    def _forward(self, some: Pass, t: int, k: int, model: nn.Module) -> Tensor:
        """The loss of a pass, scaled to its part in the loss of the step; the mean loss is noted.

        `t` and `k` decide its random numbers; `model` has its wrappers or not, and is routed by the caller.
        """
        images, inner = some.batch.images, innermost(self.model)
        seeded: AbstractContextManager[None] = nullcontext()
        if self.seed is not None:  # dropout does not depend on what ran before
            number = self.place.first_chunk + (k if some.chunk is None else some.chunk)
            seeded = untouched_randomness(self.device, mix(self.seed, PASS, t, number, BRANCH_NUMBER[some.branch]))
        watches = not self._watched and inner.training  # only once: this waits for the device
        if watches:
            broadcast_early(self._parallel)
        watching = no_mixed_statistics(inner) if watches else nullcontext()
        # A wrapper that is called brings its own precision.
        own_precision = nullcontext() if model is self.model else precision(self.model)
        if self.input_name is not None:
            model = Given(model, self.input_name, some.batch.extra)
        with seeded, own_precision, self._autocasting(), watching:
            # A model may work in place, which a leaf of the graph does not allow.
            outputs = model(images.clone() if images.requires_grad else images)
            loss = self.loss(outputs, some.batch.labels)
            self.checks.look_at_loss(loss, outputs, some.batch.labels, images, self.count)
        self._watched |= watches
        if some.tracking == "step" or some.adversarial:  # otherwise only a direction is computed with it
            self._means[some.adversarial].append(loss.detach() / ((self.place.total or self.count) * some.per_chunk))
        total = loss * self.scale(some)
        if some.receive is not None:
            _pass_on(images, total, some.receive)
        return total

    def _unreached(self, branches: Collection[str]) -> list[nn.Parameter]:
        """The trainable weights of all other branches."""
        layers = split_layers(self.model)
        owners = [layer.owner(name) for layer in layers for name in layer.branches if name not in branches]
        return [weight for owner in owners for weight in owner.parameters(recurse=False) if weight.requires_grad]

    def _autocasting(self) -> AbstractContextManager[Any]:
        """A context with the precision that the method was given."""
        return nullcontext() if self._autocast is None else torch.autocast(self.device.type, self._autocast)


def _pass_on(images: Tensor, total: Tensor, receive: Callable[[Tensor], None]) -> None:
    """Give the gradient of `total` with respect to the images to `receive`, when a backward pass computes it."""
    factors: list[Tensor] = []  # what the caller's framework multiplies the loss by: scaling, accumulation
    total.register_hook(factors.append)
    # Where an overflow in 16 bits leaves no number, the twin is the image itself.
    images.register_hook(lambda gradient: receive(torch.nan_to_num(gradient / factors[-1], nan=0.0)))


class Method(ABC):
    """What a training loop needs from a method. A new one says which passes a chunk takes; `Step` does the rest."""

    __slots__ = ("_delay", "_step", "twins")  # setting any other attribute is an error

    duties: Role
    """All duties of the method, over the ranks of a lane."""

    def __init__(self, step: Step, delay: int) -> None:
        self._step, self._delay = step, delay
        step.fixed = {"method": type(self).__name__, "delay": delay, **step.fixed}
        self.twins: Any = Twins()  # where twins come from, and what else is carried from step to step

    @abstractmethod
    def passes(self, k: int, chunk: Batch) -> Iterable[Pass]:
        """What a step learns from in chunk k of the batch."""

    def _check(self) -> None:  # noqa: B027  # a method may have none
        """Refuse settings that the method cannot take; some may be changed between steps."""

    def _changeable(self) -> dict[str, Any]:
        """Its settings that may be changed between steps, the same on all ranks."""
        return {}

    def __call__(self, now: Any, ahead: Any = None) -> Losses:
        """Add the gradients of one step to `.grad`.

        Args:
            now: the batch to learn from.
            ahead: a later batch, as `feed` yields it, for a source of twins that works ahead; None: there is none.
        """
        self._take(now, ahead, self._step.run)
        return self._step.losses

    def loss(self, now: Any, ahead: Any = None) -> Tensor:
        """The loss of one step, which the caller backpropagates; it holds the graph of the whole batch."""
        total: Tensor = self._take(now, ahead, self._step.total)
        return total

    @property
    def delay(self) -> int:
        """Updates (`Recycled`: calls) between the weights that generate a twin and those that learn from it."""
        return self._delay

    @property
    def step(self) -> int:
        """How many steps were taken: calls, also where several of them accumulate gradients for one update."""
        return self._step.t

    @property
    def losses(self) -> Losses:
        """The mean losses of the last step."""
        return self._step.losses

    def feed(self, loader: Iterable[Any]) -> Feed:
        """A loader of the pairs that the method is called with; see `Feed`."""
        return Feed(loader, self.twins.reads_ahead, self._begin_epoch)

    def state_dict(self, all_ranks: bool = False) -> State:
        """The state besides the weights that the next step needs, as tensors for torch.save or safetensors.

        Stale weights that FSDP2 shards are gathered: every rank calls it then, and `load_state_dict` too.

        Args:
            all_ranks: what differs between ranks, such as the twins of `Recycled`, is gathered from all of them; every
                rank calls it.
        """
        about, tensors = self.twins.state()
        return pack({**self._identity(), "step": self.step, **about}, tensors, self.twins.per_rank, all_ranks)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; with the same seed, the next step takes the twins that it would have."""
        about, tensors = unpack(state, self._identity(), self.twins.per_rank)
        self._step.reset()
        self._step.t = about["step"]
        self.twins.load(about, tensors)

    def _take(self, now: Any, ahead: Any, run: Callable[[Batch | Chunked, Any], Any]) -> Any:
        """One step t: the source of twins begins and ends with it; `run` adds gradients up, or returns the loss."""
        step = self._step
        self._check()
        batch = step.batch(now)
        step.begin(batch, self._compared, self.delay > 0)
        self.twins.begin(step.t, ahead)
        result = run(batch, self.passes)
        self.twins.end()
        step.end()
        return result

    def _begin_epoch(self) -> None:
        """A step that failed is forgotten: its batch does not come again."""
        if self._step.reset():
            self.twins.reset()

    def _compared(self) -> dict[str, Any]:
        """What has to be the same on all ranks."""
        return {**self._step.fixed, **self._changeable()}

    def _identity(self) -> dict[str, Any]:
        """What a loaded state has to be of."""
        return {**self._step.fixed, "chunk_size": self._step.chunk_size, "seed": self._step.seed}


class WithTwins(Method):
    """What `ConAdv` and `Recycled` share: an attack, and the weight of twins; both may be changed between steps."""

    __slots__ = ("adv_weight", "attack")

    def __init__(self, step: Step, delay: int, attack: Attack, adv_weight: float) -> None:
        super().__init__(step, delay)
        self.attack, self.adv_weight = attack, adv_weight
        if isinstance(attack, type) or not isinstance(attack, Attack):
            raise ValueError(f"attack {attack!r}: pass an attack, such as conadv.PGD(4/255)")
        self._check()

    def _changeable(self) -> dict[str, Any]:
        return {"adv_weight": self.adv_weight, **described(self.attack)}
