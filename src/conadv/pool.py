"""Twins that attackers generate ahead, and that are generated here if they do not come.

    begin(t)     θ_t ──► published once       x_{t+τ}[k] ──► an attacker that is free ──► twin(t+τ, k)
    take(t, k)   the twin, if it is there or comes soon; else `Local` evaluates it, to the same bits

Attackers have no state: they need weights, a chunk and a seed. So they may be lost, late, or new, which changes the
speed of a run and never its result. This file decides who evaluates what; `conadv.ray` has attackers on Ray.
"""

from __future__ import annotations

import os
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from conadv.core.attack import Attack, Loss
from conadv.core.batch import Batch, Chunked, cut, select, to_device, to_pixels
from conadv.core.branches import split_layers
from conadv.core.roles import Place
from conadv.core.splitbn import split_batchnorm
from conadv.core.state import State
from conadv.core.step import Step
from conadv.core.twins import Local, TwinShare
from conadv.wrappers import broadcast_early, data_parallel, innermost, is_sharded, precision

if TYPE_CHECKING:
    from conadv.core.algorithm import ConAdv

_DEPTH = 2  # chunks that an attacker has at once: one to work on, and the next
_ALIGNED = 64  # bytes that each tensor of a message starts at a multiple of
_OTHER_MODEL = "make_model makes another model than the method has (they differ in {}): make both with one function"
_versions = count()  # of published weights, over all methods of this process


class Lost(Exception):  # noqa: N818  # not an error of the run
    """An attacker was lost, or failed; the message says why."""


class OtherModelError(ValueError):
    """The model of an attacker is not that of the learner."""


class Crew(Protocol):
    """The attackers of a pool, by number."""

    def put(self, value: Any) -> Any:
        """Publish a value once, for all attackers; freed when the last reference to the result is dropped."""

    def ready(self) -> Sequence[int]:
        """The attackers that can be given work."""

    def expected(self) -> int:
        """How many attackers are ready or starting."""

    def submit(self, attacker: int, *arguments: Any) -> Any:
        """Ask an attacker for `Attacker.twin(*arguments)`; returns a ticket."""

    def wait(self, tickets: Sequence[Any], seconds: float) -> Sequence[Any]:
        """The tickets that have an answer, after at most so many seconds; returns early with the first of them."""

    def answer(self, ticket: Any) -> Any:
        """The answer of a ticket; raises `Lost`."""

    def cancel(self, ticket: Any) -> None:
        """Let the attacker skip this work, if it has not begun."""

    def dismiss(self, attacker: int) -> None:
        """End an attacker; it may be replaced by a new one."""


@dataclass(frozen=True, eq=False)
class Packed:
    """Tensors as one array of bytes, which keep their values, dtypes and strides."""

    data: np.ndarray[Any, Any]
    forms: tuple[tuple[int, torch.dtype, tuple[int, ...], tuple[int, ...]], ...]
    """Of each tensor: the number of bytes, the dtype, the shape and the strides."""

    def unpack(self, device: torch.device | str = "cpu") -> list[Tensor]:
        """The tensors, on a device; they share memory with each other, not with the array."""
        data, offset, tensors = torch.from_numpy(self.data.copy()).to(device), 0, []
        for size, dtype, shape, stride in self.forms:
            tensors.append(data[offset : offset + size].view(dtype).as_strided(shape, stride))
            offset += size + -size % _ALIGNED
        return tensors


def pack(tensors: Sequence[Tensor]) -> Packed:
    """Copy tensors into one array of bytes, with one transfer from the device."""
    # A copy is dense, with the strides of a tensor that was dense, such as one in channels_last.
    copies = [tensor.detach().clone() for tensor in tensors]
    flat = [copy.as_strided((copy.numel(),), (1,)).view(torch.uint8) for copy in copies]
    padded = [nn.functional.pad(part, (0, -len(part) % _ALIGNED)) for part in flat]
    forms = tuple(
        (len(part), copy.dtype, tuple(copy.shape), copy.stride()) for part, copy in zip(flat, copies, strict=True)
    )
    return Packed(torch.cat(padded).cpu().numpy(), forms)


