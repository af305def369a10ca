"""Fabric with concurrent adversarial learning. Comments show the lines of the plain loop."""

import torch
import torch.nn.functional as F
from lightning.fabric import Fabric

import conadv  # conadv
from digits import net, report, train_loader

fabric = Fabric(accelerator="cpu", devices=1)
model = net()
conadv.split_batchnorm(model)  # conadv
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
model, optimizer = fabric.setup(model, optimizer)
method = conadv.ConAdv(model, F.cross_entropy, conadv.PGD(epsilon=24 / 255), seed=0)  # conadv
loader = fabric.setup_dataloaders(train_loader())

for _epoch in range(15):
    for images, labels in loader:
        optimizer.zero_grad()
        loss = method.loss((images, labels))  # conadv, was: loss = F.cross_entropy(model(images), labels)
        fabric.backward(loss)
        optimizer.step()

report(model)
torch.save(conadv.plain_state_dict(model), "model.pt")  # conadv, was: torch.save(model.state_dict(), "model.pt")
