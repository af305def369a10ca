"""From a recipe to the parts of a run: the only place, besides the command line, that knows recipes."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import repeat
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from conadv.config import Recipe
from conadv.core.attack import Attack, Loss
from conadv.core.batch import Batch, Chunked
from conadv.core.branches import split_layers
from conadv.core.catalog import ATTACKS, METHODS, is_built_in
from conadv.core.handoff import Handoff
from conadv.core.methods import Method
from conadv.core.roles import Place, Role
from conadv.core.seeds import untouched_randomness
from conadv.core.share import TwinShare
from conadv.core.splitbn import split_batchnorm
from conadv.core.stale import StaleWeights
from conadv.optim.catalog import OPTIMIZERS
from conadv.optim.schedule import Schedule, warmup_constant, warmup_cosine, warmup_poly
from conadv.parallel.choose import choose_layout
from conadv.parallel.collectives import World
from conadv.parallel.layout import Layout
from conadv.parallel.member import Member, build_member
from conadv.parallel.wire import Wire
from conadv.task.augment import Augmentation, augmentation
from conadv.task.augment.mixup import Mix
from conadv.task.data import DataSet, Share, Stream, keep, open_data
from conadv.task.models import build_model, check_output, fastest_memory

from .compiling import compile_model
from .ema import Ema
from .memory import check_copies, check_model

# The usual figures for colour photographs; pictures of other kinds stay in [0, 1].
_PHOTOGRAPHS = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
# Height and width in pixels from which on images are photographs, for which networks begin by shrinking them.
_LARGE = 64
_BYTES = {"bfloat16": 2, "float32": 4, "float64": 8}
_DTYPES = {"float32": torch.float32, "bfloat16": torch.float32, "float64": torch.float64}


@dataclass(frozen=True)
class Policy:
    """When to save and evaluate, and what to do about numbers that are not finite."""

    save_steps: int
    save_seconds: float
    """0: not by time."""
    evaluate_steps: int
    """0: only at the end."""
    diagnose_steps: int
    """0: never."""
    nonfinite: Literal["stop", "skip"]
    skip_limit: int
    late: bool = False
    """Whether the outcome of a step is read one step late, so that the host does not wait for the device."""


@dataclass(frozen=True)
class Task:
    """What is trained, and on what: as much as evaluation and export need."""

    model: nn.Module
    data: DataSet
    augment: Augmentation
    loss: Loss
    device: torch.device
    workers: int
    """Threads that prepare images."""
    autocast: torch.dtype | None = None
    """The 16-bit type that passes compute in, also those of an evaluation; None: that of the weights."""
    train_sample: int | None = None
    """How many training images an evaluation takes; None: all."""


@dataclass(frozen=True)
class Job:
    """The parts of a training run on one rank."""

    task: Task
    member: Member
    stream: Stream
    optimizer: Optimizer
    rate: Schedule
    ema: Ema
    adv_weight: float
    stop: int
    """The step before which the run ends."""

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

    def batches(self, start: int, stop: int | None = None) -> Generator[Chunked | None]:
        """This rank's share of the batches of some steps; a rank that only learns from twins needs none."""
        stop = self.stop if stop is None else stop
        if self.place.role & (Role.CLEAN | Role.ATTACK):
            assert self.place.chunks is not None
            chunks = range(self.place.first_chunk, self.place.first_chunk + self.place.chunks)
            yield from self.stream.batches(start, stop, chunks)
        else:
            yield from repeat(None, stop - start)


def build_task(recipe: Recipe, device: torch.device, trains: bool = False, data: DataSet | None = None) -> Task:
    """The network, the data and the loss.

    Args:
        recipe: What to train or evaluate.
        device: Where the network is.
        trains: Check that what training keeps of a chunk fits into memory, too, and compile the network if asked to.
        data: The data, if it is open already.
    """
    if recipe.threads is not None:
        torch.set_num_threads(recipe.threads)
    data = data or open_task_data(recipe)
    recipe = resolved(recipe, data)
    augment = augmentation(recipe.data.augment, recipe.data.image_size, recipe.data.views == "three")
    data = keep(data, augment.fit, recipe.data.memory, train=augment.looks_at_fit)
    with untouched_randomness(device, recipe.seed):
        images = recipe.chunk_size if trains and device.type == "cpu" else 2
        model = _model(recipe, data, augment, images, device)
    model.to(device)
    if recipe.compile and trains:
        compile_model(model)
    loss = partial(_cross_entropy if _mix(recipe) else F.cross_entropy, label_smoothing=recipe.label_smoothing)
    return Task(
        model,
        data,
        augment,
        loss,
        device,
        recipe.data.workers,
        torch.bfloat16 if recipe.precision == "bfloat16" else None,
        len(data.test) if recipe.eval_train == "sample" else None,
    )


