"""What both scripts train: a small network on images from sklearn's digits or from your own file, in a plain loop."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import conadv

Images = tuple[Tensor, Tensor]


def load(path: Path | None) -> Images:
    """Images in [0, 1], (N, C, H, W), and labels: digits, or a .npz with `images` (N, H, W, C; bytes) and `labels`."""
    if path is None:
        digits = load_digits()
        return torch.from_numpy(digits.images).float()[:, None] / 16, torch.from_numpy(digits.target).long()
    with np.load(path) as arrays:
        images, labels = torch.from_numpy(arrays["images"]), torch.from_numpy(arrays["labels"])
    return images.permute(0, 3, 1, 2).float() / 255, labels.long()


def network(channels: int, classes: int) -> nn.Module:
    """Two convolutions with BatchNorm, split into branches."""
    layers = [
        nn.Conv2d(channels, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1, stride=2), nn.BatchNorm2d(32), nn.ReLU(),
        nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(32 * 16, classes),
    ]  # fmt: skip
    return conadv.split_batchnorm(nn.Sequential(*layers))


def train(data: Images, delay: int | None, batch_size: int, steps: int, seed: int, rate: float = 0.1,
          epsilon: float = 24 / 255) -> Iterator[tuple[nn.Module, nn.Module, Images]]:  # fmt: skip
    """Train with ConAdv (`delay` None: vanilla), and yield each batch before its step.

    Yields:
        The network, what it was `delay` steps ago, and the batch.
    """
    torch.manual_seed(seed)
    images, labels = data
    model = network(images.shape[1], int(labels.max()) + 1)
    attack = conadv.PGD(epsilon)
    method = conadv.Vanilla(model, F.cross_entropy) if delay is None else conadv.ConAdv(
        model, F.cross_entropy, attack, delay=delay, seed=seed)  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9, weight_decay=5e-4)
    past = [copy.deepcopy(model)]
    for _ in range(steps):
        batch = torch.randperm(len(images))[:batch_size]
        yield model, past[0], (images[batch], labels[batch])
        past = [*past, copy.deepcopy(model)][-max(1, delay or 0) :]
        optimizer.zero_grad()
        method((images[batch], labels[batch]))
        optimizer.step()


def gradient(model: nn.Module, branch: str, images: Tensor, labels: Tensor) -> tuple[float, Tensor]:
    """The loss through a branch, and its gradient by all weights as one vector; nothing in the network changes."""
    weights = list(model.parameters())
    with conadv.route(model, branch, statistics="batch", tracking="off"):
        loss = F.cross_entropy(model(images), labels)
        found = torch.autograd.grad(loss, weights, allow_unused=True)
    flat = [torch.zeros_like(own) if one is None else one for one, own in zip(found, weights, strict=True)]
    return float(loss.detach()), torch.cat([one.flatten() for one in flat])


def arguments(text: str, **numbers: int) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=text)
    parser.add_argument("--data", type=Path, help="a .npz file with images (N, H, W, C; bytes) and labels")
    for name, number in numbers.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=number, help=f"(default: {number})")
    return parser.parse_args()


def table(rows: list[dict[str, float]]) -> str:
    """Rows as aligned columns."""
    lines = ["  ".join(f"{name:>17}" for name in rows[0])]
    return "\n".join([*lines, *("  ".join(f"{value:17.5g}" for value in row.values()) for row in rows)])
