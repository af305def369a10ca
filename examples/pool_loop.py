"""The loop of conadv_loop.py with attackers that may come and go: two processes on this machine generate the twins."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import conadv
from conadv.task.data import open_data


def pixels(source):
    images = torch.from_numpy(source.images).permute(0, 3, 1, 2).float() / 255  # in [0, 1]
    return images, torch.from_numpy(source.labels)


def make_model():
    return conadv.split_batchnorm(
        nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1, stride=2), nn.BatchNorm2d(32), nn.ReLU(),
            nn.Flatten(), nn.Linear(32 * 4 * 4, 10),
        )
    )  # fmt: skip


if __name__ == "__main__":
    torch.manual_seed(0)
    digits = open_data("digits", train_size=200)
    test_images, test_labels = pixels(digits.test)
    loader = DataLoader(TensorDataset(*pixels(digits.train)), batch_size=100, shuffle=True, drop_last=True)

    model = make_model()
    with conadv.ray.Pool(make_model, attackers=2) as pool:
        method = conadv.ConAdv(model, F.cross_entropy, conadv.PGD(epsilon=24 / 255), chunk_size=50, twins=pool)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
        for _epoch in range(30):
            for now, ahead in method.feed(loader):  # `ahead` is what attackers work on
                optimizer.zero_grad()
                losses = method(now, ahead)
                optimizer.step()

    model.eval()
    with torch.no_grad():
        correct = (model(test_images).argmax(1) == test_labels).float().mean()
    print(f"test accuracy {100 * correct:.1f} %")
    torch.save(conadv.plain_state_dict(model), "model.pt")
