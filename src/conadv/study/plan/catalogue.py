"""Devices, models and links by name, each figure with its source; a measurement of one's own is better than any.

docs/planning.md holds the same tables; "assumption" marks what nobody published in this form.
"""

from __future__ import annotations

from dataclasses import dataclass

from .cost import PassTimes
from .network import Link


@dataclass(frozen=True)
class ModelSize:
    """What a plan needs to know of a network and its images."""

    parameters: int
    image_values: int
    """Channels × height × width."""
    forward_flops: float = 0.0
    """Floating-point operations an image of one forward pass (two a multiply-add); 0: unknown."""
    pixel_flops: float = 0.0
    """Those of the first layer's input gradient."""

    def __post_init__(self) -> None:
        for name in ("parameters", "image_values"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)}: give a whole number, 1 or more")
        for name in ("forward_flops", "pixel_flops"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name} {getattr(self, name)}: give operations an image, 0 or more")


@dataclass(frozen=True)
class Device:
    """A device by its peak; real networks reach a part of it."""

    peak_flops: float
    """A second, at the precision of mixed-precision training."""
    utilisation: float
    overhead: float
    """Seconds a pass."""

    def times(self, model: ModelSize) -> PassTimes:
        """Each pass costs the operations of a forward pass; the backward pass is two of them."""
        if not model.forward_flops:
            raise ValueError(
                "the operations of the model are unknown: give --flops, or --measured with a file of times"
            )
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

# Utilisation of the GPUs: ResNet-50 training at 256 images a device, mixed precision, with the overhead taken off:
# 256 × 24.5 GFLOP / (256 / images a second - 3 × overhead) / peak. Overhead of V100: its inference latencies, 43.55 ms
# at 128 and 84.14 ms at 256 images, extrapolated to 0. Images a second and latencies: NVIDIA/DeepLearningExamples,
# PyTorch/Classification/ConvNets/resnet50v1.5/README.md (1200 on V100 16 GB, 2470 on A100 80 GB).
DEVICES = {
    "v100": Device(125e12, 0.25, 3e-3),  # peak: NVIDIA V100 data sheet
    "a100": Device(312e12, 0.21, 3e-3),  # peak: NVIDIA A100 data sheet; overhead: assumption, as V100
    "h100": Device(989e12, 0.12, 3e-3),  # peak: NVIDIA H100 SXM data sheet, dense; utilisation, overhead: assumptions
    # One of a chip's two cores. Peak: cloud.google.com/tpu/docs/v3, 123 T a chip. The rest is what calibrating on the
    # paper's vanilla figures gives (paper.py); that is its software as much as its device.
    "tpu-v3-core": Device(61.5e12, 0.165, 7e-3),
}

# Bandwidths are nominal and of one direction; latencies are assumptions unless a source is named.
LINKS = {
    "nvlink2": Link(3e-6, 150e9),  # V100 data sheet: 300 GB/s both ways
    "nvlink3": Link(3e-6, 300e9),  # A100 data sheet: 600 GB/s both ways
    "nvlink4": Link(3e-6, 450e9),  # H100 data sheet: 900 GB/s both ways
    "pcie3": Link(5e-6, 16e9),  # 16 lanes
    "pcie4": Link(5e-6, 32e9),  # 16 lanes
    "ethernet-10g": Link(30e-6, 1.25e9),
    "ethernet-100g": Link(20e-6, 12.5e9),
    "infiniband-hdr": Link(5e-6, 25e9),  # 200 Gbit/s
    "infiniband-hdr-x8": Link(5e-6, 200e9),  # a node with one adapter a device, as DGX A100 has
    "tpu-v3-ici": Link(1e-6, 83e9),  # cloud.google.com/tpu/docs/v3: all-reduce 340 TB/s over 1024 chips of 4 links
    # PyTorch's gloo over loopback, 2 processes: 0.14 s for an all-reduce of 100 MB, 0.5 ms for one of a single number.
    "gloo-loopback": Link(0.25e-3, 0.71e9),
}


def named_device(name: str) -> Device:
    if name not in DEVICES:
        raise ValueError(f'device "{name}": take one of {", ".join(DEVICES)}, or give --measured with a file of times')
    return DEVICES[name]


def named_model(name: str) -> ModelSize:
    if name not in MODELS:
        known = ", ".join(MODELS)
        raise ValueError(f'model "{name}": take one of {known}, or give --parameters and --image-shape of your own')
    return MODELS[name]