def _mix(recipe: Recipe) -> Mix | None:
    data = recipe.data
    return Mix(data.mixup, data.cutmix) if data.mixup or data.cutmix else None


def _cross_entropy(outputs: Tensor, labels: Tensor, label_smoothing: float) -> Tensor:
    """Also of labels that are shares of the classes, whose type must be that of the outputs."""
    if labels.is_floating_point():
        dtype = torch.promote_types(outputs.dtype, labels.dtype)
        outputs, labels = outputs.to(dtype), labels.to(dtype)
    return F.cross_entropy(outputs, labels, label_smoothing=label_smoothing)


def resolved(recipe: Recipe, data: DataSet) -> Recipe:
    """The recipe with the network and the augmentation that it leaves to the size of the images."""
    first = data.train.picture(0)
    large = (recipe.data.image_size or min(first.height, first.width)) >= _LARGE
    model = recipe.model if recipe.model != "auto" else "resnet50" if large else "resnet20"
    augment = recipe.data.augment
    if augment == "auto":
        augment = "resized-crop" if large else "crop-flip"
    return replace(recipe, model=model, data=replace(recipe.data, augment=augment))


def check_fit(recipe: Recipe, world_size: int) -> Layout:
    """The layout of a run, or what is wrong with it: arithmetic alone, before any process has joined the others."""
    method, chunks = METHODS[recipe.method], recipe.batch_size // recipe.chunk_size
    if recipe.layout == "auto":
        layout = choose_layout(method, recipe.delay, world_size, chunks)
    else:
        layout = Layout.fit(recipe.layout, method.duties, world_size)
    share = TwinShare.from_number(recipe.twin_share)
    layout.check_twins(chunks, share.of if Role.ADV in layout.duties else 1)
    return layout


def build_stream(recipe: Recipe, task: Task) -> Stream:
    return Stream(
        task.data.train,
        recipe.batch_size,
        recipe.chunk_size,
        recipe.seed,
        task.augment,
        task.workers,
        pin_memory=task.device.type == "cuda",
        mix=_mix(recipe),
    )


def build_job(recipe: Recipe, task: Task, stream: Stream, layout: Layout, world: World, start: int) -> Job:
    """Everything that a run from step `start` on needs, on this rank."""
    steps = stream.steps_per_epoch * recipe.epochs
    stop = max(start, min(steps, recipe.max_steps or steps))
    attack = _attack(recipe)
    check_copies(task.model, 2 + recipe.delay * world.is_main + (recipe.ema > 0))  # gradients, momentum, stale weights
    member = build_member(
        world,
        layout,
        task.model,
        partial(_method, recipe, task, attack),
        chunks=stream.chunks_per_step,
        delay=recipe.delay,
        seed=recipe.seed,
        twin_share=recipe.twin_share,
        wire=_wire(recipe, task, attack),
        keeps_stale=world.is_main or recipe.diagnose > 0,
    )
    if member.handoff is not None:
        member.handoff.announce(start, stop)
    return Job(
        task=task,
        member=member,
        stream=stream,
        optimizer=build_optimizer(recipe, task.model),
        rate=_rate(recipe, steps),
        ema=Ema(task.model, recipe.ema),
        adv_weight=recipe.adv_weight if Role.ADV in layout.duties else 0.0,
        stop=stop,
    )


def build_optimizer(recipe: Recipe, model: nn.Module) -> Optimizer:
    optimizer: Optimizer = OPTIMIZERS[recipe.optimizer.name].build(model, asdict(recipe.optimizer))
    return optimizer