@dataclass(frozen=True)
class Weights:
    """The weights and buffers of a model, as an attacker loads them."""

    names: tuple[str, ...]
    tensors: Packed


@dataclass(frozen=True)
class Work:
    """What a twin depends on besides the weights and the images."""

    attack: Attack
    share: TwinShare
    loss: Loss
    twin_branch: str
    chunk_size: int | None
    seed: int
    autocast: torch.dtype | None
    input_name: str | None
    place: Place
    branches: tuple[str, ...]
    """Of the split layers; empty: there are none."""
    training: tuple[bool, ...]
    """The training flag of each module."""
    numerics: tuple[int, str, bool, bool]

    def step(self, model: nn.Module) -> Step:
        """What evaluates twins with a model."""
        common = {name: getattr(self, name) for name in ("chunk_size", "seed", "autocast", "input_name")}
        step = Step(model, self.loss, common, self.twin_branch)  # type: ignore[arg-type]  # the keys of Common
        step.place = self.place
        return step


class Attacker:
    """Evaluates twins with weights that it is sent. It holds a model, and nothing that could not be sent again.

    Args:
        make_model: makes a model like that of the learner, whose BatchNorm layers may be split already.
    """

    def __init__(self, make_model: Callable[[], nn.Module]) -> None:
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._model = make_model().to(self._device)
        self._work: Work | None = None
        self._step: Step | None = None
        self._version = -1

    def ready(self) -> int:
        """The id of its process; an answer says that the attacker has started."""
        return os.getpid()

    def twin(self, work: Work, version: int, weights: Weights, t: int, k: int, piece: Any) -> Packed:
        """Generate the twin of chunk k of the batch of step t: its images, as bytes if that loses nothing.

        Args:
            work: what it depends on besides the weights.
            version: the number of the weights.
            weights: of the learner, `delay` updates before step t.
            t: number of the step.
            k: number of the chunk.
            piece: its images, labels and extra inputs, packed.
        """
        if self._step is None or work != self._work:
            self._begin(work)
        if version != self._version:
            self._load(weights)
            self._version = version
        assert self._step is not None
        images, labels, extra = tree_map_only(Packed, lambda packed: packed.unpack()[0], piece)
        chunk = next(self._step.chunks(Chunked(1, [Batch(images, labels, extra=extra)])))
        twin = self._step.attack(work.attack, work.share, t, k, chunk).images
        if images.dtype == torch.uint8 and work.attack.exact_as_bytes(from_images=False):
            levels = twin.mul(255).round_().to(torch.uint8)
            if torch.equal(from_levels(levels, self._step, work, t, k, chunk), twin):
                twin = levels
        return pack([twin])

    def _begin(self, work: Work) -> None:
        """Compute as the learner does."""
        threads, matmul, deterministic, cudnn_deterministic = work.numerics
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(matmul)
        torch.use_deterministic_algorithms(deterministic)
        torch.backends.cudnn.deterministic = cudnn_deterministic
        if work.branches and not split_layers(self._model):
            self._model = split_batchnorm(self._model, work.branches)
        modules = list(innermost(self._model).modules())
        if len(modules) != len(work.training):
            raise OtherModelError(_OTHER_MODEL.format("the number of modules"))
        for module, training in zip(modules, work.training, strict=True):
            module.training = training
        loss = work.loss.to(self._device) if isinstance(work.loss, nn.Module) else work.loss
        self._work, self._step, self._version = work, replace(work, loss=loss).step(self._model), -1

    def _load(self, weights: Weights) -> None:
        own = tensors_of(self._model)
        tensors = dict(zip(weights.names, weights.tensors.unpack(self._device), strict=True))
        other = sorted(
            name
            for name in own.keys() | tensors.keys()
            if name not in own or name not in tensors or own[name].shape != tensors[name].shape
        )
        if other:
            raise OtherModelError(_OTHER_MODEL.format(other[0]))
        for name, tensor in tensors.items():
            own[name].data = tensor


