"""The loop of accelerate_loop.py with attackers that may come and go: two processes generate the twins."""

import torch
import torch.nn.functional as F
from accelerate import Accelerator

import conadv
from digits import net, report, train_loader


def make_model():
    return conadv.split_batchnorm(net())


accelerator = Accelerator(cpu=True)
model = make_model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
model, optimizer, loader = accelerator.prepare(model, optimizer, train_loader())

with conadv.ray.Pool(make_model, attackers=2) as pool:
    method = conadv.ConAdv(model, F.cross_entropy, conadv.PGD(epsilon=24 / 255), seed=0, twins=pool)
    for _epoch in range(30):
        for now, ahead in method.feed(loader):  # `ahead` is what attackers work on
            loss = method.loss(now, ahead)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()

report(model)
torch.save(conadv.plain_state_dict(model), "model.pt")
