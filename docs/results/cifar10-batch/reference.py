"""What the study's network reaches on its images in a plain PyTorch loop with a usual recipe: is its vanilla fair?

OMP_NUM_THREADS=1 python docs/results/cifar10-batch/reference.py --path ../shared/data/cifar10 --seeds 0 1 2 --out FILE

The images (2,000 of CIFAR-10 at 12 x 12 pixels) and the network (ResNet-8) are those of study.toml. Loop, optimizer,
schedule and augmentation are written apart: Nesterov SGD, cosine decay after 5 % warm-up, batches of 64.
Appends one JSON object per run to FILE and skips those that it has; ours are in reference.jsonl.
"""

from __future__ import annotations

import argparse
import json
from itertools import product
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conadv.task.data import open_data
from conadv.task.data.fit import Fit, fitted
from conadv.task.models import build_model

SIZE, PADDING = 12, 2
BATCH, DECAY = 64, 5e-4
RATES = [0.1, 0.2, 0.4, 0.8, 1.6]


def load(path: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training images and labels, test images and labels; images in [0, 1]."""
    data = open_data("path", path=path, train_size=2000, image_size=SIZE, channels=3, classes=10)
    found = []
    for source in (data.train, data.test):
        images = fitted(source, np.arange(len(source)), Fit(SIZE))
        found += [torch.from_numpy(images).float() / 255, torch.tensor(list(source.labels))]
    return found[0], found[1], found[2], found[3]


def augmented(images: Tensor) -> Tensor:
    """A random crop of the padded image, flipped with probability 1/2."""
    padded = F.pad(images, [PADDING] * 4)
    down, across = torch.randint(0, 2 * PADDING + 1, (2, len(images), 1))
    rows, columns = down + torch.arange(SIZE), across + torch.arange(SIZE)
    flipped = torch.rand(len(images), 1) < 0.5
    columns = torch.where(flipped, columns.flip(1), columns)
    every = torch.arange(len(images))[:, None, None]
    return padded.permute(0, 2, 3, 1)[every, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


def train(images: Tensor, labels: Tensor, rate: float, epochs: int, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = build_model("resnet8", 10, 3, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
    model = model.to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), rate, momentum=0.9, weight_decay=DECAY, nesterov=True)
    steps = epochs * (len(images) // BATCH)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.01, total_iters=steps // 20)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps - steps // 20)
    schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, cosine], [steps // 20])
    for _ in range(epochs):
        order = torch.randperm(len(images))
        for first in range(0, len(images) - BATCH + 1, BATCH):
            chosen = order[first : first + BATCH]
            inputs = augmented(images[chosen]).contiguous(memory_format=torch.channels_last)
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), labels[chosen], label_smoothing=0.1).backward()
            optimizer.step()
            schedule.step()
    return model.eval()


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Top-1 accuracy in percent."""
    answers = torch.cat([model(part).argmax(1) for part in images.split(500)])
    return 100 * int((answers == labels).sum()) / len(labels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", required=True, help="CIFAR-10, as --data.path of conadv train takes it")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="one run of each learning rate per seed")
    parser.add_argument("--epochs", type=int, default=150, help="as in the study")
    parser.add_argument("--out", type=Path, required=True, help="the file to append to")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    lines = arguments.out.read_text().splitlines() if arguments.out.exists() else []
    done = {json.dumps(json.loads(line)["run"]) for line in lines}
    train_images, train_labels, test_images, test_labels = load(arguments.path)
    for seed, rate in product(arguments.seeds, RATES):
        run = {"optimizer": "sgd", "batch": BATCH, "rate": rate, "decay": DECAY}
        run |= {"epochs": arguments.epochs, "seed": seed}
        if json.dumps(run) in done:
            continue
        model = train(train_images, train_labels, rate, arguments.epochs, seed)
        found = {
            "test_top1": accuracy(model, test_images, test_labels),
            "train_top1": accuracy(model, train_images, train_labels),
        }
        with arguments.out.open("a") as file:
            print(json.dumps({"run": run, **found}), file=file, flush=True)


if __name__ == "__main__":
    main()
