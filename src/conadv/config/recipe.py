"""A recipe: what a run is. The text under a field is what `conadv train --help` says about its flag.

The defaults are for photographs: the paper's, or those of the authors' code where the paper has none for small batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from conadv.core.catalog import ATTACKS, METHODS
from conadv.optim.catalog import OPTIMIZERS
from conadv.setting import (
    BelowOne,
    Count,
    NotNegative,
    NumberOrPercent,
    OneOf,
    Positive,
    PositiveShare,
    Share,
    Whole,
    normalise,
    show,
)
from conadv.sinks import SINKS


@dataclass(frozen=True, slots=True)
class Attack:
    """The adversary that makes the twin of an image. Sizes are fractions of the pixel range."""

    name: Annotated[str, OneOf(tuple(ATTACKS))] = "pgd"
    """The attack: projected gradient descent."""
    epsilon: Share = 4 / 255
    """Radius of the ball around an image, such as 4/255: four grey levels of 256. 0: twins without an adversary."""
    step_size: NotNegative | None = None
    """How far one step goes, in the unit of epsilon. none: epsilon."""
    steps: Count = 1
    """Gradient steps of the attack."""
    norm: Literal["linf", "l2"] = "linf"
    """The shape of the ball."""
    direction: Literal["sign", "unit", "raw", "noise"] | None = None
    """What a step follows: the gradient's sign, the gradient at length 1, the gradient as it is, or a random sign
    (the control without a gradient). none: sign for linf, unit for l2."""
    random_start: Share = 0.8
    """Probability that an attack starts at a random point of the ball instead of the image."""
    targeted: bool = False
    """Towards a random wrong label instead of away from the right one."""

    def __post_init__(self) -> None:
        normalise(self, "attack.")


@dataclass(frozen=True, slots=True)
class Optimizer:
    """What turns gradients into an update."""

    name: Annotated[str, OneOf(tuple(OPTIMIZERS))] = "lars"
    """LARS, SGD with momentum, AdamW, or LAMB."""
    lr: NotNegative = 10.0
    """Learning rate at its peak, after the warm-up."""
    momentum: BelowOne = 0.9
    """lars and sgd alone: share of the last update that is kept."""
    weight_decay: NotNegative = 5e-4
    """Pull of the weights towards 0; biases and BatchNorm parameters are left out."""
    trust_coefficient: Positive = 0.001
    """lars alone: length of an update relative to the length of the weights, at learning rate 1."""
    beta1: BelowOne = 0.9
    """adamw and lamb alone: share of the mean of the gradients that is kept in each step."""
    beta2: BelowOne = 0.999
    """adamw and lamb alone: share of the mean of the squared gradients that is kept in each step."""
    eps: Positive | None = None
    """adamw and lamb alone: added to the root of the mean square. none: 1e-8 for adamw, 1e-6 for lamb."""

    def __post_init__(self) -> None:
        normalise(self, "optimizer.")


@dataclass(frozen=True, slots=True)
class Schedule:
    """The learning rate over the run: a linear warm-up to its peak, then a decay until the last epoch."""

    warmup_epochs: NumberOrPercent = "5%"
    """Epochs of warm-up, of which a part is fine, or its share of the run in percent, such as 30%."""
    decay: Literal["poly", "cosine", "constant"] = "poly"
    """The shape of the way down."""
    power: Positive = 2.0
    """Exponent of the poly decay."""
    end_lr: NotNegative = 0.0
    """Learning rate at the end of the decay."""

    def __post_init__(self) -> None:
        normalise(self, "schedule.")

    def warmup_steps(self, steps: int, epochs: int) -> int:
        """The warm-up in steps, of a run of so many steps in so many epochs."""
        if isinstance(self.warmup_epochs, str):
            return round(steps * float(self.warmup_epochs.rstrip("%")) / 100)
        return round(self.warmup_epochs * (steps // epochs))


@dataclass(frozen=True, slots=True)
class Data:
    """The images to learn from and to be judged by."""

    name: Literal["digits", "synthetic"] | None = None
    """An embedded data set. none: the digits, or what lies at data.path."""
    path: str | None = None
    """Where your own data lies; what it is, is recognized by what is there."""
    train_size: Count | None = None
    """Training images to use. none: all."""
    image_size: Count | None = None
    """Height and width in pixels that images are brought to. none: 224 for the augmentations of photographs, else
    as they are stored (synthetic: 32)."""
    channels: Count = 3
    """Colours of an image: of synthetic data, and what encoded images are converted to (1 or 3)."""
    classes: Count = 10
    """Synthetic data alone: number of classes."""
    augment: Literal[
        "auto", "none", "crop", "crop-flip", "resized-crop", "autoaugment-cifar10", "autoaugment-imagenet",
        "randaugment", "randaugment-imagenet",
    ] = "auto"  # fmt: skip
    """What happens to a training image before it is seen. Small images: crop, crop-flip, autoaugment-cifar10 and
    randaugment; photographs: the others. auto: crop-flip for images below 64 pixels, else resized-crop (to 224, unless
    data.image_size says otherwise)."""
    mixup: NotNegative = 0.0
    """Mix the images of a chunk, and their labels, in shares from Beta(mixup, mixup). 0: off."""
    cutmix: NotNegative = 0.0
    """Paste a box of another image of the chunk into each, of an area from Beta(cutmix, cutmix). 0: off. With mixup on
    too, each chunk has one of the two."""
    views: Literal["one", "three"] = "one"
    """one: learn from augmented images and their twins. three: from clean, augmented and adversarial images, a third
    each, with a BatchNorm branch for each."""
    workers: Whole = 0
    """Threads that prepare images ahead of their use. 0: the training thread itself."""
    memory: Whole = 1024
    """MiB of decoded images that a rank keeps, so that each is decoded once. Images of more than that are decoded in
    every epoch. 0: keep none."""
    damaged: Literal["stop", "skip"] = "stop"
    """What to do about an image that cannot be read: end the run, or name it and go on without it."""

    def __post_init__(self) -> None:
        normalise(self, "data.")
        if self.name is not None and self.path is not None:
            raise ValueError(
                f"data.name {self.name} and data.path {show(self.path)} are two data sets: "
                "drop --data.name or --data.path"
            )
        if self.name is None and self.path is None:
            object.__setattr__(self, "name", "digits")
        if self.views == "three" and self.augment == "none":
            raise ValueError("data.views three needs an augmentation: choose one with --data.augment")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """When the state of a run is written to its folder. The end of a run always is."""

    every: Whole = 0
    """Steps from one checkpoint to the next. 0: at the end of each epoch."""
    minutes: NotNegative = 0.0
    """Minutes from one checkpoint to the next, beside those of checkpoint.every. 0: off."""
    keep: Count = 2
    """How many of the newest checkpoints stay."""

    def __post_init__(self) -> None:
        normalise(self, "checkpoint.")


@dataclass(frozen=True, slots=True)
class Recipe:
    """A run. What a recipe leaves out has its default, which is for photographs. Without a recipe: `digits`, or these
    defaults if --data.path names your own images."""

    method: Annotated[str, OneOf(tuple(METHODS))] = "conadv"
    """How a step is taken. disadv is conadv with delay 0."""
    delay: Whole = None  # type: ignore[assignment]  # only until __post_init__ asks the method
    """Age in steps of the weights that twins are made with: conadv takes any, 1 unless told, the others their own."""
    rho: Positive = 0.05
    """sam alone: how far the weights move uphill before the gradient is taken, in their L2 norm."""
    adv_weight: Share = 0.5
    """Share of the twins in the loss; the clean images have the rest."""
    twin_share: PositiveShare = 1.0
    """Share of a batch's chunks that get twins, such as 1/4, other ones in each step: a dial for the cost. recycled
    costs 1 + share of vanilla, conadv and disadv 1 + 5/3 share."""
    batch_size: Count = 256
    """Images a step, over all ranks."""
    chunk_size: Count = 64
    """Images that share BatchNorm statistics and are worked on at once; it divides the batch. The paper's is 64."""
    epochs: Count = 90
    """Passes over the training images."""
    max_steps: Count | None = None
    """Stop after this many steps; the schedule stays that of all epochs. none: go to the end."""
    seed: Whole = 0
    """Decides everything random: weights, order, augmentation, starts of attacks."""
    layout: str | None = None
    """Which ranks do what, such as "clean | adv | attack". none: everything on each rank."""
    model: str = "auto"
    """A network by its name, or your own as package.module:callable (as a flag only, never in a file). auto: resnet50
    for images of 64 pixels or more, resnet20 for smaller ones."""
    width: Count | None = None
    """Channels of the network's first stage. none: the network's own, 16 for small images and 64 for large ones."""
    precision: Literal["float32", "bfloat16", "float64"] = "float32"
    """Numbers of the forward and backward passes; with bfloat16 the weights stay float32."""
    label_smoothing: BelowOne = 0.1
    """Share of the label spread evenly over all classes."""
    ema: BelowOne = 0.0
    """Decay of an exponential moving average of the weights, which is evaluated and exported in their place. It reaches
    back over about 1 / (1 - ema) steps, so take one that leaves this well below the steps of the run. 0: none."""
    threads: Count | None = None
    """Threads of each rank. none: as PyTorch finds best."""
    timeout: Positive = 600.0
    """Seconds that a rank waits for an answer of the others before the run ends."""
    profile: Whole = 0
    """Steps to profile after the first few: one Chrome trace per rank in RUN/traces, which Perfetto, TensorBoard and
    conadv timeline read. 0: none."""
    eval_every: Whole = 0
    """Epochs from one evaluation to the next. 0: only at the end."""
    log: tuple[Annotated[str, OneOf(tuple(SINKS))], ...] | None = None
    """Where else to log metrics, separated by commas; metrics.jsonl is always written. tensorboard and wandb need
    pip install 'conadv[tensorboard]' or 'conadv[wandb]'; wandb is offline unless WANDB_MODE says otherwise."""
    nonfinite: Literal["stop", "skip"] = "stop"
    """What to do about a loss or gradient that is not a finite number: end the run, or leave the step out."""
    skip_limit: Count = 10
    """Steps that nonfinite skip may leave out before the run ends all the same."""
    attack: Attack = Attack()
    optimizer: Optimizer = Optimizer()
    schedule: Schedule = Schedule()
    data: Data = Data()
    checkpoint: Checkpoint = Checkpoint()

    def __post_init__(self) -> None:
        if self.delay is None:
            known = METHODS.get(str(self.method))
            object.__setattr__(self, "delay", known.default_delay if known else 0)
        normalise(self)
        if self.method == "conadv" and self.delay == 0:
            object.__setattr__(self, "method", "disadv")
        own_delay = METHODS[self.method].delay
        if own_delay is not None and self.delay != own_delay:
            raise ValueError(
                f"method {self.method} means delay {own_delay}, not {self.delay}: "
                "drop --delay, or choose --method conadv"
            )
        if self.batch_size % self.chunk_size:
            raise ValueError(
                f"a batch of {self.batch_size} images is not a whole number of chunks of {self.chunk_size}: "
                "change --batch-size or --chunk-size"
            )
        if self.data.train_size is not None and self.batch_size > self.data.train_size:
            raise ValueError(
                f"a batch of {self.batch_size} is larger than the {self.data.train_size} training images: "
                "lower --batch-size or raise --data.train-size"
            )
        if self.data.mixup or self.data.cutmix:
            self._check_mixing()
        warmup = self.schedule.warmup_epochs
        if not isinstance(warmup, str) and warmup > self.epochs:
            raise ValueError(
                f"a warm-up of {warmup:g} epochs is longer than the {self.epochs} of the run: "
                "lower --schedule.warmup-epochs, or give it as a share of the run such as 30%"
            )

    def _check_mixing(self) -> None:
        if self.chunk_size == 1:
            raise ValueError("data.mixup and data.cutmix mix the images of a chunk, and --chunk-size is 1: raise it")
        if self.attack.targeted:
            raise ValueError(
                "attack.targeted goes towards one wrong label, and mixed images have several right ones: "
                "drop --attack.targeted, or --data.mixup and --data.cutmix"
            )
