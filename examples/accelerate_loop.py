"""Accelerate with concurrent adversarial learning. Comments show the lines of the plain loop."""

import torch
import torch.nn.functional as F
from accelerate import Accelerator

import conadv  # conadv
from digits import net, report, train_loader

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
model = net()
conadv.split_batchnorm(model)  # conadv
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
model, optimizer, loader = accelerator.prepare(model, optimizer, train_loader())
method = conadv.ConAdv(model, F.cross_entropy, conadv.PGD(epsilon=24 / 255), seed=0)  # conadv

for _epoch in range(30):
    for images, labels in loader:
        with accelerator.accumulate(model):
            loss = method.loss((images, labels))  # conadv, was: loss = F.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()

report(model)
torch.save(conadv.plain_state_dict(model), "model.pt")  # conadv, was: torch.save(model.state_dict(), "model.pt")
