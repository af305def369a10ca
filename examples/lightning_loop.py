"""A LightningModule with concurrent adversarial learning; the lines that a plain one does not have are marked."""

import lightning
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import conadv
from conadv.task.data import open_data


class Digits(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 8 * 8, 10)
        )
        conadv.split_batchnorm(self.model)  # conadv
        self.method = conadv.ConAdv(self.model, F.cross_entropy, conadv.PGD(epsilon=24 / 255), seed=0)  # conadv

    def training_step(self, batch, number):
        return self.method.loss(batch)  # conadv: was F.cross_entropy(self.model(images), labels)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)

    def on_save_checkpoint(self, checkpoint):  # conadv: resume exactly
        checkpoint["method"] = self.method.state_dict(all_ranks=True)

    def on_load_checkpoint(self, checkpoint):  # conadv
        self.method.load_state_dict(checkpoint["method"])


torch.manual_seed(0)
source = open_data("digits", train_size=200)
images, test_images = (
    torch.from_numpy(part.images).permute(0, 3, 1, 2).float() / 255 for part in (source.train, source.test)
)
labels, test_labels = (torch.from_numpy(part.labels) for part in (source.train, source.test))
loader = DataLoader(TensorDataset(images, labels), batch_size=50, shuffle=True, drop_last=True)

module = Digits()
lightning.Trainer(max_epochs=15, accelerator="cpu", logger=False, enable_progress_bar=False).fit(module, loader)
module.eval()
with torch.no_grad():
    correct = (module.model(test_images).argmax(1) == test_labels).float().mean()
print(f"test accuracy {100 * correct:.1f} %")
torch.save(conadv.plain_state_dict(module.model), "model.pt")  # conadv