def tensors_of(model: nn.Module) -> State:
    """The weights and buffers of a model that belong to its state, as `StaleWeights` keeps them."""
    state = innermost(model).state_dict(keep_vars=True)
    return {name: own for name, own in state.items() if isinstance(own, Tensor)}


def from_levels(levels: Tensor, step: Step, work: Work, t: int, k: int, chunk: Batch) -> Tensor:
    """The twins of 8-bit images from their 8-bit levels, to the bit that the attack gives them."""
    images = select(chunk, step.chosen(work.share, chunk, t, k)).images
    moved = levels.to(images) - images.mul(255).round_()
    return work.attack.along(images, moved, step.attack_seed(t, k))


@dataclass(eq=False)
class _Job:
    """A twin that was asked for."""

    t: int
    k: int
    update: int
    """Number of the update whose weights it is generated with."""
    version: int
    weights: Any
    work: Work
    published: Any
    """The work, as attackers see it."""
    piece: Batch
    ticket: Any = None
    answer: Packed | None = None


@dataclass
class _Task:
    """What an attacker was given: a job, or None if its answer is not wanted any more."""

    attacker: int
    job: _Job | None
    since: float


class Pooled:
    """Twins that a crew of attackers generates ahead, with `Local` for all that they do not deliver.

    Args:
        method: that learns from the twins.
        local: evaluates twins here; the state is its own.
        crew: the attackers.
        wait: seconds that a step waits for a twin that an attacker works on; None: twice as long as evaluating it
            here takes.
        lost_after: seconds without an answer after which an attacker counts as lost.
    """

    per_rank = False

    def __init__(self, method: ConAdv, local: Local, crew: Crew, wait: float | None, lost_after: float) -> None:
        self._model = method._step.model
        if method.delay == 0:
            raise ValueError("delay 0 needs the twins of the current weights at once: a pool needs delay 1 or more")
        if is_sharded(self._model):
            raise ValueError("the weights are sharded over ranks (FSDP2): a pool needs them whole, as with DDP")
        self.reads_ahead = method.delay
        self._method, self._local, self._crew = method, local, crew
        self._wait, self._lost_after = wait, lost_after
        self._jobs: dict[tuple[int, int], _Job] = {}  # by step and chunk, in order
        self._tasks: dict[Any, _Task] = {}  # by ticket
        self._update = 0  # how many updates of the weights were seen
        self._work: tuple[Work, Any] | None = None  # of this step; and as attackers see it
        self._weights: tuple[int, Any] | None = None  # of this update: version, and as attackers see them
        self._buffers: Packed | None = None  # as they were published
        self._here_seconds: float | None = None  # what evaluating a twin here takes
        self._told: set[str] = set()
        self.counts: Counter[str] = Counter()
        """Of this step: twins by where they came from."""
        self.waited = 0.0
        """Seconds of this step."""

    def begin(self, t: int, ahead: Any) -> None:
        self.counts, self.waited = Counter(), 0.0
        self._local.begin(t, None)
        if not self._local.same_update:
            self._update += 1
            self._weights = self._buffers = None
        for job in [job for job in self._jobs.values() if job.t < t]:
            self._forget(job)
        work = self._current_work()
        if self._work is None or self._work[0] != work:
            self._work = work, None
        # The first forward pass would: attackers get the buffers that `Local` keeps.
        broadcast_early(data_parallel(self._model))
        if ahead is not None and self._crew.ready():
            self._request(t + self.reads_ahead, ahead)
        self._poll()

    def take(self, t: int, k: int, chunk: Batch) -> Batch:
        job = self._jobs.get((t, k))
        if job is None or not self._is_right(job, chunk):
            return self._evaluate_here(t, k, chunk)
        began = time.monotonic()
        self._poll()
        deadline = began + self._patience()
        while job.answer is None and job.ticket is not None and time.monotonic() < deadline:
            self._poll(max(0.0, deadline - time.monotonic()))
        self.waited += time.monotonic() - began
        late = job.answer is None and job.ticket is not None
        self._forget(job, late)
        if job.answer is None:
            self.counts["late"] += late
            return self._evaluate_here(t, k, chunk)
        self.counts["pool"] += 1
        return self._received(job.answer, job, chunk)

    def end(self) -> None:
        if self._buffers is not None and not self._local.same_update:
            now = pack(self._current_buffers())
            if not np.array_equal(now.data, self._buffers.data):
                self._tell(
                    "buffers",
                    "the model changes its buffers in the forward pass (spectral norm?), so that attackers cannot know "
                    "them in time: twins are generated here",
                )
                self._weights = None
                for job in [job for job in self._jobs.values() if job.update == self._update]:
                    self._forget(job)
        self._local.end()
        self._poll()

    def reset(self) -> None:
        self._local.reset()
        for job in list(self._jobs.values()):
            self._forget(job)

    def state(self) -> tuple[dict[str, Any], State]:
        return self._local.state()

    def load(self, about: Mapping[str, Any], tensors: State) -> None:
        self.reset()
        self._weights = None
        self._local.load(about, tensors)

    def _request(self, t: int, ahead: Any) -> None:
        """Ask for the twins of a later batch, with the weights of now."""
        step = self._method._step
        try:
            batch = step.batch(ahead)
            assert batch is not None
            if isinstance(batch, Chunked) and iter(batch.chunks) is batch.chunks:
                self._tell("chunked", "the chunks of a batch can be read only once: twins are generated here")
                return
            pieces = [step.batch(piece) for piece in cut(batch, step.chunk_size)]
        except ValueError:
            return  # its own step will say what is wrong with it
        if self._weights is None and not self._local.same_update:
            self._publish_weights()
        if self._weights is None:
            return
        assert self._work is not None
        work, published = self._work
        if published is None:
            published = self._crew.put(work)
            self._work = work, published
        for k, piece in enumerate(pieces):
            if step.has_twin(self._method.share, t, k):
                assert isinstance(piece, Batch)
                self._jobs[t, k] = _Job(t, k, self._update, *self._weights, work, published, piece)

    def _publish_weights(self) -> None:
        tensors = tensors_of(self._model)
        weights = Weights(tuple(tensors), pack(list(tensors.values())))
        self._weights = next(_versions), self._crew.put(weights)
        self._buffers = pack(self._current_buffers())

    def _current_buffers(self) -> list[Tensor]:
        own = [tensor for tensor in tensors_of(self._model).values() if not isinstance(tensor, nn.Parameter)]
        return own or [torch.zeros(0)]

    def _current_work(self) -> Work:
        """What twins depend on in this step."""
        method, step = self._method, self._method._step
        kind = step.device.type
        with precision(self._model), step._autocasting():
            autocasts = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
            autocast = torch.get_autocast_dtype(kind) if autocasts else None
        layers = split_layers(self._model)
        assert step.twin_branch is not None
        return Work(
            attack=method.attack,
            share=method.share,
            loss=step.loss,
            twin_branch=step.twin_branch,
            chunk_size=step.chunk_size,
            seed=step.seeds.root,
            autocast=autocast,
            input_name=step._input_name,
            place=step.place,
            branches=layers[0].branches if layers else (),
            training=tuple(module.training for module in innermost(self._model).modules()),
            numerics=(
                torch.get_num_threads(),
                torch.get_float32_matmul_precision(),
                torch.are_deterministic_algorithms_enabled(),
                torch.backends.cudnn.deterministic,
            ),
        )

    def _is_right(self, job: _Job, chunk: Batch) -> bool:
        """Whether a twin is the one that `Local` would evaluate: its weights, settings and images are as expected."""
        assert self._work is not None
        if job.update != self._update - self.reads_ahead or job.work != self._work[0]:
            return False
        images = to_pixels(job.piece.images, chunk.images.device, chunk.images.dtype)
        others = to_device((job.piece.labels, dict(job.piece.extra)), chunk.images.device)
        mine, theirs = tree_leaves((images, others)), tree_leaves((chunk.images, chunk.labels, dict(chunk.extra)))
        return len(mine) == len(theirs) and all(_same(*pair) for pair in zip(mine, theirs, strict=True))

    def _received(self, answer: Packed, job: _Job, chunk: Batch) -> Batch:
        step = self._method._step
        (images,) = answer.unpack(chunk.images.device)
        if images.dtype == torch.uint8:
            images = from_levels(images, step, job.work, job.t, job.k, chunk)
        own = select(chunk, step.chosen(job.work.share, chunk, job.t, job.k))
        return Batch(images, own.labels, extra=own.extra)

    def _evaluate_here(self, t: int, k: int, chunk: Batch) -> Batch:
        if (job := self._jobs.get((t, k))) is not None:
            self._forget(job)
        self.counts["here"] += 1
        began = time.monotonic()
        twin = self._local.take(t, k, chunk)
        if twin.images.device.type != "cpu":
            torch.accelerator.synchronize()
        seconds = time.monotonic() - began
        self._here_seconds = seconds if self._here_seconds is None else 0.8 * self._here_seconds + 0.2 * seconds
        self._poll()
        return twin

    def _patience(self) -> float:
        if self._wait is not None:
            return self._wait
        return 1.0 if self._here_seconds is None else 2 * self._here_seconds

    def _poll(self, seconds: float = 0.0) -> None:
        """Take answers, notice losses and hand out work; waits at most so many seconds for an answer."""
        for ticket in self._crew.wait(list(self._tasks), seconds) if self._tasks else ():
            task = self._tasks.pop(ticket, None)
            if task is None:
                continue  # of an attacker that was just lost
            try:
                answer = self._crew.answer(ticket)
            except Lost as lost:
                if task.job is not None:
                    task.job.ticket = None
                    self._lose(task.attacker, str(lost))
                continue
            if task.job is not None:
                task.job.answer, task.job.ticket = answer, None
        silent = {task.attacker for task in self._tasks.values() if time.monotonic() - task.since > self._lost_after}
        for attacker in silent:
            self._lose(attacker, f"no answer for {self._lost_after:g} s")
        self._hand_out()
        if self._crew.expected() == 0:
            self._tell("alone", "no attacker is left: all twins are generated here, with the same results")
        else:
            self._told.discard("alone")

    def _hand_out(self) -> None:
        """Give chunks to the attackers that have least to do."""
        loads = Counter(dict.fromkeys(self._crew.ready(), 0))
        for task in self._tasks.values():
            # One that is late gets nothing until it has answered.
            loads[task.attacker] += 1 if task.job is not None else _DEPTH
        for job in self._jobs.values():
            if job.answer is not None or job.ticket is not None:
                continue
            attacker, load = min(loads.items(), key=lambda item: item[1], default=(0, _DEPTH))
            if load >= _DEPTH:
                return
            piece = tree_map_only(
                Tensor, lambda tensor: pack([tensor]), (job.piece.images, job.piece.labels, dict(job.piece.extra))
            )
            job.ticket = self._crew.submit(attacker, job.published, job.version, job.weights, job.t, job.k, piece)
            self._tasks[job.ticket] = _Task(attacker, job, time.monotonic())
            loads[attacker] += 1

    def _forget(self, job: _Job, late: bool = False) -> None:
        """Drop a job; if it is late, other attackers get what else its attacker was given."""
        self._jobs.pop((job.t, job.k), None)
        task = self._tasks.get(job.ticket) if job.ticket is not None else None
        if task is None:
            return
        others = [ticket for ticket, other in self._tasks.items() if late and other.attacker == task.attacker]
        for ticket in others or [job.ticket]:
            given, self._tasks[ticket].job = self._tasks[ticket].job, None
            if given is not None:
                given.ticket = None
                self._crew.cancel(ticket)

    def _lose(self, attacker: int, why: str) -> None:
        """Do without an attacker; what it was given waits for another one."""
        for ticket in [ticket for ticket, task in self._tasks.items() if task.attacker == attacker]:
            task = self._tasks.pop(ticket)
            if task.job is not None:
                task.job.ticket = None
        if attacker in self._crew.ready():
            self._crew.dismiss(attacker)
            self._tell(why, f"an attacker was lost ({why}): others, or this process, generate its twins")

    def _tell(self, what: str, message: str) -> None:
        if what not in self._told:
            self._told.add(what)
            warnings.warn(message, stacklevel=2)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)
    return bool(one == other)
