"""What the examples with other libraries share: the embedded digits, a small network, and its test accuracy."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from conadv.task.data import open_data


def images_of(source):
    images = torch.from_numpy(source.images).permute(0, 3, 1, 2).float() / 255  # in [0, 1]
    return TensorDataset(images, torch.from_numpy(source.labels))


def train_set():
    return images_of(open_data("digits", train_size=200).train)


def train_loader():
    return DataLoader(train_set(), batch_size=50, shuffle=True, drop_last=True)


def net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 8 * 8, 10)
    )


def report(model):
    images, labels = images_of(open_data("digits").test).tensors
    model.eval()
    with torch.no_grad():
        correct = (model(images).argmax(1) == labels).float().mean()
    print(f"test accuracy {100 * correct:.1f} %")
