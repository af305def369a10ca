"""Where twins come from. A twin is a pure function, so that it does not matter where it is evaluated, or when:

    twin(t, k) = attack(θ_{t-τ}, x_t[k], y_t[k], seed(t, k))          t: step, k: chunk, τ: delay

A step t is one call. θ_{t-τ} are the weights before the τ-th last update: steps that accumulate gradients share them.
A source of twins answers one question, `take(t, k, chunk)`. What it does not have, it evaluates here: `Local` every
twin, `LeftTwins` (of `recycled`) those of a step with none before it, a pool those that were lost or not sent yet.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn

from conadv.wrappers import exchange, innermost, local, sharded_like, whole

from .batch import Batch, regrouped
from .seeds import CHOICE_OF_TWINS, ORDER_OF_TWINS, mix, uniform
from .state import State, below

# twin(t, k, x_t[k]) with the weights that the model has at the moment.
Evaluate = Callable[[int, int, Batch], Batch]


class Twins:
    """Where the twins of a method come from, and what that carries from one step to the next; this one has no twins."""

    reads_ahead: int = 0
    """How many steps before its own a batch is shown to `begin`; 0: never."""
    per_rank: bool = False
    """Whether each rank has its own."""

    def over(self, method: Any, local: Local) -> Twins:
        """Generate the twins of a method ahead, as `conadv.ray.Pool` does; `local` evaluates those that do not come."""
        return self

    def begin(self, t: int, ahead: Any) -> None:
        """Begin step t; `ahead` is the batch of step t + reads_ahead, or None."""

    def take(self, t: int, k: int, chunk: Batch) -> Batch:
        """The twin of chunk k of the batch of step t."""
        raise NotImplementedError

    def end(self) -> None:
        """End a step, before its update of the weights."""

    def reset(self) -> None:
        """Drop what a step that failed has left behind."""

    def state(self) -> tuple[dict[str, Any], State]:
        """What the next step needs: counters, and tensors by name."""
        return {}, {}

    def load(self, about: Mapping[str, Any], tensors: State) -> None:
        """Restore what `state` returned."""


class Local(Twins):
    """This process evaluates a twin when it is needed, with the weights of `delay` updates ago.

    Weights that were not changed since the last call belong to the same update (accumulation, or a skipped update).
    From then on one more version is kept, since every call of an update needs the oldest; the further calls of that
    first update take weights one update younger.
    """

    def __init__(self, model: nn.Module, delay: int, evaluate: Evaluate) -> None:
        self.evaluate = evaluate
        self.stale = StaleWeights(model, delay)
        self._delay = delay
        self._seen: list[int] | None = None  # PyTorch's counters of changes to each weight, at the last call
        self._updated: bool | None = None  # since the last call, as a loaded state says
        self.same_update = False
        """Whether this call and the last one belong to the same update."""

    def begin(self, t: int, ahead: Any) -> None:
        self._start()
        self.same_update = self._delay > 0 and self._seen is not None and not self._is_updated()
        if self.same_update and len(self.stale.versions) == self._delay:
            self.stale.versions.appendleft(_cloned(self.stale.versions[0]))  # at first the oldest twice

    def take(self, t: int, k: int, chunk: Batch) -> Batch:
        if not self._delay:
            return self.evaluate(t, k, chunk)
        # In the first call of an update θ_{t-τ} is the τ-th from the end. Then `end` keeps θ_t, and it is the first.
        with self.stale.swapped_in(0 if self.same_update else -self._delay):
            return self.evaluate(t, k, chunk)

    def end(self) -> None:
        if not self.same_update:
            self.stale.keep()
        self._seen, self._updated = self.stale.changes(), None

    def state(self) -> tuple[dict[str, Any], State]:
        self._start()
        tensors: State = {}
        for number, version in enumerate(self.stale.versions):
            tensors |= {f"stale.{number}.{name}": whole(tensor) for name, tensor in version.items()}
        return {"versions": len(self.stale.versions), "updated": bool(self._delay) and self._is_updated()}, tensors

    def load(self, about: Mapping[str, Any], tensors: State) -> None:
        self.resume([below(f"stale.{number}.", tensors) for number in range(about["versions"])], about["updated"])

    def resume(self, versions: list[State], updated: bool) -> None:
        """Continue with these weights of the last updates, oldest first, and a call before the next one or not."""
        self.stale.load(versions)
        self._seen, self._updated = [], updated  # not None: it has begun

    def _start(self) -> None:
        """Keep the weights at the start: the model may have been loaded since the method was made."""
        if self._seen is None:
            for version in self.stale.versions:
                _copy(tensors_of(self.stale.model), version)

    def _is_updated(self) -> bool:
        """Whether the weights were changed since the last call.

        Optimizers that write to `.data` do not move the counters, so weights are compared if the counters are equal.
        """
        if self._updated is not None:
            return self._updated
        return self._seen != self.stale.changes() or not self.stale.is_newest()


class LeftTwins(Twins):
    """Twins that the clean backward pass of a step leaves behind for the next one, in the order of the chunks.

    A step with none before it evaluates those of its own batch.
    """

    per_rank = True

    def __init__(self, model: nn.Module, evaluate: Evaluate) -> None:
        self._model, self._evaluate = model, evaluate
        self._coming: dict[int, Batch | None] = {}  # of this step, by chunk; None: its backward pass has not run
        self._waiting: deque[Batch] = deque()  # of the step before
        self.waited = 0
        """How many twins waited for this step."""

    def expect(self, k: int, along: Callable[[Tensor], Batch]) -> Callable[[Tensor], None]:
        """Announce the twin of chunk k; what is returned makes it from the gradient of the images."""
        self._coming[k] = None

        def receive(gradient: Tensor) -> None:
            self._coming[k] = along(gradient)

        return receive

    def remember(self, k: int, chunk: Batch) -> None:
        """Leave chunk k itself behind: another rank sends the images of its twin."""
        self._coming[k] = chunk

    def items(self) -> list[Batch]:
        """What waits for the next step, in order."""
        return [*self._waiting, *self._arrived()]

    def adopt(self, twins: Iterable[Batch]) -> None:
        """Let these wait for the next step."""
        self._waiting.extend(twins)

    def begin(self, t: int, ahead: Any) -> None:
        self._waiting.extend(self._arrived())
        self._coming = {}
        self.waited = len(self._waiting)

    def check(self, count: int | None) -> None:
        """Refuse a batch with `count` chunks that get twins after one with another number; None: it is not known."""
        if count is not None and self.waited not in (0, count):
            raise ValueError(
                f"a batch with {count} chunks of twins follows one with {self.waited}: the method needs batches "
                "of one size (drop_last=True drops the smaller last one)"
            )

    def take(self, t: int, k: int, chunk: Batch) -> Batch:
        return self._waiting.popleft() if self.waited else self._evaluate(t, k, chunk)

    def reset(self) -> None:
        self._waiting.clear()
        self._coming = {}

    def state(self) -> tuple[dict[str, Any], State]:
        tensors: State = {}
        for number, twin in enumerate(self.items()):
            if not isinstance(twin.labels, Tensor) or twin.extra:
                raise ValueError(
                    "Recycled can save twins only with tensor labels and no extra inputs: use ConAdv to checkpoint "
                    "other batches"
                )
            tensors |= {f"twins.{number}.images": twin.images, f"twins.{number}.labels": twin.labels}
        return {}, tensors

    def load(self, about: Mapping[str, Any], tensors: State) -> None:
        self.reset()
        device = next(self._model.parameters()).device
        while own := below(f"twins.{len(self._waiting)}.", tensors):
            self._waiting.append(Batch(own["images"].to(device), own["labels"].to(device)))

    def _arrived(self) -> list[Batch]:
        """What this step has left behind so far."""
        twins = [twin for twin in self._coming.values() if twin is not None]
        if len(twins) < len(self._coming):
            raise ValueError("backpropagate the loss of each step: recycled takes the twins from there")
        return twins


def as_share(share: float | str) -> Fraction:
    """Convert the share of a batch's chunks that get twins, such as 0.25 or "1/4"."""
    try:
        fraction = Fraction(share).limit_denominator(1000)
    except (ValueError, ArithmeticError):  # no number, 1/0 or infinity
        fraction = Fraction(0)
    if not 0 < fraction <= 1:
        raise ValueError(f"twin_share {share}: a share of the batch, above 0 and at most 1, such as 1/4")
    return fraction


