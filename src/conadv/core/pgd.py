"""PGD: from images to adversarial versions of them, inside a ball and the range of valid inputs.

start (the image, or noise around it) ──► step along the gradient ──► project ──► ... ──► twin
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from conadv.wrappers import unwrap

from .attack import Loss, input_gradient, without_trace
from .seeds import ATTACK_PASS, MOVED, NOISE, START, TARGET, centered, mix, normal, uniform
from .splitbn import Statistics

Norm = Literal["linf", "l2"]
Direction = Literal["sign", "unit", "raw", "noise"]


@dataclass(frozen=True)
class PGD:
    """Projected gradient descent on the input: the attack of AdvProp and of the paper.

    Sizes are fractions of the pixel range, `epsilon=4/255`, for images in [0, 1] or normalized by `mean` and `std`.
    For inputs that are not pixels (signals, tabular data, embeddings) pass `low=None, high=None`; sizes are then in
    the unit of the input.

    Args:
        epsilon: radius of the ball around an image.
        step_size: length of one step; None: epsilon.
        steps: number of gradient steps.
        norm: the shape of the ball, "linf" or "l2".
        direction: what a step follows: "sign" of the gradient, "unit" (the gradient at L2 norm 1), "raw" (that of the
            loss summed over the images) or "noise" (random signs, the control without a gradient). None: the steepest
            for the ball, which is sign for linf and unit for l2.
        random_start: probability, for each image, to start at a random point of the ball instead of the image.
        grid: draw random starts (linf) on whole 255ths, so that twins of 8-bit images are 8-bit images too.
        targeted: step towards a random wrong label instead of away from the right one.
        mean: one number per channel, with `std`: the images were normalized with these. None: they are in [0, 1].
        std: one number per channel.
        low: smallest valid input before normalization; None: unbounded.
        high: largest valid input before normalization; None: unbounded.
        branch: the branch of split BatchNorm layers that the attack goes through. To judge a model rather than to
            train it, attack what is evaluated: `branch="main", statistics="running"`.
        statistics: what BatchNorm normalizes with, those of the "batch" or the "running" ones. Neither is updated.
    """

    epsilon: float
    step_size: float | None = None
    steps: int = 1
    norm: Norm = "linf"
    direction: Direction | None = None
    random_start: float = 0.8
    grid: bool = False
    targeted: bool = False
    mean: Sequence[float] | None = None
    std: Sequence[float] | None = None
    low: float | None = 0.0
    high: float | None = 1.0
    branch: str = "adv"
    statistics: Statistics = "batch"

    def __post_init__(self) -> None:
        low, high = -math.inf if self.low is None else self.low, math.inf if self.high is None else self.high
        if (self.low is None) != (self.high is None) or not low < high:
            raise ValueError(f"low {self.low} and high {self.high}: two numbers in this order, or None for both")
        if not 0 <= self.epsilon < math.inf or (self._pixels and self.norm == "linf" and self.epsilon > 1):
            raise ValueError(
                f"epsilon {self.epsilon}: a fraction of the pixel range, from 0 to 1, such as 4/255; "
                "for inputs that are not pixels pass low=None, high=None"
            )
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
        for name, values in (("mean", self.mean), ("std", self.std)):
            try:  # of a list, an array or a tensor, also of shape (C, 1, 1)
                object.__setattr__(self, name, None if values is None else tuple(map(float, values)))
            except (TypeError, ValueError, RuntimeError):
                raise ValueError(f"{name} {values!r}: one number per channel, such as (0.485, 0.456, 0.406)") from None
        if self.std is not None and min(self.std) <= 0:
            raise ValueError(f"std {self.std}: positive numbers")
        if self.mean is not None and not low <= min(self.mean) <= max(self.mean) <= high:
            raise ValueError(
                f"mean {self.mean}: not within the pixels' range [{low:g}, {high:g}]; "
                "divide mean and std by 255 if they are those of bytes"
            )
        if self.grid and (self.norm != "linf" or not self._pixels or self.mean is not None):
            raise ValueError("grid is for images in [0, 1] and norm linf: drop grid=True")

    @property
    def _pixels(self) -> bool:
        return (self.low, self.high) == (0.0, 1.0)

    def __call__(self, model: nn.Module, loss: Loss, images: Tensor, labels: Any, seed: int = 0) -> Tensor:
        """Generate the twins of images (N, C, ...); see `Attack`."""
        if not images.is_floating_point():
            raise ValueError(f"images of {images.dtype}: scale bytes to the pixel range first, images.float() / 255")
        if self.targeted and not (isinstance(labels, Tensor) and not labels.is_floating_point()):
            raise ValueError("targeted needs whole labels: a mixture of them has no wrong label to go towards")
        images, model = images.detach(), unwrap(model)
        twins = self._start(images, seed)
        towards = uniform(labels.shape, mix(seed, TARGET), images) if self.targeted else None

        def total(twins: Tensor) -> Tensor:
            outputs = model(twins)
            if towards is None:
                return loss(outputs, labels) * len(images)
            classes = outputs.shape[1]
            wrong = (labels + 1 + (towards * (classes - 1)).long()) % classes  # `towards` picks one of the other labels
            return -loss(outputs, wrong) * len(images)

        for number in range(self.steps):
            if self.direction == "noise":
                gradient = centered(images.shape, mix(seed, NOISE, number), images)  # of which the sign is taken
            else:
                with without_trace(model, self.branch, self.statistics, mix(seed, ATTACK_PASS, number) >> 1):
                    gradient = input_gradient(total, twins)
            twins = self._stepped(images, twins, gradient)
        return twins

    def along(self, images: Tensor, gradient: Tensor, seed: int = 0) -> Tensor:
        """Take one step from the images along a gradient of the loss summed over the images; see `Attack`."""
        if self.direction == "noise":
            gradient = centered(images.shape, mix(seed, NOISE, 0), images)
        return self._stepped(images, images, gradient)

    def check_reusable(self) -> None:
        """Raise a ValueError unless this attack is one step along a gradient; see `Attack`."""
        if self.steps != 1 or self.targeted or self.statistics != "batch":
            raise ValueError(
                "recycled takes one untargeted step along the gradient that it has: "
                'steps=1, targeted=False, statistics="batch"'
            )

    def check_range(self, images: Tensor) -> None:
        """Raise a ValueError for images outside of the pixel range, for which epsilon would have another meaning."""
        if self.low is None or self.high is None:
            return
        low, high = (float(value) for value in images.aminmax())
        if self.mean is not None and low >= 0 and high <= 1 and high > low:
            warnings.warn(
                f"images from {low:.3g} to {high:.3g} look like pixels in [0, 1], but the attack was given mean and "
                "std of normalized ones, which makes its ball larger: drop mean and std, or normalize the images",
                stacklevel=2,
            )
        pixels = images * _per_channel(self.std, 1.0, images) + _per_channel(self.mean, 0.0, images)
        low, high = (float(value) for value in pixels.aminmax())
        room = 0.25 * (self.high - self.low)  # resampling may overshoot a little
        if low < self.low - room or high > self.high + room:
            raise ValueError(
                f"images from {low:.3g} to {high:.3g}: scale them to [{self.low:g}, {self.high:g}], "
                "tell the attack the mean and std that they were normalized with, "
                "or pass low=None, high=None if they are not pixels"
            )

    def exact_as_bytes(self, *, from_images: bool) -> bool:
        """Whether twins of 8-bit images are 8-bit images too; see `Attack`."""
        starts_between = self.random_start > 0 and not from_images and not self.grid
        whole_steps = self.norm == "linf" and self.direction in (None, "sign", "noise")
        sizes = (self.epsilon, self.epsilon if self.step_size is None else self.step_size)
        return (
            self._pixels
            and self.mean is None
            and self.steps == 1
            and whole_steps
            and not starts_between
            and all(math.isclose(255 * size, round(255 * size), abs_tol=1e-9) for size in sizes)
        )

    def _stepped(self, images: Tensor, twins: Tensor, gradient: Tensor) -> Tensor:
        """Step from `twins` along the gradient of the loss summed over images, and project into the ball and range."""
        size = self.epsilon if self.step_size is None else self.step_size
        std = _per_channel(self.std, 1.0, images)
        gradient = gradient / std  # to pixel units; dividing the step converts it back to the unit of the images
        direction = self.direction or ("sign" if self.norm == "linf" else "unit")
        if direction == "unit":
            gradient = gradient / _norms(gradient).clamp_min(torch.finfo(gradient.dtype).tiny)
        elif direction != "raw":
            gradient = gradient.sign()
        return self._project(images, twins + size * gradient / std)

    def _start(self, images: Tensor, seed: int) -> Tensor:
        if self.random_start == 0 or self.epsilon == 0:
            return images
        noise = self._noise_in_ball(images, mix(seed, START)).to(images.dtype) / _per_channel(self.std, 1.0, images)
        moved = uniform((len(images), *[1] * (images.dim() - 1)), mix(seed, MOVED), images) < self.random_start
        return self._project(images, torch.where(moved, images + noise, images))

    def _noise_in_ball(self, images: Tensor, seed: int) -> Tensor:
        """A random point of the ball for each image."""
        if self.norm == "l2":  # a direction from normal noise, a radius that is uniform in volume
            noise = normal(images.shape, seed, images)
            radius = uniform((len(images), *[1] * (images.dim() - 1)), mix(seed), images) ** (1 / images[0].numel())
            return self.epsilon * radius * noise / _norms(noise)
        if self.grid:
            levels = math.floor(255 * self.epsilon + 1e-9)
            steps = uniform(images.shape, seed, images).mul_(2 * levels + 1).floor_().sub_(levels)
            return steps.div_(255)
        return centered(images.shape, seed, images).mul_(self.epsilon)

    def _project(self, images: Tensor, twins: Tensor) -> Tensor:
        """Project into the ball around the images and the valid range. The range is extended to each image: epsilon 0
        returns it to the bit, even if normalizing has rounded it over the edge."""
        std = _per_channel(self.std, 1.0, images)
        if self.norm == "linf":
            radius = self.epsilon / std
            twins = torch.clamp(twins, images - radius, images + radius)
        else:
            delta = twins - images
            length = _norms(delta * std)
            twins = torch.where(length > self.epsilon, images + delta * (self.epsilon / length), twins)
        if self.low is None or self.high is None:
            return twins
        mean = _per_channel(self.mean, 0.0, images)
        low, high = (self.low - mean) / std, (self.high - mean) / std
        return torch.clamp(twins, images.clamp(max=low), images.clamp(min=high))


def _norms(x: Tensor) -> Tensor:
    """The L2 norm of each image, in a shape that broadcasts with the images."""
    norms: Tensor = torch.linalg.vector_norm(x.flatten(1), dim=1)
    return norms.view(-1, *[1] * (x.dim() - 1))


def _per_channel(values: Sequence[float] | None, default: float, images: Tensor) -> Any:
    """Numbers per channel as a tensor that broadcasts with images (N, C, ...); `default` if there are none."""
    if values is None:
        return default
    if len(values) != images.shape[1]:
        raise ValueError(f"mean and std have {len(values)} channels, the images {images.shape[1]}")
    shape = (-1, *[1] * (images.dim() - 2))
    return torch.tensor(values, dtype=images.dtype).to(images.device, non_blocking=True).view(shape)
