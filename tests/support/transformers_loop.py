"""The Trainer of Transformers around a method; see loops.py."""

from __future__ import annotations

import tempfile
from typing import Any

from torch import Tensor, nn
from torch.utils.data import SequentialSampler

from conadv import Batch
from support.frameworks import RATE, bare_cnn, make, prepared, quiet_ranks, sgd
from support.loops import SIZE, State, place, state_of
from support.settings import small_batches


class WithOptions(nn.Module):
    """A model that accepts any keyword, as those of Transformers do, whose Trainer treats it in another way then."""

    def __init__(self) -> None:
        super().__init__()
        self.net = bare_cnn()

    def forward(self, pixel_values: Tensor, **options: Any) -> Tensor:
        return self.net(pixel_values)


def transformers(name: str, count: int, accumulate: int, model: nn.Module | None = None, **arguments: Any) -> State:
    """The `compute_loss` of a Trainer."""
    with quiet_ranks(), tempfile.TemporaryDirectory() as folder:
        from transformers import Trainer, TrainingArguments

        class Own(Trainer):
            method: Any = None

            def compute_loss(self, model: nn.Module, inputs: Any, **_: Any) -> Tensor:
                if self.method is None:  # with the model as the Trainer wrapped it
                    self.method = make(name, model, batch=lambda item: Batch(item["pixel_values"], item["labels"]))
                return self.method.loss(inputs)

            def _get_train_sampler(self, *_: Any) -> SequentialSampler:
                return SequentialSampler(self.train_dataset)

        quiet = {
            "report_to": [],
            "save_strategy": "no",
            "logging_strategy": "no",
            "disable_tqdm": True,
            "remove_unused_columns": False,
        }
        own = {"use_cpu": True, "per_device_train_batch_size": SIZE, "gradient_accumulation_steps": accumulate}
        fixed = {"num_train_epochs": 1, "lr_scheduler_type": "constant", "max_grad_norm": 0.0, "learning_rate": RATE}
        several = {"ddp_find_unused_parameters": False, "ddp_backend": "gloo"} if place()[1] > 1 else {}
        model = prepared(name, model)
        trainer = Own(
            model,
            TrainingArguments(folder, **quiet, **own, **fixed, **{**several, **arguments}),
            train_dataset=[
                {"pixel_values": image, "labels": label}
                for batch in small_batches(count * place()[1])
                for image, label in zip(*batch, strict=True)
            ],
            optimizers=(sgd(model), None),
        )
        trainer.model_accepts_loss_kwargs = False  # or it takes the loss for a sum over all accumulated batches
        trainer.train()
        return {key.removeprefix("net."): value for key, value in state_of(model).items()}


def transformers_with_options(name: str, count: int, accumulate: int) -> State:
    return transformers(name, count, accumulate, WithOptions())
