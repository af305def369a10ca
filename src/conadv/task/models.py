"""Models by name: ResNets, those of other libraries (libraries.py), and your own.

    images in [0, 1] ──► normalize ──► conv1, bn1 ──► layer1 ... layerN ──► mean over pixels ──► fc ──► logits

The large ones have torchvision's keys, so its weights load into ours and ours into its.
"""

from __future__ import annotations

import difflib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conadv.catalog import is_callable
from conadv.core.seeds import untouched_randomness
from conadv.machine import is_out_of_memory

from .libraries import build_from_callable, build_from_library, first_line, trained_with

_IMAGENET: dict[str, tuple[float, ...]] = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}


class Normalize(nn.Module):
    """Normalize images in [0, 1] by channel: (images - mean) / std.

    Both are constants of the architecture, as strides are, and not state: a checkpoint has the same keys with and
    without normalization.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor(mean).view(-1, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(std).view(-1, 1, 1), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        return (images - self.mean) / self.std


class BasicBlock(nn.Module):
    """Two 3×3 convolutions with a shortcut.

    The last BatchNorm weight starts at 0, here and in `Bottleneck`, so that a block starts as the identity. This
    stabilizes the first steps of a large batch (Goyal et al., 2017), and did no harm at 8 layers.
    """

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = _convolution(inputs, width, 3, stride)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = _convolution(width, width, 3)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = _shortcut(inputs, width, stride)
        nn.init.zeros_(self.bn2.weight)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)), inplace=True)
        y = self.bn2(self.conv2(y))
        return F.relu(y + self.downsample(x), inplace=True)


class Bottleneck(nn.Module):
    """1×1, 3×3 and 1×1 convolutions with a shortcut; the stride is in the 3×3 one, as in ResNet v1.5."""

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = _convolution(inputs, width, 1)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = _convolution(width, width, 3, stride)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = _convolution(width, width * self.expansion, 1)
        self.bn3 = nn.BatchNorm2d(width * self.expansion)
        self.downsample = _shortcut(inputs, width * self.expansion, stride)
        nn.init.zeros_(self.bn3.weight)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)), inplace=True)
        y = F.relu(self.bn2(self.conv2(y)), inplace=True)
        y = self.bn3(self.conv3(y))
        return F.relu(y + self.downsample(x), inplace=True)


Block = type[BasicBlock] | type[Bottleneck]


class ResNet(NamedTuple):
    """What a ResNet is made of."""

    block: Block
    depths: tuple[int, ...]
    """Blocks of each stage."""
    width: int
    """Channels of the first stage, unless the user chooses."""
    stem: tuple[int, int]
    """Kernel size and stride of the first convolution."""
    pools: bool = False
    """Whether a pooling of stride 2 follows it."""


RESNETS = {
    # Three stages of n blocks, each of two convolutions; the first convolution and the last layer make 6n + 2.
    **{f"resnet{6 * n + 2}": ResNet(BasicBlock, (n, n, n), 16, (3, 1)) for n in (1, 2, 3, 4, 5, 7, 9, 18)},
    # A first convolution of stride 2 and twice the channels: as much work, and more accurate in few epochs.
    **{f"resnet{6 * n + 2}-half": ResNet(BasicBlock, (n, n, n), 32, (3, 2)) for n in (1, 2)},
    "resnet18": ResNet(BasicBlock, (2, 2, 2, 2), 64, (7, 2), pools=True),
    "resnet34": ResNet(BasicBlock, (3, 4, 6, 3), 64, (7, 2), pools=True),
    "resnet50": ResNet(Bottleneck, (3, 4, 6, 3), 64, (7, 2), pools=True),
}


def build_model(
    name: str,
    classes: int,
    in_channels: int,
    width: int | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    pretrained: bool = False,
) -> nn.Module:
    """Build a model by name, with random weights from PyTorch's global generator unless it is pretrained.

    Args:
        name: one of `RESNETS`, timm:NAME, torchvision:NAME, or your own as package.module:callable, which takes
            images in [0, 1] and normalizes them itself.
        classes, in_channels: of the images.
        width: channels of a ResNet's first stage; None: its own.
        mean, std: of each channel, to normalize images in [0, 1] with; None: do not normalize.
        pretrained: start from the weights of timm or torchvision. For weights in a file see `build_pretrained`.
    """
    from_library = ":" in name and not is_callable(name)
    if pretrained and not from_library:
        raise ValueError(
            f"there are no pretrained weights for {name!r}: choose timm:NAME or torchvision:NAME, or give a "
            "safetensors file of its weights"
        )
    if is_callable(name):
        return build_from_callable(name, classes, in_channels)
    normalize = Normalize(mean, std) if mean and std else nn.Identity()
    if from_library:
        return build_from_library(name, classes, in_channels, normalize, pretrained)
    if name not in RESNETS:
        (nearest,) = difflib.get_close_matches(name, RESNETS, n=1, cutoff=0)
        raise ValueError(f"unknown model {name!r}, did you mean {nearest!r}? Choose one of {', '.join(RESNETS)}")
    return _resnet(RESNETS[name], classes, in_channels, width, normalize)


def normalization(name: str, channels: int, pretrained: bool | str) -> dict[str, tuple[float, ...]]:
    """Return the mean and standard deviation that a model normalizes images with; empty: it takes them as they are.

    Colour images get those that the weights of a library were trained with, or else ImageNet's; others stay in [0, 1].
    """
    if channels != 3 or is_callable(name):
        return {}
    return (pretrained is True and trained_with(name)) or _IMAGENET


def check_output(model: nn.Module, shape: Sequence[int], classes: int) -> None:
    """Raise a ValueError unless the model maps images of `shape` (C, H, W) to one logit per class.

    Runs two black images through it. Buffers, random state and train/eval modes stay as they are.
    """
    like = next(model.parameters(), torch.empty(0))
    images = torch.zeros(2, *shape, dtype=like.dtype, device=like.device)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    try:
        with in_mode(model, training=False), torch.no_grad(), untouched_randomness(like.device):
            outputs = torch.func.functional_call(model, buffers, (images,))
    except Exception as error:  # the model is the user's, and may raise anything
        if is_out_of_memory(error):
            raise
        raise ValueError(f"the model fails on images of shape {tuple(shape)}: {first_line(error)}") from error
    found = tuple(outputs.shape) if isinstance(outputs, Tensor) else f"a value of type {type(outputs).__name__}"
    if found != (2, classes):
        raise ValueError(
            f"the model turns 2 images into {found}, but {classes} classes need (2, {classes}): "
            f"build it for {classes} classes"
        )


def fastest_memory(model: nn.Module, device: torch.device) -> nn.Module:
    """Convert a model to the memory layout in which convolutions are fastest: channels last.

    Except on the CPU if a convolution is 1×1, strided and has few input channels: fewer than fill a register (8 or 16).
    There oneDNN's weight gradient writes past its workspace (oneDNN issue 6035). Images may still come channels last,
    so a hook makes the input of such a convolution contiguous.
    """
    convolutions = [module for module in model.modules() if isinstance(module, nn.Conv2d) and device.type == "cpu"]
    narrow = [conv for conv in convolutions if conv.in_channels < 16 and max(conv.kernel_size) == 1 < max(conv.stride)]
    for conv in narrow:
        conv.register_forward_pre_hook(lambda _, inputs: (inputs[0].contiguous(),))
    layout = torch.contiguous_format if narrow else torch.channels_last
    return model.to(memory_format=layout)  # type: ignore[call-overload, no-any-return]


@contextmanager
def in_mode(model: nn.Module, training: bool) -> Iterator[None]:
    """Put every module in training or eval mode, and restore the mode of each afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.train(training)
        yield
    finally:
        for module, training in modes:
            module.training = training


