"""A method within other libraries, and the plain loop whose steps it has to take; as tasks for rank processes too.

With epsilon 0 and no random start the twins are the images. BatchNorm has no weights here, so both branches do the
same, and every shared weight must take the steps of the plain loop, which `expected` writes out by hand.
"""

from __future__ import annotations

import copy
import os
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from conadv import PGD, ConAdv, Recycled, Vanilla, split_batchnorm
from support import torchvision_ops
from support.settings import small_batches, small_cnn

Item = tuple[Tensor, Tensor]
NO_ATTACK, ATTACK = PGD(0, random_start=0), PGD(8 / 255, random_start=0.5)
RATE, MOMENTUM = 0.1, 0.9
NAMES = ("vanilla", "disadv", "conadv", "recycled")
# The warnings of conadv that a right loop never hears.
ALARMS = ".*(ranks differ|not backpropagated|without a call|adds those gradients|with a method|did not change)"


def bare_cnn() -> nn.Module:
    """Without weights in BatchNorm."""
    return small_cnn(norm=partial(nn.BatchNorm2d, affine=False))


def make(name: str, model: nn.Module, attack: PGD = NO_ATTACK, **options: Any) -> Any:
    if name == "vanilla":
        return Vanilla(model, F.cross_entropy, **options)
    if name == "recycled":
        return Recycled(model, F.cross_entropy, attack, **options)
    return ConAdv(model, F.cross_entropy, attack, delay=int(name != "disadv"), **options)


def prepared(name: str, model: nn.Module | None = None) -> nn.Module:
    """The model with the branches that a method needs."""
    model = bare_cnn() if model is None else model
    return model if name == "vanilla" else split_batchnorm(model)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)


def loader(count: int) -> DataLoader[Any]:
    images, labels = zip(*small_batches(count), strict=True)
    return DataLoader(TensorDataset(torch.cat(images), torch.cat(labels)), batch_size=8)


def expected(name: str, steps: Sequence[Sequence[tuple[int, Item]]]) -> nn.Module:
    """The plain loop. A step is the mean over some (rank, batch), of several ranks or accumulated on one."""
    model = bare_cnn()
    optimizer = sgd(model)
    before: dict[int, Item] = {}
    for parts in steps:
        optimizer.zero_grad()
        for rank, (images, labels) in parts:
            loss = F.cross_entropy(model(images), labels)
            own = copy.deepcopy(dict(model.named_buffers()))
            if name == "recycled":
                other = before.get(rank, (images, labels))
                loss = (loss + F.cross_entropy(model(other[0]), other[1])) / 2
                before[rank] = images, labels
            (loss / len(parts)).backward()
            for key, buffer in model.named_buffers():  # the pass of the earlier batch left no trace in them
                buffer.copy_(own[key])
        optimizer.step()
    return model


def lightning_module(name: str, attack: PGD = NO_ATTACK) -> Any:
    torchvision_ops.declare()
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = prepared(name)
            self.method = make(name, self.model, attack, seed=3)

        def training_step(self, batch: Any, number: int) -> Tensor:
            return self.method.loss(batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return sgd(self.model)

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["method"] = self.method.state_dict(all_ranks=True)

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            self.method.load_state_dict(checkpoint["method"])

    return Module()


def lightning_trainer(folder: Path, **options: Any) -> Any:
    import lightning

    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "barebones": False}
    own = {"accelerator": "cpu", "devices": 1, "default_root_dir": folder}
    return lightning.Trainer(**{**quiet, **own, "enable_checkpointing": False, **options})


def finish_together() -> None:
    """Wait until every rank is done: one that closes its connections earlier breaks the last exchange of another."""
    if dist.is_initialized():
        with suppress(RuntimeError):  # that another rank has left after this wait is no failure
            dist.barrier()
        # Gloo's thread needs the interpreter's lock to free what the barrier held. A DistributedDataParallel that is
        # freed after its group was destroyed waits for that thread, with the lock: a deadlock of PyTorch's.
        time.sleep(0.05)


@contextmanager
def quiet_ranks() -> Iterator[None]:
    """Leave no process group and no singleton behind for the next task."""
    torchvision_ops.declare()
    environment = dict(os.environ)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", ALARMS)
        try:
            yield
            finish_together()
        finally:
            os.environ.clear()  # libraries set and remove variables
            os.environ.update(environment)
            if state := sys.modules.get("accelerate.state"):
                state.AcceleratorState._reset_state(reset_partial_state=True)
                state.GradientState._reset_state()
            if dist.is_initialized():
                dist.destroy_process_group()
