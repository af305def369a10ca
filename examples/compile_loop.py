"""torch.compile with concurrent adversarial learning. Comments show the lines of the plain loop."""

import torch
import torch.nn.functional as F

import conadv  # conadv
from digits import net, report, train_loader

model = net()
conadv.split_batchnorm(model)  # conadv
model = torch.compile(model, backend="aot_eager")  # the default backend needs a C++ compiler
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
method = conadv.ConAdv(model, F.cross_entropy, conadv.PGD(epsilon=24 / 255), seed=0)  # conadv

for _epoch in range(15):
    for images, labels in train_loader():
        optimizer.zero_grad()
        loss = method.loss((images, labels))  # conadv, was: loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()

report(model)
state = conadv.plain_state_dict(model)  # conadv, was: state = model._orig_mod.state_dict()
torch.save(state, "model.pt")
