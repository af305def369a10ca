"""Twins that attackers generate ahead, and that are generated here if they do not come.

    begin(t)     θ_t ──► published once       x_{t+τ}[k] ──► an attacker that is free ──► twin(t+τ, k)
    take(t, k)   the twin, if it is there or comes soon; else `Local` evaluates it, to the same bits

Attackers have no state: they need weights, a chunk and a seed. So they may be lost, late, or new, which changes the
speed of a run and never its result. This file decides who evaluates what. Ray starts attackers, carries weights and
twins, and notices processes that died; `conadv.ray` starts Ray.
"""

from __future__ import annotations

import os
import time
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import count, islice
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from conadv.core.algorithm import ConAdv
from conadv.core.attack import Attack, Loss
from conadv.core.batch import Batch, Chunked, cut
from conadv.core.roles import Place
from conadv.core.state import State
from conadv.core.step import Common, Step
from conadv.core.twins import Local, TwinShare, tensors_of
from conadv.wrappers import broadcast_early, data_parallel, innermost, is_sharded, precision

# Twins, as bytes if that loses nothing, and when the attacker began and ended (Unix time).
Answer = tuple["Packed", float, float]

_STARTS = 5  # attackers in a row that could not start, after which no more are tried
_DEPTH = 2  # chunks that an attacker has at once: one to work on, and the next
_numbers = count()  # of works, over all methods of this process


class Lost(str):
    """In place of an answer: why the attacker was lost, or failed."""


@dataclass(frozen=True, eq=False)
class Packed:
    """Tensors as one array of bytes, which keep their values, dtypes and strides."""

    data: np.ndarray[Any, Any]
    forms: tuple[tuple[int, torch.dtype, tuple[int, ...], tuple[int, ...]], ...]
    """Of each tensor: the number of bytes, the dtype, the shape and the strides."""

    def unpack(self, device: torch.device | str = "cpu") -> list[Tensor]:
        """The tensors, on a device."""
        parts = torch.from_numpy(self.data.copy()).to(device).split([form[0] for form in self.forms])
        pairs = zip(parts, self.forms, strict=True)
        return [part.clone().view(dtype).as_strided(shape, stride) for part, (_, dtype, shape, stride) in pairs]


def pack(*tensors: Tensor) -> Packed:
    """Copy tensors into one array of bytes, with one transfer from the device."""
    # A copy is dense, with the strides of a tensor that was dense, such as one in channels_last.
    copies = [tensor.detach().clone() for tensor in tensors]
    flat = [copy.as_strided((copy.numel(),), (1,)).view(torch.uint8) for copy in copies]
    forms = [(len(part), own.dtype, tuple(own.shape), own.stride()) for part, own in zip(flat, copies, strict=True)]
    return Packed(torch.cat(flat).cpu().numpy(), tuple(forms))


@dataclass(frozen=True)
class Work:
    """What a twin depends on besides the weights and the images; works that are equal have equal twins."""

    attack: Attack
    share: TwinShare
    loss: Loss
    twin_branch: str
    common: Common
    place: Place
    shapes: dict[str, torch.Size]
    """Of the weights and buffers, by name."""
    training: tuple[bool, ...]
    """The training flag of each module."""
    numerics: tuple[int, str, bool, bool]
    number: int = field(default_factory=lambda: next(_numbers), compare=False)

    @classmethod
    def of(cls, method: ConAdv) -> Work:
        """What the twins of a method depend on at the moment."""
        step, kind = method._step, method._step.device.type
        with precision(step.model), step._autocasting():
            autocasts = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
            autocast = torch.get_autocast_dtype(kind) if autocasts else None
        common = Common(chunk_size=step.chunk_size, seed=step.root_seed, autocast=autocast, input_name=step._input_name)
        assert step.twin_branch is not None
        return cls(
            attack=method.attack,
            share=step.share,
            loss=step.loss,
            twin_branch=step.twin_branch,
            common=common,
            place=step.place,
            shapes={name: tensor.shape for name, tensor in tensors_of(step.model).items()},
            training=tuple(module.training for module in innermost(step.model).modules()),
            numerics=(
                torch.get_num_threads(),
                torch.get_float32_matmul_precision(),
                torch.are_deterministic_algorithms_enabled(),
                torch.backends.cudnn.deterministic,
            ),
        )


