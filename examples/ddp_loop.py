"""Data-parallel training in plain PyTorch: torchrun --nproc-per-node 3 examples/ddp_loop.py"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from conadv.task.data import open_data


def pixels(source):
    images = torch.from_numpy(source.images).permute(0, 3, 1, 2).float() / 255  # in [0, 1]
    return images, torch.from_numpy(source.labels)


def main():
    torch.manual_seed(0)
    digits = open_data("digits", train_size=192)
    data = TensorDataset(*pixels(digits.train))
    sampler = DistributedSampler(data, drop_last=True)
    loader = DataLoader(data, batch_size=96 // dist.get_world_size(), sampler=sampler, drop_last=True)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1, stride=2), nn.BatchNorm2d(32), nn.ReLU(),
        nn.Flatten(), nn.Linear(32 * 4 * 4, 10),
    )  # fmt: skip
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    for epoch in range(30):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            F.cross_entropy(wrapped(images), labels).backward()
            optimizer.step()
    if dist.get_rank() == 0:
        test_images, test_labels = pixels(digits.test)
        model.eval()
        with torch.no_grad():
            correct = (model(test_images).argmax(1) == test_labels).float().mean()
        print(f"test accuracy {100 * correct:.1f} %")
        torch.save(model.state_dict(), "model.pt")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