def is_chosen(share: Fraction, seed: int, batch: int, first_chunk: int, number: int) -> bool:
    """Whether chunk `number`, counted from `first_chunk`, has twins: some of every group, other ones in each step."""
    place = number % share.denominator
    group = first_chunk + number - place
    order = sorted(range(share.denominator), key=lambda other: mix(seed, CHOICE_OF_TWINS, batch, group, other))
    return place in order[: share.numerator]


class Shuffle:
    """Twins are learnt in other chunks than they were attacked in, so that no statistics of a chunk give labels away.

    The twins of every `group` consecutive chunks are shuffled among each other, and learnt from when the last of them
    is there. The order is a function of the seed, the step and the number of that chunk.
    """

    def __init__(self, group: int) -> None:
        if group < 1:
            raise ValueError(f"shuffle_twins {group}: chunks whose twins are shuffled together, 1 (none) or more")
        self.group = group
        self.held: list[tuple[int, Batch]] = []

    def add(self, k: int, twin: Batch, seed: int) -> list[tuple[int, Batch]]:
        """The twins to learn from after those of chunk k have come, each with the number of a chunk."""
        self.held.append((k, twin))
        if len(self.held) < self.group:
            return []
        numbers, twins = zip(*self.held, strict=True)
        self.held = []
        images = sum(len(one.images) for one in twins)
        order = uniform((images,), mix(seed, ORDER_OF_TWINS), twin.images).argsort(stable=True)
        return list(zip(numbers, regrouped(twins, order), strict=True))


