"""The loop of ddp_loop.py with attackers that may come and go: torchrun --nproc-per-node 2 examples/ddp_pool.py"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import conadv
from conadv.task.data import open_data


def pixels(source):
    images = torch.from_numpy(source.images).permute(0, 3, 1, 2).float() / 255  # in [0, 1]
    return images, torch.from_numpy(source.labels)


def make_model():
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1, stride=2), nn.BatchNorm2d(32), nn.ReLU(),
        nn.Flatten(), nn.Linear(32 * 4 * 4, 10),
    )  # fmt: skip
    return conadv.split_batchnorm(model)


def main(pool):
    torch.manual_seed(0)
    digits = open_data("digits", train_size=192)
    data = TensorDataset(*pixels(digits.train))
    sampler = DistributedSampler(data, drop_last=True)
    loader = DataLoader(data, batch_size=96 // dist.get_world_size(), sampler=sampler, drop_last=True)
    model = make_model()
    wrapped = DistributedDataParallel(model)
    method = conadv.ConAdv(wrapped, F.cross_entropy, conadv.PGD(epsilon=24 / 255), twins=pool)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    for epoch in range(30):
        sampler.set_epoch(epoch)
        for now, ahead in method.feed(loader):  # `ahead` is what attackers work on
            optimizer.zero_grad()
            method(now, ahead)
            optimizer.step()
    if dist.get_rank() == 0:
        test_images, test_labels = pixels(digits.test)
        model.eval()
        with torch.no_grad():
            correct = (model(test_images).argmax(1) == test_labels).float().mean()
        print(f"test accuracy {100 * correct:.1f} %")
        torch.save(conadv.plain_state_dict(model), "model.pt")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    with conadv.ray.Pool(make_model, attackers=2) as pool:  # the ranks share the attackers out
        main(pool)
    dist.destroy_process_group()