def _resnet(kind: ResNet, classes: int, in_channels: int, width: int | None, normalize: nn.Module) -> nn.Module:
    width = inputs = width or kind.width
    stem = _convolution(in_channels, width, *kind.stem)
    pool = nn.MaxPool2d(3, stride=2, padding=1) if kind.pools else nn.Identity()
    layers: OrderedDict[str, nn.Module] = OrderedDict(
        normalize=normalize, conv1=stem, bn1=nn.BatchNorm2d(width), relu=nn.ReLU(inplace=True), maxpool=pool
    )
    for stage, depth in enumerate(kind.depths):
        blocks: list[nn.Module] = []
        for index in range(depth):
            stride = 2 if stage > 0 and index == 0 else 1
            blocks.append(kind.block(inputs, width * 2**stage, stride))
            inputs = width * 2**stage * kind.block.expansion
        layers[f"layer{stage + 1}"] = nn.Sequential(*blocks)
    layers["avgpool"] = nn.AdaptiveAvgPool2d(1)
    layers["flatten"] = nn.Flatten()
    layers["fc"] = classifier = nn.Linear(inputs, classes)  # it starts with about equal logits, as in Goyal et al.
    nn.init.normal_(classifier.weight, std=0.01)
    nn.init.zeros_(classifier.bias)
    return nn.Sequential(layers)


def _convolution(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Conv2d:
    convolution = nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)
    nn.init.kaiming_normal_(convolution.weight, mode="fan_out", nonlinearity="relu")
    return convolution


def _shortcut(inputs: int, outputs: int, stride: int) -> nn.Module:
    """The identity, or a projection if the shape changes."""
    if stride == 1 and inputs == outputs:
        return nn.Identity()
    return nn.Sequential(_convolution(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))