class StaleWeights:
    """θ_{t-τ}, ..., θ_{t-1}: copies of a model's weights and buffers before each of the last updates, oldest first."""

    def __init__(self, model: nn.Module, delay: int) -> None:
        self.model = model
        own = tensors_of(model) if delay else {}
        self.versions = deque(_cloned(own) for _ in range(delay))

    def keep(self) -> None:
        """Copy the current weights, before an update, over the oldest version."""
        if self.versions:
            self.versions.rotate(-1)
            _copy(tensors_of(self.model), self.versions[-1])

    @contextmanager
    def swapped_in(self, number: int) -> Iterator[None]:
        """Give the model one of the versions, within this context."""
        kept = self.versions[number]
        if kept.keys() != tensors_of(self.model).keys():
            raise ValueError("the model has other tensors than when the method was made: make the method again")
        self._swap(kept)
        try:
            yield
        finally:
            self._swap(kept)

    @torch.no_grad()
    def changes(self) -> list[int]:
        """PyTorch's counters of changes to each trainable weight."""
        return [local(own)._version for own in tensors_of(self.model).values() if own.requires_grad]

    @torch.no_grad()
    def is_newest(self) -> bool:
        """Whether the trainable weights are equal to those of the newest version."""
        own, newest = tensors_of(self.model), self.versions[-1]
        _follow(newest, own)
        trained = [name for name, tensor in own.items() if tensor.requires_grad]
        return all(torch.equal(local(own[name]), local(newest[name])) for name in trained)

    def load(self, versions: list[State]) -> None:
        """Restore what `versions` were; tensors that are sharded here may be given whole."""
        own = tensors_of(self.model)
        if missing := {name for version in versions for name in own if name not in version}:
            raise ValueError(f"the stale weights of the state lack {min(missing)!r}: load a state of the same model")
        self.versions = deque(_cloned(own) for _ in versions)
        for kept, version in zip(self.versions, versions, strict=True):
            _copy({name: sharded_like(tensor, version[name]) for name, tensor in kept.items()}, kept)

    @torch.no_grad()
    def _swap(self, kept: State) -> None:
        own = tensors_of(self.model)
        torch.clear_autocast_cache()  # it holds the weights as they were, in 16 bits
        _follow(kept, own)
        swapped: set[Tensor] = set()  # a weight with two names is swapped once
        for name, mine in own.items():
            if mine not in swapped:
                swapped.add(mine)
                exchange(mine, kept[name])


def tensors_of(model: nn.Module) -> State:
    """The weights and buffers of a model's state, by the names that they have without wrappers.

    Looked up each time, since a model may replace a buffer.
    """
    state = innermost(model).state_dict(keep_vars=True)
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}  # no extra state of modules


def _cloned(tensors: Mapping[str, Tensor]) -> State:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


@torch.no_grad()
def _copy(source: Mapping[str, Tensor], target: State) -> None:
    _follow(target, source)
    torch._foreach_copy_([local(target[name]) for name in target], [local(source[name]) for name in target])


def _follow(kept: State, own: Mapping[str, Tensor]) -> None:
    """Move kept weights to the device and dtype of the model, which may have changed since."""
    for name, tensor in kept.items():
        if (tensor.device, tensor.dtype) != (own[name].device, own[name].dtype):
            kept[name] = tensor.to(own[name])