def build_policy(recipe: Recipe, stream: Stream, device: torch.device) -> Policy:
    return Policy(
        save_steps=recipe.checkpoint.every or stream.steps_per_epoch,
        save_seconds=60 * recipe.checkpoint.minutes,
        evaluate_steps=recipe.eval_every * stream.steps_per_epoch,
        diagnose_steps=recipe.diagnose,
        nonfinite=recipe.nonfinite,
        skip_limit=recipe.skip_limit,
        late=device.type != "cpu",
    )


def open_task_data(recipe: Recipe, share: Share | None = None) -> DataSet:
    """The data of a recipe; `share` lets one process list the files for all."""
    data = recipe.data
    return open_data(
        data.name or "path",
        path=data.path,
        train_size=data.train_size,
        image_size=data.image_size,
        channels=data.channels,
        classes=data.classes,
        damaged=data.damaged,
        share=share,
    )


def _model(recipe: Recipe, data: DataSet, augment: Augmentation, images: int, device: torch.device) -> nn.Module:
    """The network with its branches, in the layout of memory that is fastest for convolutions."""
    classes, shape = len(data.train.classes), augment.shape(data.train)
    figures = _PHOTOGRAPHS if shape[0] == 3 else {}
    build = partial(build_model, recipe.model, classes, shape[0], recipe.width, **figures)
    if is_built_in(recipe.model):
        check_model(build, shape, images, _BYTES[recipe.precision])
    model = build()
    check_output(model, shape, classes)
    main, *adv = METHODS[recipe.method].branches
    views = (main, "aug") if recipe.data.views == "three" else (main,)
    model = _with_branches(model, (*views, *adv))
    model.to(_DTYPES[recipe.precision])
    return fastest_memory(model, device)


def _with_branches(model: nn.Module, branches: tuple[str, ...]) -> nn.Module:
    """Split a model, unless its author did: they know layers of other classes that track statistics."""
    layers = split_layers(model)
    if not layers:
        return split_batchnorm(model, branches)
    if layers[0].branches != branches:
        raise ValueError(
            f"the model was split into {layers[0].branches}, but this run needs {branches}: split it so, or not at all"
        )
    return model


def _attack(recipe: Recipe) -> Attack:
    attack: Attack = ATTACKS[recipe.attack.name].build(asdict(recipe.attack))
    return attack


def _method(
    recipe: Recipe, task: Task, attack: Attack, place: Place, handoff: Handoff | None, stale: StaleWeights | None
) -> Method:
    options = {
        "attack": attack,
        "delay": recipe.delay,
        "adv_weight": recipe.adv_weight,
        "twin_share": recipe.twin_share,
        "rho": recipe.rho,
        "handoff": handoff,
        "stale_weights": None if stale is None else stale.swapped_in,
    }
    method: Method = METHODS[recipe.method].build(
        task.model,
        task.loss,
        options,
        chunk_size=recipe.chunk_size,
        seed=recipe.seed,
        autocast=task.autocast,
        batch=lambda chunk: Batch(*chunk),
        place=place,
    )
    return method


def _wire(recipe: Recipe, task: Task, attack: Attack) -> Wire:
    """Twins cross as bytes where that loses nothing."""
    as_bytes = attack.exact_as_bytes(from_images=METHODS[recipe.method].maker == Role.CLEAN) and not _mix(recipe)
    shape, dtype = task.augment.shape(task.data.train), _DTYPES[recipe.precision]
    if not _mix(recipe):
        return Wire(recipe.chunk_size, shape, dtype, as_bytes)
    classes = (len(task.data.train.classes),)
    return Wire(recipe.chunk_size, shape, dtype, as_bytes, label_shape=classes, label_dtype=torch.float32)


def _rate(recipe: Recipe, steps: int) -> Schedule:
    peak, schedule = recipe.optimizer.lr, recipe.schedule
    warmup = schedule.warmup_steps(steps, recipe.epochs)
    makers: dict[str, Callable[[], Schedule]] = {
        "poly": lambda: warmup_poly(peak, steps, warmup, schedule.power, schedule.end_lr),
        "cosine": lambda: warmup_cosine(peak, steps, warmup, schedule.end_lr),
        "constant": lambda: warmup_constant(peak, warmup),
    }
    return makers[schedule.decay]()
