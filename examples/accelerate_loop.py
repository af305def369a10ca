"""A loop with Accelerate and concurrent adversarial learning; the lines that a plain one does not have are marked."""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import conadv
from conadv.task.data import open_data

torch.manual_seed(0)
source = open_data("digits", train_size=200)
images, test_images = (
    torch.from_numpy(part.images).permute(0, 3, 1, 2).float() / 255 for part in (source.train, source.test)
)
labels, test_labels = (torch.from_numpy(part.labels) for part in (source.train, source.test))
loader = DataLoader(TensorDataset(images, labels), batch_size=50, shuffle=True, drop_last=True)

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
model = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 8 * 8, 10)
)
conadv.split_batchnorm(model)  # conadv: before the optimizer
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
method = conadv.ConAdv(model, F.cross_entropy, conadv.PGD(epsilon=24 / 255), seed=0)  # conadv: with the prepared model

for _epoch in range(30):
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(method.loss(batch))  # conadv: was F.cross_entropy(model(images), labels)
            optimizer.step()
            optimizer.zero_grad()

model.eval()
with torch.no_grad():
    correct = (model(test_images).argmax(1) == test_labels).float().mean()
print(f"test accuracy {100 * correct:.1f} %")
torch.save(conadv.plain_state_dict(model), "model.pt")  # conadv
