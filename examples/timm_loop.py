"""A timm training loop with concurrent adversarial learning. Comments show the lines of the plain loop."""

import timm
import torch
from timm.loss import LabelSmoothingCrossEntropy
from timm.optim import create_optimizer_v2
from timm.utils import ModelEmaV3, NativeScaler

import conadv  # conadv
from digits import report, train_loader

torch.manual_seed(0)
model = timm.create_model("resnet10t", num_classes=10, in_chans=1, stem_width=16, channels=(16, 32, 32, 32))
criterion = LabelSmoothingCrossEntropy(0.1)
conadv.split_batchnorm(model)  # conadv
optimizer = create_optimizer_v2(model, opt="adamw", lr=3e-3, weight_decay=0.05)
average = ModelEmaV3(model, decay=0.9)
method = conadv.ConAdv(model, criterion, conadv.PGD(epsilon=24 / 255), seed=0)  # conadv
scaler = NativeScaler(device="cpu")

for _epoch in range(20):
    for images, labels in train_loader():
        loss = method.loss((images, labels))  # conadv, was: loss = criterion(model(images), labels)
        optimizer.zero_grad()
        scaler(loss, optimizer, clip_grad=1.0, parameters=model.parameters())
        average.update(model)

report(average.module)
state = conadv.plain_state_dict(average.module)  # conadv, was: state = average.module.state_dict()
torch.save(state, "model.pt")
