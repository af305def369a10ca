"""A LightningModule with concurrent adversarial learning. Comments show the lines of the plain module."""

import lightning
import torch
import torch.nn.functional as F

import conadv  # conadv
from digits import net, report, train_loader


class Digits(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = net()
        conadv.split_batchnorm(self.model)  # conadv
        self.method = conadv.ConAdv(self.model, F.cross_entropy, conadv.PGD(epsilon=24 / 255), seed=0)  # conadv

    def training_step(self, batch, number):
        images, labels = batch
        return self.method.loss((images, labels))  # conadv, was: return F.cross_entropy(self.model(images), labels)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)

    def on_save_checkpoint(self, checkpoint):  # conadv
        checkpoint["method"] = self.method.state_dict(all_ranks=True)  # conadv

    def on_load_checkpoint(self, checkpoint):  # conadv
        self.method.load_state_dict(checkpoint["method"])  # conadv


module = Digits()
trainer = lightning.Trainer(max_epochs=15, accelerator="cpu", logger=False, enable_progress_bar=False)
trainer.fit(module, train_loader())
report(module.model)
state = conadv.plain_state_dict(module.model)  # conadv, was: state = module.model.state_dict()
torch.save(state, "model.pt")
