"""Stopped in the middle of an epoch, other libraries' loops resume bit for bit; sharded weights take the same steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

from support import loops
from support.frameworks import (
    ATTACK,
    NAMES,
    lightning_module,
    lightning_trainer,
    loader,
    make,
    prepared,
    quiet_ranks,
    sgd,
)
from support.ranks import Pool
from support.settings import small_batches

# Libraries warn of their own settings; what conadv says stays an error.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.filterwarnings("error:.*ranks differ")]
each = pytest.mark.parametrize("name", NAMES)


def lightning_resumed(name: str, folder: str, stop: int | None) -> loops.State:
    """Two epochs of four batches on each rank, stopped and resumed by new objects after `stop` steps."""
    from lightning.pytorch.callbacks import ModelCheckpoint
    from torchdata.stateful_dataloader import StatefulDataLoader

    rank, ranks = loops.place()
    several = {"strategy": "ddp", "devices": ranks, "use_distributed_sampler": False} if ranks > 1 else {}

    def fit(**options: Any) -> Any:
        images = loader(4 * ranks).dataset
        own = DistributedSampler(images, num_replicas=ranks, rank=rank, shuffle=False)
        where = {"ckpt_path": Path(folder, "stop.ckpt"), "weights_only": True} if options.pop("resume", False) else {}
        module = lightning_module(name, ATTACK)
        trainer = lightning_trainer(Path(folder), **{"max_epochs": 2, **several, **options})
        trainer.fit(module, StatefulDataLoader(images, batch_size=8, sampler=own), **where)
        return module

    with quiet_ranks():
        if stop is not None:
            save = ModelCheckpoint(folder, "stop", every_n_train_steps=stop)
            fit(max_steps=stop, enable_checkpointing=True, callbacks=[save])
        module = fit(resume=stop is not None)
        assert module.method.step == 8
        return loops.state_of(module.model)


class Whole:
    """The method's state of all ranks, for Accelerate, which lets only rank 0 write custom objects."""

    def __init__(self, method: Any) -> None:
        self._method = method

    def state_dict(self) -> loops.State:
        return self._method.state_dict(all_ranks=True)

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self._method.load_state_dict(state)


def accelerate_resumed(name: str, folder: str, stop: int | None) -> loops.State:
    """One epoch of four batches on each rank, stopped and resumed by new objects after `stop` steps."""
    with quiet_ranks():
        if stop is not None:
            _accelerate_some(name, folder, stop, resumes=False)
        return _accelerate_some(name, folder, None, resumes=stop is not None)


def _accelerate_some(name: str, folder: str, stop: int | None, resumes: bool) -> loops.State:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState
    from accelerate.utils import DataLoaderConfiguration

    AcceleratorState._reset_state()
    GradientState._reset_state()
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration())
    model = prepared(name)
    model, optimizer, batches = accelerator.prepare(model, sgd(model), loader(4 * loops.place()[1]))
    method = make(name, model, ATTACK, seed=3)
    accelerator.register_for_checkpointing(Whole(method))
    if resumes:
        accelerator.load_state(folder)
        batches = accelerator.skip_first_batches(batches, method.step)
    for now, ahead in method.feed(batches):
        accelerator.backward(method.loss(now, ahead))
        optimizer.step()
        optimizer.zero_grad()
        if method.step == stop:
            accelerator.save_state(folder)
            break
    return loops.state_of(model)


def sharded(name: str, kind: str, count: int, resumed: bool = False) -> loops.State:
    """Steps with a real attack on two ranks, by FSDP2 ("fsdp") or by DistributedDataParallel ("ddp").

    `resumed`: another method takes over after half of them, with the state of the first as a file has it.
    """
    with loops.process_group():
        model = prepared(name)
        if kind == "fsdp":
            fully_shard(model[3])
        model = fully_shard(model) if kind == "fsdp" else DistributedDataParallel(model)
        optimizer = sgd(model)
        method = make(name, model, ATTACK, seed=3)
        for number, batch in enumerate(small_batches(count, seed=dist.get_rank())):
            if resumed and number == count // 2:
                kept = safetensors.torch.load(safetensors.torch.save(method.state_dict(all_ranks=True)))
                method = make(name, model, ATTACK, seed=3)
                method.load_state_dict(kept)
            optimizer.zero_grad()
            method.loss(batch).backward()
            optimizer.step()
        return loops.state_of(model)


@each
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(
    ("library", "loop", "stop"), [("lightning", lightning_resumed, 6), ("accelerate", accelerate_resumed, 2)]
)
def test_on_one_rank_and_on_two(library: str, loop: Any, stop: int, size: int, name: str, tmp_path: Path, pool: Pool):
    pytest.importorskip(library, reason=f"{library} is not installed: make integrations")
    whole = pool.run(size, loop, name, str(tmp_path / "whole"), None)
    resumed = pool.run(size, loop, name, str(tmp_path / "resumed"), stop)
    torch.testing.assert_close(resumed, whole, rtol=0, atol=0)


@each
def test_fully_shard_takes_the_steps_of_distributed_data_parallel_and_resumes(name: str, pool: Pool) -> None:
    """With a real attack: weights of the wrong age would give other twins. Its state is whole, as a file has it."""
    reference = pool.run(2, sharded, name, "ddp", 4)[0]
    resumed = pool.run(2, sharded, name, "fsdp", 4, True)
    for state, other in zip(pool.run(2, sharded, name, "fsdp", 4), resumed, strict=True):
        for key in (key for key in reference if "running" not in key and "tracked" not in key):
            torch.testing.assert_close(state[key], reference[key], rtol=0, atol=1e-10)
        torch.testing.assert_close(other, state, rtol=0, atol=0)
