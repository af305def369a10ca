"""The time of passes and duties on a device, the delay by the slowest of many devices, and known devices and models.

docs/planning.md has the numbers of the tables with their sources; your own measurement is better.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from conadv.core.catalog import MethodInfo
from conadv.core.roles import Role

# The most roles that a layout has.
_ROLES = 3


@dataclass(frozen=True)
class PassTimes:
    """Seconds per image and pass on one device; a pass over n images takes overhead + n × seconds."""

    forward: float
    input_backward: float
    """Gradients of the activations, down to the pixels."""
    weight_backward: float
    pixel_backward: float = 0.0
    """The part of input_backward from the first layer to the pixels, which training without an attack does not need."""
    overhead: float = 0.0
    """Seconds per pass, independent of its size; 0 if the times were measured at the chunk size to plan for."""
    update: float = 0.0
    """Seconds per step for the optimizer."""

    def passes(self, count: int, images: int, *, to_pixels: bool) -> float:
        """Seconds for `count` passes in the order forward, input-backward, weight-backward, forward, ..."""
        order = (self.forward, self.input_backward, self.weight_backward)
        seconds = sum(order[number % 3] for number in range(count))
        unneeded = 0.0 if to_pixels else self.pixel_backward * len(range(1, count, 3))
        return count * self.overhead + images * (seconds - unneeded)

    def backward(self, images: int) -> float:
        """Seconds of the backward pass of training, during which gradients can be reduced."""
        return self.passes(3, images, to_pixels=False) - self.passes(1, images, to_pixels=False)


def duty_seconds(
    method: MethodInfo, times: PassTimes, images: int, attack_steps: int, full_attack: bool
) -> dict[Role, float]:
    """Seconds per chunk of `images` for each duty of a method; the duty that makes twins needs pixel gradients."""
    seconds = {}
    for duty, passes in method.passes.items():
        attacks = duty is Role.ATTACK
        count = max(3, passes) if attacks and full_attack else passes
        once = times.passes(count, images, to_pixels=duty is method.maker)
        seconds[duty] = once * (attack_steps if attacks else 1)
    return seconds


@dataclass(frozen=True)
class Stragglers:
    """Random delays: a rank takes its nominal time × (1 + jitter × e), with e exponential of mean 1 in each step.

    A step lasts as long as its slowest rank, so more ranks mean longer steps.
    """

    jitter: float
    samples: int = 1000
    seed: int = 0

    @cached_property
    def draws(self) -> NDArray[np.float64]:
        """Uniform numbers in (0, 1]: streams × samples."""
        return 1.0 - np.random.default_rng(self.seed).random((_ROLES, self.samples))

    def slowest(self, ranks: int, uniform: NDArray[np.float64]) -> NDArray[np.float64]:
        """The delay factor of the slowest of `ranks`, for each simulated step.

        The maximum of n draws with distribution function F is distributed as F⁻¹(u^(1/n)): one uniform number per
        step instead of n exponential ones, and the same number for every n, so that more ranks are never faster.
        """
        return 1.0 + self.jitter * -np.log(-np.expm1(np.log(uniform) / ranks))


@dataclass(frozen=True)
class ModelSize:
    """The size of a network and its images."""

    parameters: int
    image_values: int
    """Channels × height × width."""
    forward_flops: float = 0.0
    """Floating-point operations per image of one forward pass (two per multiply-add); 0: unknown."""
    pixel_flops: float = 0.0
    """Those of the first layer's input gradient."""


@dataclass(frozen=True)
class Device:
    """A device by its peak speed and the utilisation that real networks reach."""

    peak_flops: float
    """Per second, at the precision of mixed-precision training."""
    utilisation: float
    overhead: float
    """Seconds per pass."""

    def times(self, model: ModelSize) -> PassTimes:
        """Each pass costs the operations of a forward pass; the backward pass is two of them."""
        if not model.forward_flops:
            raise ValueError("the FLOPs of the model are unknown: pass --flops, or measured times with --measured")
        rate = self.peak_flops * self.utilisation
        unit = model.forward_flops / rate
        return PassTimes(unit, unit, unit, pixel_backward=model.pixel_flops / rate, overhead=self.overhead)


# torchvision's model pages: parameters, and multiply-adds of 1.81, 3.66 and 4.09 G. The first layer, 7×7 with stride 2
# from 3 to 64 channels, gives 112×112 pixels.
_FIRST_LAYER = 2.0 * 64 * 3 * 7 * 7 * 112 * 112
MODELS = {
    "resnet18": ModelSize(11_689_512, 3 * 224 * 224, 2 * 1.81e9, _FIRST_LAYER),
    "resnet34": ModelSize(21_797_672, 3 * 224 * 224, 2 * 3.66e9, _FIRST_LAYER),
    "resnet50": ModelSize(25_557_032, 3 * 224 * 224, 2 * 4.09e9, _FIRST_LAYER),
}

# Utilisation of the GPUs: ResNet-50 training at 256 images per device, mixed precision, with the overhead taken off:
# 256 × 24.5 GFLOP / (256 / images per second - 3 × overhead) / peak. Overhead of V100: its inference latencies,
# 43.55 ms at 128 and 84.14 ms at 256 images, extrapolated to 0. Images per second and latencies:
# NVIDIA/DeepLearningExamples, PyTorch/Classification/ConvNets/resnet50v1.5/README.md (1200 on V100 16 GB, 2470 on
# A100 80 GB).
DEVICES = {
    "v100": Device(125e12, 0.25, 3e-3),  # peak: NVIDIA V100 data sheet
    "a100": Device(312e12, 0.21, 3e-3),  # peak: NVIDIA A100 data sheet; overhead: assumption, as V100
    "h100": Device(989e12, 0.12, 3e-3),  # peak: NVIDIA H100 SXM data sheet, dense; utilisation, overhead: assumptions
    # One of a chip's two cores. Peak: cloud.google.com/tpu/docs/v3, 123 T per chip. The rest comes from calibrating on
    # the paper's vanilla numbers (docs/planning.md), so it is the paper's software as much as the device.
    "tpu-v3-core": Device(61.5e12, 0.165, 7e-3),
}
