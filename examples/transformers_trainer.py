"""A Transformers Trainer with concurrent adversarial learning. Comments show the lines of the plain trainer."""

import torch
import torch.nn.functional as F
from transformers import Trainer, TrainingArguments

import conadv  # conadv
from digits import net, report, train_set


class Digits(Trainer):
    method = None  # conadv

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        images, labels = inputs["pixel_values"], inputs["labels"]
        if self.method is None:  # conadv
            self.method = conadv.ConAdv(model, F.cross_entropy, conadv.PGD(epsilon=24 / 255))  # conadv
        return self.method.loss((images, labels))  # conadv, was: return F.cross_entropy(model(images), labels)


model = net()
conadv.split_batchnorm(model)  # conadv
trainer = Digits(
    model,
    TrainingArguments(
        "trainer", num_train_epochs=15, per_device_train_batch_size=50, learning_rate=3e-3, use_cpu=True, report_to=[],
        save_strategy="no", disable_tqdm=True, remove_unused_columns=False,
        ddp_find_unused_parameters=False,  # conadv
    ),
    train_dataset=[{"pixel_values": image, "labels": label} for image, label in train_set()],
)  # fmt: skip
trainer.model_accepts_loss_kwargs = False  # the loss is a mean over a batch, not a sum over accumulated ones
trainer.train()
report(model)
torch.save(conadv.plain_state_dict(model), "model.pt")  # conadv, was: torch.save(model.state_dict(), "model.pt")
