"""A loop that resumes anywhere, with concurrent adversarial learning. Comments show the lines of the plain loop.

Interrupt it and start it again: the weights at the end are the same, bit for bit.
"""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils.data import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

import conadv  # conadv
from digits import net, report, train_set

FILE = Path("checkpoint.pt")
images = train_set()
sampler = DistributedSampler(images, num_replicas=1, rank=0)  # shuffles by the number of the epoch
loader = StatefulDataLoader(images, batch_size=50, sampler=sampler)

model = net()
conadv.split_batchnorm(model)  # conadv
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
method = conadv.ConAdv(model, F.cross_entropy, conadv.PGD(epsilon=24 / 255), seed=0)  # conadv
parts = {"model": model, "optimizer": optimizer, "loader": loader}
parts["method"] = method  # conadv

first = steps = 0
if FILE.exists():
    saved = torch.load(FILE, weights_only=True)
    first, steps = saved["epoch"], saved["steps"]
    for name, part in parts.items():
        part.load_state_dict(saved[name])

for epoch in range(first, 15):
    sampler.set_epoch(epoch)
    for images, labels in loader:
        optimizer.zero_grad()
        loss = method.loss((images, labels))  # conadv, was: loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        steps += 1
        if steps % 10 == 0:
            state = {name: part.state_dict() for name, part in parts.items()}
            torch.save({"epoch": epoch, "steps": steps, **state}, FILE)
        if sys.argv[1:] == [str(steps)]:
            sys.exit(f"interrupted after step {steps}")

report(model)
torch.save(conadv.plain_state_dict(model), "model.pt")  # conadv, was: torch.save(model.state_dict(), "model.pt")