class Attacker:
    """Evaluates twins with weights that it is sent. It holds a model, and nothing that could not be sent again.

    Args:
        make_model: makes a model like that of the learner.
    """

    def __init__(self, make_model: Callable[[], nn.Module]) -> None:
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._model = make_model().to(self._device)
        self._loaded = -1, -1  # the numbers of the work and of the weights
        self._step: Step  # of that work

    def ready(self) -> int:
        """The id of its process; an answer says that the attacker has started."""
        return os.getpid()

    def twin(self, published: tuple[Work, int, Packed], t: int, k: int, piece: Any) -> Answer:
        """Generate the twin of chunk k of the batch of step t; `piece` is its images, labels and extra inputs."""
        began, (work, version, weights) = time.time(), published
        if self._loaded[0] != work.number:
            self._step = self._begin(work)
        if self._loaded != (work.number, version):
            for own, tensor in zip(tensors_of(self._model).values(), weights.unpack(self._device), strict=True):
                own.data = tensor
            self._loaded = work.number, version
        images, labels, extra = tree_map_only(Packed, lambda packed: packed.unpack()[0], piece)
        chunk = next(self._step.chunks(Chunked(1, [Batch(images, labels, extra=extra)])))
        twin = self._step.attack(work.attack, t, k, chunk).images
        if images.dtype == torch.uint8 and work.attack.exact_as_bytes(from_images=False):
            levels = twin.mul(255).round_().to(torch.uint8)
            if torch.equal(from_levels(levels, chunk.images, work.attack, self._step.attack_seed(t, k)), twin):
                twin = levels
        return pack(twin), began, time.time()

    def _begin(self, work: Work) -> Step:
        """Compute as the learner does."""
        threads, matmul, deterministic, torch.backends.cudnn.deterministic = work.numerics
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(matmul)
        torch.use_deterministic_algorithms(deterministic)
        own = {name: tensor.shape for name, tensor in tensors_of(self._model).items()}
        modules = list(innermost(self._model).modules())
        if list(own.items()) != list(work.shapes.items()) or len(modules) != len(work.training):
            other = min((name for name, _ in own.items() ^ work.shapes.items()), default="their layers")
            raise ValueError(
                f"make_model makes another model than the method has (they differ in {other}): make both with one "
                "function, which splits its BatchNorm too"
            )
        for module, training in zip(modules, work.training, strict=True):
            module.training = training
        loss = work.loss.to(self._device) if isinstance(work.loss, nn.Module) else work.loss
        step = Step(self._model, loss, work.common, work.twin_branch)
        step.place = work.place
        return step


def from_levels(levels: Tensor, images: Tensor, attack: Attack, seed: int) -> Tensor:
    """The twins of 8-bit images from their 8-bit levels, to the bit that the attack gives them."""
    return attack.along(images, levels.to(images) - images.mul(255).round_(), seed)


@dataclass(eq=False)
class _Job:
    """A requested twin, with the number of the update whose weights it needs and the settings at that time."""

    piece: Batch
    update: int
    work: Work
    published: Any
    """Both, with the weights, as attackers see them."""
    ticket: Any = None
    """Of the attacker whose answer is awaited, in `_tasks`."""
    answer: Answer | None = None


