"""The module of lightning_loop.py with attackers that may come and go: two processes generate the twins."""

import lightning
import torch
import torch.nn.functional as F

import conadv
from digits import net, report, train_loader


def make_model():
    return conadv.split_batchnorm(net())


class Digits(lightning.LightningModule):
    def __init__(self, pool):
        super().__init__()
        self.model = make_model()
        attack = conadv.PGD(epsilon=24 / 255)
        self.method = conadv.ConAdv(self.model, F.cross_entropy, attack, seed=0, twins=pool)

    def training_step(self, batch, number):
        now, ahead = batch  # `ahead` is what attackers work on
        return self.method.loss(now, ahead)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)

    def on_save_checkpoint(self, checkpoint):
        checkpoint["method"] = self.method.state_dict(all_ranks=True)

    def on_load_checkpoint(self, checkpoint):
        self.method.load_state_dict(checkpoint["method"])


with conadv.ray.Pool(make_model, attackers=2) as pool:
    module = Digits(pool)
    trainer = lightning.Trainer(max_epochs=15, accelerator="cpu", logger=False, enable_progress_bar=False)
    trainer.fit(module, module.method.feed(train_loader()))
report(module.model)
state = conadv.plain_state_dict(module.model)
torch.save(state, "model.pt")
