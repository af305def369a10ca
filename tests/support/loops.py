"""Training loops as people write them with other libraries, each around a method: the rows of tools/combinations.py.

Every loop takes the name of a method, the number of batches of this process and how many of them make an update, and
returns the trained state. Process r of n takes every n-th batch from the r-th on.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, SequentialSampler, TensorDataset

from conadv import Batch, plain_state_dict
from support.frameworks import (
    MOMENTUM,
    RATE,
    bare_cnn,
    finish_together,
    lightning_module,
    lightning_trainer,
    loader,
    make,
    prepared,
    quiet_ranks,
    sgd,
)
from support.settings import small_batches

State = dict[str, Tensor]
Loop = Callable[[str, int, int], State]
SIZE = 8


def state_of(model: nn.Module) -> State:
    return {name: tensor.clone() for name, tensor in plain_state_dict(model).items()}


def own_batches(count: int) -> list[tuple[Tensor, Tensor]]:
    """Those of this process."""
    rank, ranks = place()
    return small_batches(count * ranks)[rank::ranks]


def all_images(count: int) -> TensorDataset:
    """In an order in which PyTorch's DistributedSampler gives every process its own batches."""
    ranks = [small_batches(count * place()[1])[rank :: place()[1]] for rank in range(place()[1])]
    images, labels = (
        torch.stack([torch.cat([batch[n] for batch in own]) for own in ranks], 1).flatten(0, 1) for n in range(2)
    )
    return TensorDataset(images, labels)


def sampled(count: int) -> DataLoader[Any]:
    """A loader of this process with PyTorch's sampler."""
    images, (rank, ranks) = all_images(count), place()
    return DataLoader(images, batch_size=SIZE, sampler=DistributedSampler(images, ranks, rank, shuffle=False))


@contextmanager
def process_group() -> Iterator[None]:
    """The group of several ranks; a single process needs none."""
    if place()[1] > 1:
        dist.init_process_group("gloo")
    try:
        yield
        finish_together()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def parallel(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model) if dist.is_initialized() else model


def backward(name: str, count: int, accumulate: int, wrap: Callable[[nn.Module], nn.Module] = parallel) -> State:
    """`(method.loss(batch) / k).backward()`, without an exchange between ranks for all but the last of k batches."""
    with process_group():
        model = wrap(prepared(name))
        optimizer, method = sgd(model), make(name, model)
        for number, batch in enumerate(own_batches(count), 1):
            with _waiting(model, number % accumulate > 0):
                (method.loss(batch) / accumulate).backward()
            if number % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()
        return state_of(model)


def compiled(name: str, count: int, accumulate: int) -> State:
    """DistributedDataParallel around torch.compile."""
    return _compiling(name, count, accumulate, lambda model: parallel(torch.compile(model, backend="aot_eager")))


def compiled_outside(name: str, count: int, accumulate: int) -> State:
    """torch.compile around DistributedDataParallel."""
    return _compiling(name, count, accumulate, lambda model: torch.compile(parallel(model), backend="aot_eager"))


def grad_scaler(name: str, count: int, accumulate: int) -> State:
    """`scaler.scale(loss).backward()`, with clipping of the unscaled gradients that changes none of them."""
    with process_group():
        model = parallel(prepared(name))
        optimizer, method = sgd(model), make(name, model)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
        for number, batch in enumerate(own_batches(count), 1):
            with _waiting(model, number % accumulate > 0):
                scaler.scale(method.loss(batch) / accumulate).backward()
            if number % accumulate == 0:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1e9)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
        return state_of(model)


def lightning(name: str, count: int, accumulate: int) -> State:
    """Automatic optimization."""
    with quiet_ranks(), tempfile.TemporaryDirectory() as folder:
        several = {"strategy": "ddp", "devices": 2, "use_distributed_sampler": False} if place()[1] > 1 else {}
        options = {"max_epochs": 1, "accumulate_grad_batches": accumulate, **several}
        module = lightning_module(name)
        lightning_trainer(Path(folder), **options).fit(module, sampled(count))
        return state_of(module.model)