class Pooled:
    """Twins that attackers generate ahead, with `Local` for all that they do not deliver.

    Args:
        ray: the module.
        start: starts an attacker; returns the Ray actor.
        replaces: start a new attacker for each that was lost.
        wait: see `conadv.ray.Pool`.
    """

    per_rank = False

    def __init__(self, ray: Any, start: Callable[[], Any], replaces: bool, wait: float | None) -> None:
        self._ray, self._start, self._replaces = ray, start, replaces
        self._adapts, self._patience = wait is None, 1.0 if wait is None else wait
        self._numbers = count()
        self._actors: dict[int, Any] = {}  # by number
        self._starting: dict[Any, int] = {}  # by the ticket that says that one has started
        self._failed_starts = 0
        self._method: ConAdv | None = None
        self._jobs: dict[tuple[int, int], _Job] = {}  # by step and chunk, in order
        self._tasks: dict[Any, tuple[int, _Job]] = {}  # by ticket: the attacker, and what it was given
        self._update = 0  # how many updates of the weights were seen
        self._work: Work | None = None  # of this step
        self._published: Any = None  # work and weights of this update, as attackers see them
        self._buffers: list[Tensor] = []  # as they were published
        self._told: set[str] = set()
        self._counts: Counter[str] = Counter()  # of this step: twins by where they came from, and late ones
        self._waited = 0.0  # seconds of this step
        self.worked: deque[tuple[int, float, float]] = deque(maxlen=10_000)
        """Of the last answers: the attacker, and when it began and ended (Unix time)."""

    def add(self, attackers: int = 1) -> None:
        """Start more attackers, also while a run goes on."""
        for number in islice(self._numbers, attackers):
            self._actors[number] = self._start()
            self._starting[self._actors[number].ready.remote()] = number

    def over(self, method: ConAdv, local: Local) -> Self:
        """Be the source of twins of a method; `local` evaluates those that attackers do not deliver."""
        if self._method is not None:
            raise ValueError("this pool has a method already: make a pool for each")
        if method.delay == 0:
            raise ValueError("delay 0 needs the twins of the current weights at once: a pool needs delay 1 or more")
        if is_sharded(method._step.model):
            raise ValueError("the weights are sharded over ranks (FSDP2): a pool needs them whole, as with DDP")
        self._method, self._step, self.local, self.reads_ahead = method, method._step, local, method.delay
        return self

    def metrics(self) -> dict[str, float]:
        """Of the last step: twins from the pool, generated here, late; attackers alive; seconds waited."""
        twins = {f"twins_{name}": float(self._counts[name]) for name in ("pool", "here", "late")}
        return {**twins, "attackers": float(len(self._ready())), "seconds_waited": self._waited}

    def begin(self, t: int, ahead: Any) -> None:
        self._counts, self._waited = Counter(), 0.0
        self.local.begin(t, None)
        if not self.local.same_update:
            self._update += 1
            self._published = None
        self._jobs = {key: job for key, job in self._jobs.items() if key[0] >= t}
        assert self._method is not None
        if (work := Work.of(self._method)) != self._work:
            self._work, self._published = work, None
        # The first forward pass would: attackers get the buffers that `Local` keeps.
        broadcast_early(data_parallel(self._step.model))
        if ahead is not None and self._ready():
            self._request(t + self.reads_ahead, ahead)
        self._poll()

    def take(self, t: int, k: int, chunk: Batch) -> Batch:
        job = self._jobs.get((t, k))
        answer = self._answer_of(job) if job is not None and self._is_right(job, chunk) else None
        self._jobs.pop((t, k), None)
        if job is None or answer is None:
            return self._evaluate_here(t, k, chunk)
        self._counts["pool"] += 1
        (images,) = answer[0].unpack(chunk.images.device)
        if images.dtype == torch.uint8:
            images = from_levels(images, chunk.images, job.work.attack, self._step.attack_seed(t, k))
        return Batch(images, chunk.labels, extra=chunk.extra)

    def end(self) -> None:
        published = self._published is not None and not self.local.same_update
        if published and not all(map(torch.equal, self._buffers, self._own_buffers())):
            self._tell_once(
                "the model changes its buffers in the forward pass (spectral norm?), so that attackers cannot know "
                "them in time: twins are generated here"
            )
            self._jobs, self._published = {}, None
        self.local.end()
        self._poll()

    def reset(self) -> None:
        self.local.reset()
        self._jobs = {}

    def state(self) -> tuple[dict[str, Any], State]:
        return self.local.state()

    def load(self, about: Mapping[str, Any], tensors: State) -> None:
        self.reset()
        self._published = None
        self.local.load(about, tensors)

    def _request(self, t: int, ahead: Any) -> None:
        """Ask for the twins of a later batch, with the weights of now."""
        work = self._work
        try:
            batch = self._step.batch(ahead)
            assert batch is not None and work is not None
            if isinstance(batch, Chunked) and iter(batch.chunks) is batch.chunks:
                self._tell_once("the chunks of a batch can be read only once: twins are generated here")
                return
            pieces = [self._step.batch(piece) for piece in cut(batch, self._step.chunk_size)]
        except ValueError:
            return  # its own step will say what is wrong with it
        if self._published is None:
            if self.local.same_update:
                return  # the weights of this update were not published, or cannot be used
            weights = pack(*tensors_of(self._step.model).values())
            self._published = self._ray.put((work, self._update, weights))  # freed with its last reference
            self._buffers = [buffer.clone() for buffer in self._own_buffers()]
        for k, piece in enumerate(pieces):
            if self._step.has_twin(t, k):
                assert isinstance(piece, Batch)
                self._jobs[t, k] = _Job(piece, self._update, work, self._published)

    def _own_buffers(self) -> list[Tensor]:
        return [tensor for tensor in tensors_of(self._step.model).values() if not isinstance(tensor, nn.Parameter)]

    def _is_right(self, job: _Job, chunk: Batch) -> bool:
        """Whether a twin is the one that `Local` would evaluate: its weights, settings and images are as expected."""
        if job.update != self._update - self.reads_ahead or job.work != self._work:
            return False
        seen = next(self._step.chunks(Chunked(1, [job.piece])))
        some, others = (tree_leaves((each.images, each.labels, dict(each.extra))) for each in (seen, chunk))
        return len(some) == len(others) and all(map(_same, some, others))

    def _answer_of(self, job: _Job) -> Answer | None:
        """Wait for an answer; if it does not come in time, others get what its attacker was given."""
        began = time.monotonic()
        self._poll()
        while job.ticket in self._tasks and (left := began + self._patience - time.monotonic()) > 0:
            self._poll(left)
        self._waited += time.monotonic() - began
        if job.ticket in self._tasks:
            self._counts["late"] += 1
            late, _ = self._tasks[job.ticket]
            for attacker, given in self._tasks.values():
                given.ticket = None if attacker == late else given.ticket
        return job.answer

    def _evaluate_here(self, t: int, k: int, chunk: Batch) -> Batch:
        self._counts["here"] += 1
        began = time.monotonic()
        twin = self.local.take(t, k, chunk)
        if twin.images.device.type != "cpu":
            torch.accelerator.synchronize()
        if self._adapts:
            self._patience = 2 * (time.monotonic() - began)
        self._poll()
        return twin

    def _poll(self, seconds: float = 0.0) -> None:
        """Take answers, notice losses and hand out work; waits at most so many seconds for an answer."""
        lost = {}
        for ticket, answer in self._collect(self._tasks, seconds).items():
            attacker, job = self._tasks[ticket]
            if isinstance(answer, Lost):
                lost[attacker] = answer
                continue
            del self._tasks[ticket]
            self.worked.append((attacker, *answer[1:]))
            if job.ticket == ticket:  # otherwise another one generates it
                job.answer = answer
        for attacker, why in lost.items():
            self._tasks = {ticket: task for ticket, task in self._tasks.items() if task[0] != attacker}
            self._ray.kill(self._actors.pop(attacker))
            self._tell_once(f"an attacker was lost ({why}): others, or this process, generate its twins")
            self.add(self._replaces)
        self._hand_out()

    def _hand_out(self) -> None:
        """Give chunks to the attackers that have least to do; one that is late gets nothing until it has answered."""
        loads = Counter(dict.fromkeys(self._ready(), 0))
        for ticket, (attacker, job) in self._tasks.items():
            loads[attacker] += 1 if job.ticket == ticket else _DEPTH
        for key, job in self._jobs.items():
            if job.answer is not None or job.ticket in self._tasks:
                continue
            attacker, load = min(loads.items(), key=lambda item: item[1], default=(0, _DEPTH))
            if load >= _DEPTH:
                return
            piece = tree_map_only(Tensor, pack, (job.piece.images, job.piece.labels, dict(job.piece.extra)))
            job.ticket = self._actors[attacker].twin.remote(job.published, *key, piece)
            self._tasks[job.ticket] = attacker, job
            loads[attacker] += 1

    def _ready(self) -> list[int]:
        """The attackers that can be given work."""
        for ticket, answer in self._collect(self._starting, 0.0).items():
            number = self._starting.pop(ticket)
            self._failed_starts = self._failed_starts + 1 if isinstance(answer, Lost) else 0
            if isinstance(answer, Lost):
                del self._actors[number]
                self._tell_once(f"an attacker could not start: {answer}")
                self.add(self._replaces and self._failed_starts < _STARTS)  # its node may have been lost
        if not self._actors:
            self._tell_once("no attacker is left: all twins are generated here, with the same results")
        return [number for number in self._actors if number not in self._starting.values()]

    def _collect(self, tickets: Iterable[Any], seconds: float) -> dict[Any, Any]:
        """The answers that are there, by ticket; waits at most so many seconds for the first."""
        if not (waiting := list(tickets)):
            return {}
        self._ray.wait(waiting, num_returns=1, timeout=seconds)
        done, _ = self._ray.wait(waiting, num_returns=len(waiting), timeout=0)
        return {ticket: self._answer(ticket) for ticket in done}

    def _answer(self, ticket: Any) -> Any:
        try:
            return self._ray.get(ticket)
        except self._ray.exceptions.RayError as error:
            if isinstance(cause := getattr(error, "cause", None), ValueError):  # it would be raised here, too
                raise ValueError(str(cause)) from None
            return Lost(str(error).strip().rpartition("\n")[2].strip())

    def _tell_once(self, message: str) -> None:
        if message not in self._told:
            self._told.add(message)
            warnings.warn(message, stacklevel=2)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return bool(one == other)
