"""From a recipe to what a rank needs for a run: the task (network, data, loss), the method, the optimizer, the job."""

from __future__ import annotations

import os
import signal
from collections.abc import Generator
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import Optimizer

from conadv.catalog import METHODS, MethodInfo
from conadv.config import Recipe, attackers_of
from conadv.core.attack import Loss
from conadv.core.batch import Batch, Chunked
from conadv.core.branches import split_layers
from conadv.core.pgd import PGD
from conadv.core.seeds import untouched_randomness
from conadv.core.splitbn import split_batchnorm
from conadv.core.step import Method
from conadv.core.twins import as_share
from conadv.machine import usable_cores
from conadv.optim import build_optimizer
from conadv.optim.schedule import Schedule, build_schedule
from conadv.optim.signal import SignalToNoise
from conadv.ranks.layout import Layout, choose_layout
from conadv.ranks.mail import Wire
from conadv.ranks.member import Member
from conadv.ranks.world import World
from conadv.ray import Pool
from conadv.roles import Role
from conadv.task.augment import Augmentation, augmentation
from conadv.task.data import DataSet, Source, keep, open_data
from conadv.task.evaluate import TwinTest
from conadv.task.libraries import build_pretrained
from conadv.task.models import build_model, check_output, fastest_memory, normalization
from conadv.task.stream import Stream

# Images above this height and width, in pixels, are photographs: their network downsamples first.
_SMALL = 64
_BATCH = 256  # images, unless a recipe says otherwise
_LARGEST_CHUNK = 64  # images, as in the paper; a recipe may have more
_SMALLEST_CHUNK = 8  # images, of a batch of two or more such chunks; a recipe may have fewer
DTYPES = {"float32": torch.float32, "bfloat16": torch.float32, "float64": torch.float64}


@dataclass(frozen=True)
class Task:
    """A network, its data and its loss: everything that evaluation and export need."""

    recipe: Recipe
    """The recipe, with "auto" resolved."""
    model: nn.Module
    data: DataSet
    augment: Augmentation
    loss: Loss
    device: torch.device
    workers: int
    """Threads that prepare images."""
    held_out: Source | None
    """Training images that are not learnt from, whose robust accuracy is watched."""
    twins: TwinTest | None
    """How the run generates twins; None: it has none."""

    @property
    def autocast(self) -> torch.dtype | None:
        """The 16-bit dtype of forward passes, in evaluations too; None: the dtype of the weights."""
        return torch.bfloat16 if self.recipe.precision == "bfloat16" else None

    def precision(self) -> torch.autocast:
        """Compute in that dtype."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast is not None)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of an image as the network gets it."""
        return self.augment.shape(self.data.train)


@dataclass(frozen=True)
class Job:
    """The parts of a training run on one rank."""

    task: Task
    member: Member
    stream: Stream
    optimizer: Optimizer
    rate: Schedule
    """The learning rate of a step."""
    adv_weight: Schedule
    """The share of the twins in the loss of a step."""
    stop: int
    """The number of steps after which the run ends."""
    late: bool
    """Whether to read the outcome of a step one step late, so that the host does not wait for the device."""
    to_noise: SignalToNoise | None
    """Scales gradients by their signal-to-noise ratio; None: they are not."""
    pool: Pool | None
    """Attackers besides the ranks."""

    @property
    def method(self) -> Method:
        return self.member.method

    def begin_step(self, step: int) -> None:
        """Begin a step: its signal-to-noise ratio, and the weight of its twins."""
        if self.to_noise is not None:
            self.to_noise.begin()
        if self.task.twins is not None:
            self.method.adv_weight = self.adv_weight(step)  # type: ignore[attr-defined]  # methods with twins have it

    def feed(self, start: int) -> Generator[tuple[Chunked | None, Chunked | None]]:
        """Yield what each step of this rank takes, from step `start` on."""
        return self.member.feed(self.batches(start, self.stop), self.stop)

    def batches(self, start: int, stop: int) -> Generator[Chunked]:
        """Yield this rank's part of each batch, from step `start` to the one before `stop`."""
        place = self.member.place
        assert place.chunks is not None
        yield from self.stream.batches(start, stop, range(place.first_chunk, place.first_chunk + place.chunks))