def fabric(name: str, count: int, accumulate: int) -> State:
    with quiet_ranks():
        from lightning.fabric import Fabric

        several = {"strategy": "ddp", "devices": 2} if place()[1] > 1 else {"devices": 1}
        own = Fabric(accelerator="cpu", **several)
        own.launch()
        model = prepared(name)
        model, optimizer = own.setup(model, sgd(model))
        method = make(name, model)
        batches = own.setup_dataloaders(sampled(count), use_distributed_sampler=False)
        for number, batch in enumerate(batches, 1):
            with own.no_backward_sync(model, enabled=number % accumulate > 0):
                own.backward(method.loss(batch) / accumulate)
            if number % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()
        return state_of(model)


def accelerate(name: str, count: int, accumulate: int) -> State:
    with quiet_ranks():
        from accelerate import Accelerator

        own = Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
        model = prepared(name)
        # Accelerate shares out the batches in turn.
        model, optimizer, batches = own.prepare(model, sgd(model), loader(count * place()[1]))
        method = make(name, model)
        for batch in batches:
            with own.accumulate(model):
                own.backward(method.loss(batch))
                optimizer.step()
                optimizer.zero_grad()
        return state_of(model)


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


def timm(name: str, count: int, accumulate: int) -> State:
    """As `train_one_epoch` of timm's train.py, with its optimizer factory, loss scaler and average of the weights."""
    with quiet_ranks(), process_group():
        from timm.optim import create_optimizer_v2
        from timm.utils import ModelEmaV3, NativeScaler

        model = prepared(name)
        optimizer = create_optimizer_v2(model, opt="momentum", lr=RATE, momentum=MOMENTUM, weight_decay=0.0)
        average = ModelEmaV3(model, decay=0.5)
        model = parallel(model)
        scaler, method = NativeScaler(device="cpu"), make(name, model)
        for number, (images, labels) in enumerate(own_batches(count), 1):
            update = number % accumulate == 0
            with _waiting(model, not update):
                loss = method.loss((images, labels)) / accumulate
                scaler(loss, optimizer, clip_grad=1e9, parameters=model.parameters(), need_update=update)
            if update:
                optimizer.zero_grad()
                average.update(model.module if dist.is_initialized() else model, step=number)
        return state_of(model)


def torchvision(name: str, count: int, accumulate: int) -> State:
    """As `train_one_epoch` of torchvision's references/classification, with its moving average of the weights."""
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    with process_group():
        model = parallel(prepared(name))
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=True)
        optimizer, method = sgd(model), make(name, model)
        for number, (images, labels) in enumerate(own_batches(count), 1):
            with _waiting(model, number % accumulate > 0):
                loss = method.loss((images, labels))
                (loss / accumulate).backward()
            if number % accumulate == 0:
                nn.utils.clip_grad_norm_(model.parameters(), 1e9)
                optimizer.step()
                average.update_parameters(model)
                optimizer.zero_grad()
        return state_of(model)


def fsdp(name: str, count: int, accumulate: int) -> State:
    """`fully_shard`; it averages gradients in each backward pass, so that accumulation needs no other call."""
    from torch.distributed.fsdp import fully_shard

    return backward(name, count, accumulate, fully_shard)


def _compiling(name: str, count: int, accumulate: int, wrap: Callable[[nn.Module], nn.Module]) -> State:
    torch._dynamo.reset()
    try:
        return backward(name, count, accumulate, wrap)
    finally:
        torch._dynamo.reset()


def _waiting(model: nn.Module, wait: bool) -> AbstractContextManager[None]:
    """Within, ranks do not exchange gradients: more batches are accumulated first."""
    inner = getattr(model, "_orig_mod", model)
    return inner.no_sync() if wait and isinstance(inner, DistributedDataParallel) else nullcontext()


def place() -> tuple[int, int]:
    """The rank of this process, and how many there are."""
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
