"""PGD: from images to adversarial versions of them, inside a ball and the pixel range, without a trace.

start (the image, or noise around it) ──► step along the gradient ──► project ──► ... ──► twin
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from .branches import split_layers
from .seeds import untouched_randomness
from .splitbn import Statistics, routed
from .wrappers import unwrap

# (outputs, labels) -> the mean over the images, as PyTorch's losses are by default.
Loss = Callable[[Tensor, Tensor], Tensor]
Norm = Literal["linf", "l2"]
Direction = Literal["sign", "unit", "raw", "noise"]


@dataclass(frozen=True)
class PGD:
    """Projected gradient descent on the input. Sizes are fractions of the pixel range: `epsilon=4/255`."""

    epsilon: float
    """The radius of the ball."""
    step_size: float | None = None
    """How far a step goes; None: epsilon."""
    steps: int = 1
    norm: Norm = "linf"
    direction: Direction | None = None
    """sign, unit (divided by its L2 norm) or raw gradient, or noise: a random sign, the control without a gradient.
    None: the steepest for the ball, which is sign for linf and unit for l2."""
    random_start: float = 0.8
    """The probability, for each image, to start from a random point of the ball instead of the image."""
    targeted: bool = False
    """Towards a random wrong label instead of away from the right one."""
    mean: Sequence[float] | None = None
    """With std: the images are normalized, channel by channel, by these figures. None: they lie in [0, 1]."""
    std: Sequence[float] | None = None
    branch: str = "adv"
    """The branch of split BatchNorm layers that the attack goes through. To judge a model rather than to train it,
    attack what is evaluated: main, with running statistics."""
    statistics: Statistics = "batch"
    """What BatchNorm normalizes with: the statistics of the batch, or the running ones. Neither is tracked."""

    def __post_init__(self) -> None:
        if not 0 <= self.epsilon <= 1:
            raise ValueError(f"epsilon {self.epsilon}: a fraction of the pixel range, from 0 to 1, such as 4/255")
        if self.step_size is not None and not (self.step_size >= 0 and math.isfinite(self.step_size)):
            raise ValueError(f"step_size {self.step_size}: a fraction of the pixel range, such as 1/255")
        if self.steps < 1:
            raise ValueError(f"steps {self.steps}: take at least 1")
        if not 0 <= self.random_start <= 1:
            raise ValueError(f"random_start {self.random_start}: a probability, from 0 to 1")
        if self.norm not in ("linf", "l2"):
            raise ValueError(f"norm {self.norm!r}: linf or l2")
        if self.direction not in (None, "sign", "unit", "raw", "noise"):
            raise ValueError(f"direction {self.direction!r}: sign, unit, raw or noise")
        if self.statistics not in ("batch", "running"):
            raise ValueError(f"statistics {self.statistics!r}: batch or running")
        if (self.mean is None) != (self.std is None):
            raise ValueError("mean and std go together: give both or neither")
        if self.std is not None and min(self.std) <= 0:
            raise ValueError(f"std {tuple(self.std)}: positive numbers")

    def __call__(
        self,
        model: nn.Module,
        loss: Loss,
        images: Tensor,
        labels: Tensor,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """The twins of images (N, C, ...). Randomness comes from `generator` alone, on the CPU; None: seed 0."""
        if not images.is_floating_point():
            raise ValueError(f"images of {images.dtype}: scale bytes to the pixel range first, images.float() / 255")
        if self.targeted and labels.is_floating_point():
            raise ValueError("targeted needs whole labels: a mixture of them has no wrong label to go towards")
        generator = generator or torch.Generator().manual_seed(0)
        images = images.detach()
        twins = self._start(images, generator)
        towards = _uniform(labels.shape, generator, images) if self.targeted else None
        for _ in range(self.steps):
            if self.direction == "noise":
                gradient = self.noise(images, generator)
            else:
                seed = torch.randint(2**63 - 1, (), generator=generator, device=generator.device)
                gradient = self._gradient(model, loss, twins, labels, towards, int(seed))
            twins = self.step(images, twins, gradient)
        return twins

    def check_range(self, images: Tensor) -> None:
        """Refuse images that can be no pixels: around them the ball would have another size than epsilon says."""
        pixels = images * self._channels(self.std, 1.0, images) + self._channels(self.mean, 0.0, images)
        low, high = (float(value) for value in pixels.aminmax())
        if low < -0.25 or high > 1.25:  # resampling may overshoot a little
            raise ValueError(
                f"images from {low:.3g} to {high:.3g}: scale them to [0, 1], "
                "or tell the attack the mean and std that they were normalized with"
            )

    def noise(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """Random signs in place of the gradient's."""
        return torch.where(_uniform(images.shape, generator, images) < 0.5, -1.0, 1.0).to(images)

    def step(self, images: Tensor, twins: Tensor, gradient: Tensor) -> Tensor:
        """One step from `twins` along the gradient of the loss summed over images, back into the ball and range."""
        std = self._channels(self.std, 1.0, images)
        size = self.epsilon if self.step_size is None else self.step_size
        # The gradient in pixel units is divided by std, and a step in pixel units again on its way to the images.
        return self._project(images, twins + size * self._along(gradient / std) / std)

    def _gradient(
        self, model: nn.Module, loss: Loss, images: Tensor, labels: Tensor, towards: Tensor | None, seed: int
    ) -> Tensor:
        """The gradient by the images alone."""
        model = unwrap(model)

        def total(images: Tensor) -> Tensor:
            outputs = model(images)
            wrong = labels
            if towards is not None:  # a fraction of the way round the other labels
                classes = outputs.shape[1]
                wrong = (labels + 1 + (towards * (classes - 1)).long()) % classes
            value = loss(outputs, wrong) * len(images)
            return -value if self.targeted else value

        return input_gradient(model, total, images, partial(without_trace, model, self.branch, self.statistics, seed))

    def _along(self, gradient: Tensor) -> Tensor:
        direction = self.direction or ("sign" if self.norm == "linf" else "unit")
        if direction == "unit":
            return gradient / _norms(gradient).clamp_min(torch.finfo(gradient.dtype).tiny)
        return gradient if direction == "raw" else gradient.sign()

    def _start(self, images: Tensor, generator: torch.Generator) -> Tensor:
        if self.random_start == 0 or self.epsilon == 0:
            return images
        if self.norm == "linf":
            noise = self.epsilon * (2 * _uniform(images.shape, generator, images) - 1)
        else:
            noise = self._random_in_l2_ball(images, generator)
        moved = _uniform((len(images), *[1] * (images.dim() - 1)), generator, images) < self.random_start
        std = self._channels(self.std, 1.0, images)
        return self._project(images, torch.where(moved, images + noise / std, images))

    def _random_in_l2_ball(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """Uniform in the ball: a direction from normal noise, a radius so that volume is even."""
        noise = torch.randn(images.shape, generator=generator, dtype=images.dtype, device=generator.device).to(images)
        radius = _uniform((len(images), *[1] * (images.dim() - 1)), generator, images) ** (1 / images[0].numel())
        return self.epsilon * radius * noise / _norms(noise)

    def _project(self, images: Tensor, twins: Tensor) -> Tensor:
        """Into the ball around the images and the pixel range. The range admits each image as it is: epsilon 0
        gives the image back bit by bit, even where normalizing has rounded it over the edge."""
        mean, std = self._channels(self.mean, 0.0, images), self._channels(self.std, 1.0, images)
        if self.norm == "linf":
            radius = self.epsilon / std
            twins = torch.clamp(twins, images - radius, images + radius)
        else:
            delta = twins - images
            length = _norms(delta * std)
            twins = torch.where(length > self.epsilon, images + delta * (self.epsilon / length), twins)
        low, high = (0 - mean) / std, (1 - mean) / std
        return torch.clamp(twins, torch.minimum(images, low), torch.maximum(images, high))

    def _channels(self, values: Sequence[float] | None, default: float, images: Tensor) -> Tensor:
        """Figures by channel, in a shape that meets images (N, C, ...)."""
        if values is None:
            return images.new_tensor(default)
        if len(values) != images.shape[1]:
            raise ValueError(f"mean and std have {len(values)} channels, the images {images.shape[1]}")
        return images.new_tensor(values).view(-1, *[1] * (images.dim() - 2))


def _norms(x: Tensor) -> Tensor:
    """The L2 norm of each image, in a shape that meets the images."""
    norms: Tensor = torch.linalg.vector_norm(x.flatten(1), dim=1)
    return norms.view(-1, *[1] * (x.dim() - 1))


def _uniform(shape: Sequence[int], generator: torch.Generator, like: Tensor) -> Tensor:
    return torch.rand(tuple(shape), generator=generator, dtype=like.dtype, device=generator.device).to(like.device)


def input_gradient(
    model: nn.Module,
    total: Callable[[Tensor], Tensor],
    images: Tensor,
    context: Callable[[], AbstractContextManager[None]],
) -> Tensor:
    """The gradient of `total(images)` by the images, computed within a context that is entered for each attempt.

    With inputs named, autograd computes no gradients of weights. Reentrant activation checkpointing does not allow
    that; there the weights are told that no gradient is wanted of them.
    """
    try:
        leaf = images.detach().requires_grad_()
        with torch.enable_grad(), context():
            # A model may work in place, which a leaf of the graph does not allow.
            (gradient,) = torch.autograd.grad(total(leaf.clone()), leaf)
            return gradient
    except RuntimeError as error:
        if "When use_reentrant=True" not in str(error):
            raise
    leaf = images.detach().requires_grad_()
    with torch.enable_grad(), context(), _without_weight_gradients(model):
        total(leaf.clone()).backward()
    assert leaf.grad is not None
    return leaf.grad


@contextmanager
def _without_weight_gradients(model: nn.Module) -> Iterator[None]:
    wanted = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        for parameter in wanted:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in wanted:
            parameter.requires_grad_(True)


@contextmanager
def without_trace(model: nn.Module, branch: str, statistics: Statistics | None, seed: int | None) -> Iterator[None]:
    """Within, images go through `branch` with `statistics`; after it buffers, flags and generators are as before."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    split = {owner for layer in split_layers(model) for owner in layer.owners().values()}
    plain = [module for module in model.modules() if module not in split]
    with (
        _copied_buffers(plain),
        _statistics_of(plain, statistics, model.training),
        untouched_randomness(device, seed),
        routed(model, branch, statistics=statistics, tracking="off"),
    ):
        yield


@contextmanager
def _copied_buffers(modules: list[nn.Module]) -> Iterator[None]:
    """Within, modules work on copies: the buffers themselves may belong to a graph that is still to be walked."""
    before = [(module, dict(module._buffers)) for module in modules]
    copies: dict[Tensor, Tensor] = {}  # a buffer of two modules stays one buffer
    try:
        for module, buffers in before:
            for name, buffer in buffers.items():
                if buffer is not None:
                    module._buffers[name] = copies.setdefault(buffer, buffer.clone())
        yield
    finally:
        for module, buffers in before:
            module._buffers.update(buffers)


@contextmanager
def _statistics_of(modules: list[nn.Module], statistics: Statistics | None, training: bool) -> Iterator[None]:
    """Within, plain BatchNorm layers take `statistics`, unless they are frozen; None: as their own flag says."""
    norms = [module for module in modules if isinstance(module, _BatchNorm)]
    flags = [norm.training for norm in norms]
    try:
        for norm, flag in zip(norms, flags, strict=True):
            frozen = training and not flag
            norm.training = flag if statistics is None else statistics == "batch" and not frozen
        yield
    finally:
        for norm, flag in zip(norms, flags, strict=True):
            norm.training = flag
