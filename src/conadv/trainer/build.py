"""Build the parts of a run on one rank from a recipe: method, optimizer, learning rate schedule, policy."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import asdict, dataclass, replace

import torch
from torch.optim import Optimizer

from conadv.catalog import METHODS, MethodInfo
from conadv.config import Recipe
from conadv.core.attack import Attack
from conadv.core.batch import Batch, Chunked
from conadv.core.roles import Place, Role
from conadv.core.step import Method
from conadv.core.twins import StaleWeights, TwinShare
from conadv.optim import build_optimizer
from conadv.optim.schedule import Schedule, warmup_constant, warmup_cosine, warmup_poly
from conadv.optim.signal import SignalToNoise
from conadv.ranks.choose import choose_layout
from conadv.ranks.layout import Layout
from conadv.ranks.mail import Wire
from conadv.ranks.member import Member
from conadv.ranks.world import World
from conadv.ray import Pool
from conadv.task.stream import Stream

from .attackers import build_pool, check_attackers
from .build_task import DTYPES, Task, attack_of
from .protocol import Protocol

_LARGEST_CHUNK = 64  # images, as in the paper; a recipe may have more


@dataclass(frozen=True)
class Policy:
    """When to save, to evaluate, and to read outcomes."""

    save_steps: int
    """Steps between two checkpoints."""
    evaluate_steps: int
    """Steps between two evaluations; 0: evaluate only at the end."""
    late: bool = False
    """Whether to read the outcome of a step one step late, so that the host does not wait for the device."""


@dataclass(frozen=True)
class Job:
    """The parts of a training run on one rank."""

    task: Task
    member: Member
    stream: Stream
    optimizer: Optimizer
    rate: Schedule
    protocol: Protocol
    stop: int
    """The number of steps after which the run ends."""
    clip_norm: float = 0.0
    """The largest norm of the gradient; 0: no limit."""
    pool: Pool | None = None
    """Attackers besides the ranks."""

    def close(self) -> None:
        """End the attackers."""
        if self.pool is not None:
            self.pool.close()

    @property
    def world(self) -> World:
        return self.member.world

    @property
    def layout(self) -> Layout:
        return self.member.layout

    @property
    def place(self) -> Place:
        return self.member.place

    @property
    def method(self) -> Method:
        return self.member.method

    @property
    def stale(self) -> StaleWeights:
        return self.member.stale

    def feed(self, start: int) -> Generator[tuple[Chunked | None, Chunked | None]]:
        """Yield what each step of this rank takes, from step `start` on."""
        return self.member.feed(self.batches(start), self.stop)

    def batches(self, start: int, stop: int | None = None) -> Generator[Chunked]:
        """Yield this rank's part of each batch, from step `start` on."""
        assert self.place.chunks is not None
        chunks = range(self.place.first_chunk, self.place.first_chunk + self.place.chunks)
        yield from self.stream.batches(start, self.stop if stop is None else stop, chunks)


def check_fit(recipe: Recipe, world_size: int) -> Layout:
    """Return the layout of a run, or raise a ValueError if it does not fit; no communication between ranks."""
    method, chunks = method_of(recipe), recipe.batch_size // recipe.chunk_size
    if recipe.layout == "auto":
        layout = choose_layout(method, recipe.delay, world_size, chunks)
    else:
        layout = Layout.fit(recipe.layout, method.duties, world_size)
    if not method.passes[Role.CLEAN] and Role.CLEAN in layout.roles:
        raise ValueError(
            f"adv_weight 1 has no clean pass, so that the clean ranks of layout {str(layout)!r} would do nothing: "
            f"choose one of {', '.join(map(repr, method.layouts))}"
        )
    if recipe.optimizer.gsnr and (world_size > 1 or chunks < 2 or recipe.twin_share != 1 or recipe.shuffle_twins != 1):
        raise ValueError(
            "optimizer.gsnr compares the chunks of one process, two or more that are alike: start 1 rank, lower "
            "--chunk-size, and drop --twin-share and --shuffle-twins, or drop --optimizer.gsnr"
        )
    check_attackers(recipe.attackers, method.duties, recipe.delay, layout, recipe.compile)
    share = TwinShare.from_number(recipe.twin_share)
    if Role.ADV in layout.duties:
        layout.check_twins(chunks, share.of, share.some, recipe.shuffle_twins)
    else:
        layout.check_twins(chunks)
    return layout