def open_task_data(recipe: Recipe) -> DataSet:
    """Open the data of a recipe."""
    data = recipe.data
    return open_data(data.name, data.path, data.train_size, data.image_size, data.channels, data.damaged)


def resolved(recipe: Recipe, data: DataSet) -> Recipe:
    """Replace "auto" in a recipe by the network and the augmentation for the size of the images."""
    large = _photographs(recipe, data)
    model = recipe.model if recipe.model != "auto" else "resnet50" if large else "resnet20"
    augment = recipe.data.augment
    if augment == "auto":
        augment = "resized-crop" if large else "crop-flip"
    return replace(recipe, model=model, data=replace(recipe.data, augment=augment))


def _photographs(recipe: Recipe, data: DataSet) -> bool:
    """Whether the images are large, in which case reading them takes time too."""
    first = data.train.picture(0)
    return (recipe.data.image_size or min(first.height, first.width)) > _SMALL


def build_task(recipe: Recipe, device: torch.device, trains: bool = False, data: DataSet | None = None) -> Task:
    """Build the network, the data (unless it was opened before) and the loss.

    If it `trains`, check that a batch fits the data, and load weights to start from if the recipe says so.
    """
    if recipe.precision == "bfloat16" and device.type == "cpu":
        # Without AMX, whose first instruction ends the process on some virtual machines. Read by the first operator.
        os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
    if recipe.threads is not None:
        torch.set_num_threads(recipe.threads)
    data = data or open_task_data(recipe)
    recipe = resolved(recipe, data)
    workers = recipe.data.workers
    if workers is None:  # this rank's share of the cores for photographs
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # of this machine, from torchrun
        workers = max(1, len(usable_cores()) // ranks) if _photographs(recipe, data) else 0
    held_out = None
    if count := recipe.data.held_out:
        if count >= len(data.train):
            raise ValueError(f"data.held_out {count} leaves none of {len(data.train):,} training images: lower it")
        held_out, rest = data.train.split(count)
        data = replace(data, train=rest)
    if trains and recipe.batch_size > len(data.train):
        raise ValueError(
            f"batch_size {recipe.batch_size} does not fit {len(data.train)} training images: lower it, or hold out less"
        )
    augment = augmentation(recipe.data.augment, recipe.data.image_size, recipe.data.views == "three")
    data = keep(data, augment.fit, train=augment.looks_at_fit)
    with untouched_randomness(device, recipe.seed):
        model, notes = _model(recipe, data, augment, device, trains)
    return Task(
        recipe,
        model.to(device),
        replace(data, notes=(*data.notes, *notes)),
        augment,
        partial(F.cross_entropy, label_smoothing=recipe.label_smoothing),
        device,
        workers,
        held_out,
        twins_of(recipe),
    )


def _model(
    recipe: Recipe, data: DataSet, augment: Augmentation, device: torch.device, trains: bool
) -> tuple[nn.Module, list[str]]:
    """Build the network with its branches, in the memory format that is fastest for convolutions; notes about it."""
    classes, shape = len(data.train.classes), augment.shape(data.train)
    if recipe.data.channels not in (3, shape[0]):  # 3, the default, leaves arrays as they are
        raise ValueError(f"data.channels {recipe.data.channels}: these images have {shape[0]}, and keep them: drop it")
    pixels = normalization(recipe.model, shape[0], recipe.pretrained)
    build = partial(build_model, recipe.model, classes, shape[0], recipe.width, pixels.get("mean"), pixels.get("std"))
    model, notes = build(), list[str]()
    if recipe.pretrained and trains:  # otherwise a checkpoint has the weights
        model, note = build_pretrained(build, recipe.pretrained, classes)
        notes.append(note)
    check_output(model, shape, classes)
    main, *adv = METHODS[recipe.method].branches if recipe.twin_branch == "adv" else ("main",)
    branches = (main, *["aug"] * (recipe.data.views == "three"), *adv)
    layers = split_layers(model)
    if not layers:
        model = split_batchnorm(model, branches)
    elif layers[0].branches != branches:  # its author has split it, who may know of custom layers
        raise ValueError(
            f"the model was split into {layers[0].branches}, but this run needs {branches}: split it so, or not at all"
        )
    model.to(DTYPES[recipe.precision])
    return fastest_memory(model, device), notes


def network_facts(task: Task) -> dict[str, Any]:
    """Return what a prediction needs besides the weights."""
    return {
        "method": task.recipe.method,
        "model": task.recipe.model,
        "width": task.recipe.width,
        "classes": list(task.data.train.classes),
        "input": list(task.shape),
        "zoom": task.augment.fit.zoom,
        **normalization(task.recipe.model, task.shape[0], task.recipe.pretrained),
    }


def attack_of(recipe: Recipe) -> PGD:
    """Return the attack that generates the twins of a run."""
    return PGD(**asdict(recipe.attack), branch=recipe.twin_branch)


def twins_of(recipe: Recipe) -> TwinTest | None:
    """Return how a run generates twins; None: its method has none."""
    maker = METHODS[recipe.method].maker
    if maker is None:
        return None
    attack = attack_of(recipe)
    if maker == Role.CLEAN:  # one step from the image along the gradient of the clean pass
        attack = replace(attack, branch="main", random_start=0.0)
    return TwinTest(attack, recipe.twin_branch, recipe.chunk_size, recipe.shuffle_twins)


def method_of(recipe: Recipe) -> MethodInfo:
    """Return the method with the cost that its duties have in this run: with adv_weight 1 there is no clean pass."""
    method = METHODS[recipe.method]
    if Role.ATTACK not in method.passes:
        return method
    passes = {**method.passes, Role.ATTACK: recipe.attack.steps * method.passes[Role.ATTACK]}
    if recipe.adv_weight < 1:
        return replace(method, passes=passes)
    layouts = tuple(text for text in method.layouts if Role.CLEAN not in Layout.fit(text, method.duties).roles)
    return replace(method, passes={**passes, Role.CLEAN: 0}, layouts=layouts)


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
    if recipe.attackers is not None and len(layout.roles) > 1:
        raise ValueError(
            f"attackers and the roles of layout {str(layout)!r} exclude each other: drop --layout or --attackers"
        )
    if Role.ADV in layout.duties:
        layout.check(chunks, as_share(recipe.twin_share), recipe.shuffle_twins)
    else:
        layout.check(chunks)
    return layout


def with_sizes(recipe: Recipe, world_size: int, images: int | None = None) -> Recipe:
    """Choose the sizes that a recipe leaves open.

    A batch: 256 images, or about a tenth of the training images if that is less (None: there are enough). A chunk: the
    largest, up to 64 images, that fits batch and layout.
    """
    copies = recipe.data.copies
    if not recipe.batch_size:
        size = _BATCH if images is None else min(_BATCH, (images - recipe.data.held_out) * copies // 10)
        chunk = recipe.chunk_size or next(unit for unit in (64, 16, 8, 1) if unit * copies <= size or unit == 1)
        recipe = replace(recipe, batch_size=max(size // (chunk * copies), 1) * chunk * copies)
    if recipe.chunk_size:
        return recipe
    batch = recipe.batch_size
    sizes = range(min(_LARGEST_CHUNK, batch), 1, -1)
    chosen = replace(recipe, chunk_size=next((size for size in sizes if _fits(recipe, batch, size, world_size)), 1))
    check_fit(chosen, world_size)  # raises what is wrong with every chunk size
    if batch >= 2 * _SMALLEST_CHUNK > 2 * chosen.chunk_size:
        unit = _SMALLEST_CHUNK * next(count for count in range(1, batch + 1) if _fits(recipe, count, 1, world_size))
        raise ValueError(
            f"batch_size {batch} can only be cut into chunks of {chosen.chunk_size}, too few images for BatchNorm: "
            f"choose --batch-size {-(-batch // unit) * unit}, or give --chunk-size"
        )
    return chosen


def _fits(recipe: Recipe, batch_size: int, chunk_size: int, world_size: int) -> bool:
    try:
        check_fit(replace(recipe, batch_size=batch_size, chunk_size=chunk_size), world_size)
    except ValueError:
        return False
    return True


def _build_pool(recipe: Recipe, model: nn.Module, world: World) -> Pool:
    """Start attackers in the background, or on a cluster; every rank must call it."""
    count, address = attackers_of(recipe)
    kind = "GPU" if world.device.type == "cuda" else "CPU"
    make_model = partial(deepcopy, deepcopy(model).cpu())
    heard = signal.getsignal(signal.SIGTERM)
    try:
        pool = Pool(make_model, count or 0, {"num_gpus": 1} if kind == "GPU" else None, address)
    except (ImportError, ConnectionError) as error:
        raise ValueError(f"attackers {recipe.attackers}: {str(error).splitlines()[0]}") from None
    finally:
        signal.signal(signal.SIGTERM, heard)  # Ray has set its own, which ends the process at once
    if count is None:
        room = int(pool._ray.cluster_resources().get(kind, 1))
        pool.add(room // world.size + (world.rank < room % world.size))
    return pool


def build_job(task: Task, layout: Layout, world: World, start: int) -> Job:
    """Build everything that this rank needs for a run from step `start` on."""
    recipe, attack = task.recipe, attack_of(task.recipe)
    stream = Stream(
        task.data.train,
        recipe.batch_size,
        recipe.chunk_size,
        recipe.seed,
        task.augment,
        task.workers,
        pin_memory=task.device.type == "cuda",
        copies=recipe.data.copies,
    )
    steps, schedule = stream.steps_per_epoch * recipe.epochs, recipe.schedule
    warmup = schedule.warmup_steps(steps, recipe.epochs)
    stop = max(start, min(steps, recipe.max_steps or steps))
    with_twins = round(steps * recipe.adv_until) if task.twins is not None else 0
    to_noise = SignalToNoise(task.model.parameters(), recipe.optimizer.gsnr) if recipe.optimizer.gsnr else None
    pool = _build_pool(recipe, task.model, world) if recipe.attackers is not None and start < stop else None
    method = _method(task, attack, to_noise, pool)
    method._step.t = start
    wire = _wire(recipe, task, attack)
    return Job(
        task=task,
        member=Member(world, layout, task.model, method, chunks=stream.chunks_per_step, wire=wire),
        stream=stream,
        optimizer=build_optimizer(task.model, asdict(recipe.optimizer)),
        rate=build_schedule(schedule.decay, recipe.optimizer.lr, steps, warmup, schedule.power, schedule.end_lr),
        adv_weight=lambda step: recipe.adv_weight if step < with_twins else 0.0,
        stop=stop,
        late=task.device.type != "cpu",
        to_noise=to_noise,
        pool=pool,
    )


def _method(task: Task, attack: PGD, to_noise: SignalToNoise | None, pool: Pool | None) -> Method:
    recipe = task.recipe
    method: Method = METHODS[recipe.method].build(
        task.model,
        task.loss,
        asdict(recipe) | {"attack": attack},  # of which it takes its options
        chunk_size=recipe.chunk_size,
        seed=recipe.seed,
        autocast=task.autocast,
        batch=lambda chunk: Batch(*chunk),
        after_chunk=None if to_noise is None else to_noise.add,
        **({} if pool is None else {"twins": pool}),
    )
    return method


def _wire(recipe: Recipe, task: Task, attack: PGD) -> Wire:
    """Return the message format of twins: pixels as bytes where that is exact."""
    as_bytes = attack.exact_as_bytes(from_images=METHODS[recipe.method].maker == Role.CLEAN)
    return Wire((recipe.chunk_size, *task.shape), DTYPES[recipe.precision], as_bytes=as_bytes)
