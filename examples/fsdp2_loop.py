"""FSDP2 with concurrent adversarial learning. Comments show the lines of the plain loop.

torchrun --nproc-per-node 2 examples/fsdp2_loop.py
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler

import conadv  # conadv
from digits import net, report, train_set

dist.init_process_group("gloo")
images = train_set()
sampler = DistributedSampler(images)
loader = DataLoader(images, batch_size=25, sampler=sampler, drop_last=True)

model = net()
conadv.split_batchnorm(model)  # conadv
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
method = conadv.ConAdv(model, F.cross_entropy, conadv.PGD(epsilon=24 / 255), seed=0)  # conadv

for epoch in range(15):
    sampler.set_epoch(epoch)
    for images, labels in loader:
        optimizer.zero_grad()
        loss = method.loss((images, labels))  # conadv, was: loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()

report(model)
whole = states.StateDictOptions(full_state_dict=True)
state = conadv.plain_state_dict(model)  # conadv, was: state = states.get_model_state_dict(model, options=whole)
if dist.get_rank() == 0:
    torch.save(state, "model.pt")
dist.destroy_process_group()