def with_chunk_size(recipe: Recipe, world_size: int) -> Recipe:
    """Choose the chunk size if a recipe leaves it open: the largest, up to 64 images, that fits batch and layout."""
    if recipe.chunk_size:
        return recipe
    problem = ""
    for size in range(min(_LARGEST_CHUNK, recipe.batch_size), 0, -1):
        try:
            chosen = replace(recipe, chunk_size=size)
            check_fit(chosen, world_size)
            return chosen
        except ValueError as error:
            problem = str(error)
    raise ValueError(f"no chunk size fits; with 1 image per chunk: {problem}")


def method_of(recipe: Recipe) -> MethodInfo:
    """Return the method with the cost that its duties have in this run: with adv_weight 1 there is no clean pass."""
    method = METHODS[recipe.method]
    if Role.ATTACK not in method.passes:
        return method
    passes = {**method.passes, Role.ATTACK: recipe.attack.steps * method.passes[Role.ATTACK]}
    if recipe.adv_weight < 1:
        return replace(method, passes=passes)
    layouts = tuple(text for text in method.layouts if Role.CLEAN not in Layout.lane_of(text, method.duties).roles)
    return replace(method, passes={**passes, Role.CLEAN: 0}, layouts=layouts)


def build_stream(recipe: Recipe, task: Task) -> Stream:
    return Stream(
        task.data.train,
        recipe.batch_size,
        recipe.chunk_size,
        recipe.seed,
        task.augment,
        task.workers,
        pin_memory=task.device.type == "cuda",
        copies=recipe.data.copies,
    )


def build_job(recipe: Recipe, task: Task, stream: Stream, layout: Layout, world: World, start: int) -> Job:
    """Build everything that this rank needs for a run from step `start` on."""
    steps = stream.steps_per_epoch * recipe.epochs
    stop = max(start, min(steps, recipe.max_steps or steps))
    attack = attack_of(recipe)
    signal = SignalToNoise(task.model.parameters(), recipe.optimizer.gsnr) if recipe.optimizer.gsnr else None
    pool = None
    if recipe.attackers is not None and start < stop:
        pool = build_pool(recipe.attackers, task.model, task.device, world.rank, world.size)
    method = _method(recipe, task, attack, signal, pool)
    method._step.t = start
    member = Member(
        world,
        layout,
        task.model,
        method,
        chunks=stream.chunks_per_step,
        wire=_wire(recipe, task, attack),
    )
    return Job(
        task=task,
        member=member,
        stream=stream,
        optimizer=build_optimizer(task.model, asdict(recipe.optimizer)),
        rate=_rate(recipe, steps),
        protocol=Protocol(
            adv_weight=recipe.adv_weight if Role.ADV in layout.duties else 0.0,
            last=round(steps * recipe.adv_until),
            scales_norms=recipe.scale_norms,
            signal=signal,
        ),
        stop=stop,
        clip_norm=recipe.clip_norm,
        pool=pool,
    )


def build_policy(recipe: Recipe, stream: Stream, device: torch.device) -> Policy:
    return Policy(
        save_steps=recipe.checkpoint.every or stream.steps_per_epoch,
        evaluate_steps=recipe.eval_every * stream.steps_per_epoch,
        late=device.type != "cpu",
    )


def _method(recipe: Recipe, task: Task, attack: Attack, signal: SignalToNoise | None, pool: Pool | None) -> Method:
    options = {
        "attack": attack,
        "delay": recipe.delay,
        "adv_weight": recipe.adv_weight,
        "twin_share": recipe.twin_share,
        "twin_branch": recipe.twin_branch,
        "shuffle_twins": recipe.shuffle_twins,
    }
    method: Method = METHODS[recipe.method].build(
        task.model,
        task.loss,
        options,
        chunk_size=recipe.chunk_size,
        seed=recipe.seed,
        autocast=task.autocast,
        batch=lambda chunk: Batch(*chunk),
        after_chunk=None if signal is None else signal.add,
        **({} if pool is None else {"twins": pool}),
    )
    return method


def _wire(recipe: Recipe, task: Task, attack: Attack) -> Wire:
    """Return the message format of twins: pixels as bytes where that is exact."""
    shape = (recipe.chunk_size, *task.augment.shape(task.data.train))
    as_bytes = attack.exact_as_bytes(from_images=METHODS[recipe.method].maker == Role.CLEAN)
    return Wire(shape, DTYPES[recipe.precision], as_bytes=as_bytes)


def _rate(recipe: Recipe, steps: int) -> Schedule:
    peak, schedule = recipe.optimizer.lr, recipe.schedule
    warmup = schedule.warmup_steps(steps, recipe.epochs)
    match schedule.decay:
        case "poly":
            return warmup_poly(peak, steps, warmup, schedule.power, schedule.end_lr)
        case "cosine":
            return warmup_cosine(peak, steps, warmup, schedule.end_lr)
        case "constant":
            return warmup_constant(peak, warmup)
