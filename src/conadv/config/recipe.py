"""A recipe: what a run is. The text under a field is what `conadv train --help` says about its flag.

The defaults suit some hundred to some thousand photographs of your own; those of the method and the attack are the
paper's.
"""

from dataclasses import dataclass, fields, is_dataclass
from typing import Annotated, Any, Literal

from cyclopts import Group, Parameter

from conadv.catalog import METHODS
from conadv.optim import OPTIMIZERS, RATES
from conadv.roles import Role

from .fields import (
    BelowOne,
    Count,
    Epochs,
    NotNegative,
    OptionalText,
    Positive,
    PositiveShare,
    Precision,
    Share,
    Sinks,
    SwitchOrPath,
    Text,
    Whole,
    check_fraction,
    number,
    show,
    switch,
)


def _table(order: int, name: str, table: type) -> Parameter:
    """Where `--help` lists the fields of a table: after those of the recipe itself, in this order."""
    group = Group(f"Recipe: {name}", help=" ".join((table.__doc__ or "").split()), sort_key=1 + order)
    return Parameter(group=group, json_dict=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttackFields:
    """The attack that generates the twins: projected gradient descent. Sizes are fractions of the pixel range."""

    epsilon: NotNegative = 4 / 255
    """Radius of the ball around an image, such as 4/255: four of 255 grey levels. 0: twins equal the images."""
    step_size: Annotated[float | None, number(none=True, gte=0, lte=1e6)] = None
    """Size of one step, in the unit of epsilon. none: epsilon."""
    steps: Annotated[int, number(gte=1, lte=10**4)] = 1
    """Gradient steps of the attack."""
    norm: Literal["linf", "l2"] = "linf"
    """Norm of the ball."""
    direction: Literal["sign", "unit", "raw", "noise"] | None = None
    """Direction of a step: sign of the gradient, gradient at length 1 (unit), raw gradient, or random signs (noise, a
    control without gradient). none: sign for linf, unit for l2."""
    random_start: Share = 0.8
    """Probability of a random start in the ball; otherwise the attack starts at the image."""
    targeted: Annotated[bool, switch("attack.targeted")] = False
    """Attack towards a random wrong label instead of away from the true one."""
    statistics: Literal["batch", "running"] = "batch"
    """What BatchNorm normalizes with during the attack: the statistics of the chunk, or the running ones."""
    grid: Annotated[bool, switch("attack.grid")] = False
    """linf only: random starts in whole grey levels. Twins of one step of whole levels then cross between ranks as
    bytes, a quarter of the data."""

    def __post_init__(self) -> None:
        if self.norm == "linf":  # an L2 norm may be larger
            check_fraction("attack.epsilon", self.epsilon)
            if self.direction not in ("unit", "raw"):
                check_fraction("attack.step_size", self.step_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """The optimizer."""

    name: Annotated[str, Parameter(choices=tuple(OPTIMIZERS))] = "muon"
    """LARS, SGD with momentum, AdamW, LAMB, or Muon (which takes AdamW for biases and normalization layers)."""
    lr: Annotated[float, number(gt=0, lte=1e6), Parameter(show_default=False)] = None  # type: ignore[assignment]  # until __post_init__ asks the optimizer
    """Peak learning rate, reached after the warm-up. Without it: 0.02 for muon and lamb, 0.1 for sgd, 0.001 for adamw,
    10 for lars."""
    momentum: BelowOne = 0.9
    """lars, sgd and muon only: momentum."""
    weight_decay: NotNegative = 5e-4
    """Weight decay; not applied to biases and BatchNorm parameters."""
    gsnr: Share = 0.0
    """Multiply each gradient by its signal-to-noise ratio over the chunks, relative to the mean of its tensor and at
    least this, at most 1 (VR-SGD, VR-LARS). On one rank. Its authors take 0.1. 0: off."""

    def __post_init__(self) -> None:
        if self.lr is None:
            object.__setattr__(self, "lr", RATES[self.name])


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The learning rate over the run: a linear warm-up to its peak, then a decay until the last epoch."""

    warmup_epochs: Epochs = "5%"
    """Warm-up in epochs (fractions allowed), or as a share of the run in percent, such as 30%."""
    decay: Literal["poly", "cosine", "constant"] = "poly"
    """Decay of the learning rate after the warm-up."""
    power: Positive = 2.0
    """Exponent of the poly decay."""
    end_lr: NotNegative = 0.0
    """Learning rate at the end of the decay."""

    def warmup_steps(self, steps: int, epochs: int) -> int:
        """The warm-up in steps, of so many steps and epochs of the whole run."""
        if isinstance(self.warmup_epochs, str):
            return round(steps * float(self.warmup_epochs.rstrip("%")) / 100)
        return round(self.warmup_epochs * (steps // epochs))


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """The training and test images."""

    name: Literal["digits", "synthetic"] | None = None
    """A built-in data set. none: digits, or your own at data.path."""
    path: OptionalText = None
    """Path of your own data, whose format is detected; hf:NAME_OR_PATH for a data set of the Hugging Face hub or a
    folder of Parquet files; or package.module:callable for your own Dataset (as a flag only, never in a file)."""
    train_size: Annotated[int | None, number(none=True, gte=1, lte=10**12)] = None
    """Training images to use. none: all."""
    copies: Annotated[int, number(gte=1, lte=64)] = 1
    """How often each image is in a batch and an epoch, augmented differently each time (Batch Augmentation); copies
    are in different chunks, and batch_size counts them all."""
    held_out: Whole = 0
    """Training images, of train_size, not to learn from: the accuracy on them as they are (held_out_top1) and under
    PGD (held_out_robust_top1) is part of each evaluation, and decides which weights are the best ones. 0: none."""
    image_size: Annotated[int | None, number(none=True, gte=1, lte=8192)] = None
    """Height and width in pixels to resize to. none: 224 for the augmentations of photographs, else
    as they are stored (synthetic: 32)."""
    channels: Annotated[int, number(gte=1, lte=10**4)] = 3
    """Colour channels: of synthetic data, and what encoded images are converted to (1 or 3). Arrays keep theirs."""
    augment: Literal[
        "auto", "none", "crop", "crop-flip", "resized-crop", "autoaugment-cifar10", "autoaugment-imagenet"
    ] = "auto"  # fmt: skip
    """Augmentation of the training images. Small images: crop, crop-flip and autoaugment-cifar10; photographs: the
    others. auto: crop-flip for images up to 64 pixels, else resized-crop (to 224, unless data.image_size says
    otherwise)."""
    views: Literal["one", "three"] = "one"
    """one: learn from augmented images and their twins. three: from clean, augmented and adversarial images, a third
    each, with a BatchNorm branch for each."""
    workers: Annotated[int | None, number(none=True, gte=0, lte=1024)] = None
    """Threads that load images in advance. 0: the training thread itself. none: a rank's share of the cores for
    photographs, 0 for images up to 64 pixels."""
    damaged: Literal["stop", "skip"] = "stop"
    """What to do about an image that cannot be read: end the run, or report it and leave it out."""

    def __post_init__(self) -> None:
        if self.name is not None and self.path is not None:
            raise ValueError(
                f"data.name {self.name} and data.path {show(self.path)} are two data sets: "
                "drop --data.name or --data.path"
            )
        if self.name is None and self.path is None:
            object.__setattr__(self, "name", "digits")
        if self.views == "three" and self.augment == "none":
            raise ValueError("data.views three needs an augmentation: choose one with --data.augment")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFields:
    """When to save checkpoints. One is always saved at the end of a run."""

    every: Whole = 0
    """Steps between checkpoints. 0: at the end of each epoch."""
    keep: Count = 2
    """Number of checkpoints to keep."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A run. Fields that a recipe leaves out have these defaults, which suit photographs. Without a recipe: `digits`,
    or these defaults if --data.path is given."""

    method: Annotated[str, Parameter(choices=tuple(METHODS))] = "conadv"
    """The training method. disadv is conadv with delay 0."""
    delay: Annotated[int, number(gte=0, lte=1000), Parameter(show_default=False)] = None  # type: ignore[assignment]  # until __post_init__ asks the method
    """Age in steps of the weights that generate the twins. Only conadv (default 1) can change it."""
    adv_weight: Share = 0.5
    """Weight of the adversarial loss; the clean loss has the rest. 1: robust training, without a clean pass; it needs
    twin_branch main."""
    twin_share: PositiveShare = 1.0
    """Share of a batch's chunks that get twins, such as 1/4, different ones in each step. Relative to vanilla, a step
    of recycled costs 1 + share, one of conadv or disadv 1 + 5/3 share."""
    twin_branch: Literal["adv", "main"] = "adv"
    """BatchNorm branch that twins go through: adv, with its own statistics and affine parameters (as in the paper), or
    main, with the affine parameters of the images and statistics of the twins' own batch."""
    shuffle_twins: Count = 1
    """Twins of this many consecutive chunks are shuffled among each other before they are learnt: other images than in
    the attack then share their BatchNorm statistics. 1: not shuffled."""
    adv_until: PositiveShare = 1.0
    """Share of the run that learns from twins, such as 1/2. In the rest they have weight 0, and cost the same time."""
    scale_norms: Annotated[bool, switch("scale-norms")] = False
    """Divide the gradients of BatchNorm's weight and bias by the share of their branch in the loss, so that they learn
    as fast as in vanilla. With sgd or lars."""
    batch_size: Whole = 0
    """Images per step, over all ranks. 0: 256, or in one process a tenth of fewer than 2,560 training images, rounded
    down to a multiple of 64, 16 or 8."""
    chunk_size: Whole = 0
    """Images that share BatchNorm statistics and are processed together; must divide the batch size. Paper: 64. 0: the
    largest divisor, from 8 to 64, of a lane's part of the batch that its ranks can share."""
    epochs: Annotated[int, number(gte=1, lte=10**6)] = 90
    """Passes over the training images."""
    max_steps: Annotated[int | None, number(none=True, gte=1, lte=10**12)] = None
    """Stop after this many steps; the schedule is still that of all epochs. none: no limit."""
    seed: Annotated[int, number(gte=0, lt=2**63)] = 0
    """Seed of everything random: weights, order, augmentation, random starts of attacks."""
    layout: OptionalText = None
    """Which ranks of a lane do what, such as "clean | adv | attack" or, with counts, "3 clean | 3 adv | 2 attack".
    auto: the fastest layout that fits the number of ranks. none: everything on each rank."""
    attackers: OptionalText = None
    """Attackers on Ray, besides the ranks of the layout, that generate twins ahead: how many to start on this machine,
    or the address of a cluster, such as HEAD:6379 (one for each of its CPUs or GPUs) or 8@HEAD:6379. They may come and
    go without changing results. none: none."""
    model: Text = "auto"
    """A network by its name, timm:NAME or torchvision:NAME, or your own as package.module:callable
    (as a flag only, never in a file). auto: resnet20 for images up to 64 pixels, resnet50 for larger ones."""
    pretrained: Annotated[bool | str, SwitchOrPath] = False
    """Start from trained weights: those of the library for timm:NAME and torchvision:NAME, which it downloads, or those
    of a safetensors file, such as one that conadv export wrote. The last layer is new for other classes."""
    width: Annotated[int | None, number(none=True, gte=1, lte=10**4)] = None
    """Channels of a built-in network's first stage. none: its own, 16 for small images (those named -half: 32)
    and 64 for large ones."""
    precision: Annotated[Literal["float32", "bfloat16", "float64"], Precision] = "float32"
    """Number format of the forward and backward passes; with bfloat16 the weights stay float32."""
    deterministic: Annotated[bool, switch("deterministic")] = False
    """Use only deterministic kernels, and no TF32 (float32 products with 10 bits of mantissa), which is slower on GPUs.
    CPU runs are deterministic without it."""
    label_smoothing: BelowOne = 0.1
    """Label smoothing: share of the label spread evenly over all classes."""
    clip_norm: NotNegative = 0.0
    """Largest L2 norm of the gradient of all weights, after the sum over the ranks; a larger one is scaled down. 0: no
    limit."""
    threads: Annotated[int | None, number(none=True, gte=1, lte=1024)] = None
    """CPU threads per rank. none: PyTorch's default."""
    timeout: Annotated[float, number(gte=0.1, lte=10**7)] = 600.0
    """Seconds without an answer from another rank after which the run ends."""
    profile: Annotated[int, number(gte=0, lte=1000)] = 0
    """Steps to profile after the first few: one Chrome trace per rank in RUN/traces, which Perfetto, TensorBoard and
    conadv timeline read. 0: none."""
    eval_every: Whole = 0
    """Epochs between evaluations, whose accuracy is printed and logged; the weights of the best one are kept in
    RUN/best.safetensors. 0: only at the end."""
    eval_robust: Whole = 0
    """Test images, a fixed sample, whose accuracy under PGD within attack.epsilon (20 steps, 2 random starts) is
    robust_top1 at the end of the run. 0: none."""
    log: Annotated[tuple[str, ...], Sinks] = ()
    """Where else to log metrics, separated by commas; metrics.jsonl is always written. tensorboard and wandb need
    pip install 'conadv[tensorboard]' or 'conadv[wandb]'; wandb is offline unless WANDB_MODE says otherwise."""
    attack: Annotated[AttackFields, _table(1, "attack", AttackFields)] = AttackFields()
    optimizer: Annotated[Optimizer, _table(2, "optimizer", Optimizer)] = Optimizer()
    schedule: Annotated[Schedule, _table(3, "schedule", Schedule)] = Schedule()
    data: Annotated[Data, _table(4, "data", Data)] = Data()
    checkpoint: Annotated[CheckpointFields, _table(5, "checkpoint", CheckpointFields)] = CheckpointFields()

    def __post_init__(self) -> None:
        if self.delay is None:
            known = METHODS.get(str(self.method))
            object.__setattr__(self, "delay", known.default_delay if known else 0)
        if self.method == "conadv" and self.delay == 0:
            object.__setattr__(self, "method", "disadv")
        own_delay = METHODS[self.method].delay
        if own_delay is not None and self.delay != own_delay:
            raise ValueError(
                f"method {self.method} means delay {own_delay}, not {self.delay}: "
                "drop --delay, or choose --method conadv"
            )
        if self.chunk_size and self.batch_size % self.chunk_size:
            raise ValueError(
                f"a batch of {self.batch_size} images is not a whole number of chunks of {self.chunk_size}: "
                "change --batch-size or --chunk-size"
            )
        if self.chunk_size and self.batch_size // self.chunk_size % self.data.copies:
            raise ValueError(
                f"{self.batch_size // self.chunk_size} chunks per batch cannot hold {self.data.copies} copies of each "
                "image: change --batch-size, --chunk-size or --data.copies"
            )
        only_twins = self.adv_weight == 1 and METHODS[self.method].maker == Role.ATTACK  # recycled says that it cannot
        if only_twins and self.adv_until != 1:
            raise ValueError("adv_weight 1 learns from twins only, and adv_until ends that: drop one of them")
        if only_twins and (self.twin_branch != "main" or self.twin_share != 1):
            raise ValueError(
                "adv_weight 1 learns from twins only, so that all images need one, through the branch that is "
                "evaluated: add --twin-branch main, and drop --twin-share"
            )
        if self.scale_norms and self.optimizer.name not in ("sgd", "lars"):
            raise ValueError(
                f"optimizer {self.optimizer.name} divides the gradients of BatchNorm's parameters by their size, so "
                "that scale_norms changes nothing: drop it, or choose --optimizer.name sgd or lars"
            )
        if self.attackers is not None:
            attackers_of(self)
            if METHODS[self.method].maker != Role.ATTACK or not self.delay:
                raise ValueError(
                    "attackers generate twins ahead, which only conadv with a delay of 1 or more has: drop --attackers"
                )
        peak, end = self.optimizer.lr, self.schedule.end_lr
        if self.schedule.decay != "constant" and end > peak:
            raise ValueError(f"schedule.end_lr {end:g} is above optimizer.lr {peak:g}: lower it")
        if str(self.pretrained).endswith((".pt", ".pth", ".bin")):
            raise ValueError(
                f"pretrained {self.pretrained} may be a pickle, which is not read: save it as safetensors, with "
                "safetensors.torch.save_file(model.state_dict(), 'weights.safetensors')"
            )
        warmup = self.schedule.warmup_epochs
        if not isinstance(warmup, str) and warmup > self.epochs:
            raise ValueError(
                f"a warm-up of {warmup:g} epochs is longer than the {self.epochs} of the run: "
                "lower --schedule.warmup-epochs, or give it as a share of the run such as 30%"
            )


def attackers_of(recipe: Recipe) -> tuple[int | None, str | None]:
    """How many attackers (None: as many as the cluster has room for), and the address (None: this machine)."""
    text = recipe.attackers or "0"
    if text.isdecimal():
        return int(text), None
    count, at, address = text.rpartition("@")
    if (at and not count.isdecimal()) or not (":" in address or address == "auto"):
        raise ValueError(
            f"attackers {text!r}: give a number, or a Ray cluster such as HEAD:6379 or, with a number, 8@HEAD:6379"
        )
    return int(count) if at else None, address


def flatten(recipe: Recipe) -> dict[str, Any]:
    """The values of a recipe by their dotted keys, in the order of its fields."""
    values: dict[str, Any] = {}
    for field in fields(recipe):
        value = getattr(recipe, field.name)
        if is_dataclass(value):
            values |= {f"{field.name}.{inner.name}": getattr(value, inner.name) for inner in fields(value)}
        else:
            values[field.name] = value
    return values


def flag(key: str) -> str:
    """The flag of a field: --batch-size for batch_size."""
    return "--" + key.replace("_", "-")
