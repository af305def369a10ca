"""Lightning and Fabric: a training_step that returns the method's loss takes the steps of the plain loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from conadv import plain_state_dict
from frameworks import (
    ATTACK,
    NAMES,
    accumulated,
    assert_same,
    expected,
    lightning_module,
    lightning_trainer,
    lightning_two_ranks,
    loader,
    make,
    on_two_ranks,
    one_by_one,
    prepared,
    sgd,
)
from ranks import Pool
from settings import small_batches

pytest.importorskip("lightning", reason="lightning is not installed: make integrations")
# Lightning warns of its own settings; what conadv says stays an error.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.filterwarnings("error:.*ranks differ")]
each = pytest.mark.parametrize("name", NAMES)


@each
def test_automatic_optimization(name: str, tmp_path: Path) -> None:
    module = lightning_module(name)
    lightning_trainer(tmp_path, max_epochs=2).fit(module, loader(3))
    assert_same(module.model, expected(name, one_by_one(small_batches(3) * 2)))


@each
def test_accumulation_and_clipping(name: str, tmp_path: Path) -> None:
    module = lightning_module(name)
    trainer = lightning_trainer(tmp_path, max_epochs=1, accumulate_grad_batches=2, gradient_clip_val=0.05)
    trainer.fit(module, loader(5))
    assert_same(module.model, expected(name, accumulated(small_batches(5)), clip=0.05, divisor=2))


@each
def test_bf16_mixed(name: str, tmp_path: Path) -> None:
    module = lightning_module(name, double=False)
    lightning_trainer(tmp_path, max_epochs=1, precision="bf16-mixed").fit(module, loader(3, dtype=torch.float32))
    assert_same(module.model.double(), expected(name, one_by_one(small_batches(3))), tolerance=0.02)


@each
def test_two_ranks(name: str, tmp_path: Path, pool: Pool) -> None:
    steps = on_two_ranks(small_batches(6))
    reference = dict(expected(name, steps).named_parameters())
    for state in pool.run(2, lightning_two_ranks, name, str(tmp_path), 6):
        for key, value in reference.items():
            torch.testing.assert_close(state[key], value.detach(), rtol=0, atol=1e-10)


@each
def test_fabric(name: str) -> None:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1)
    model = prepared(name)
    model, optimizer = fabric.setup(model, sgd(model))
    method = make(name, model)
    for batch in fabric.setup_dataloaders(loader(4)):
        optimizer.zero_grad()
        fabric.backward(method.loss(batch))
        optimizer.step()
    assert_same(model, expected(name, one_by_one(small_batches(4))))


@each
def test_resuming_in_the_middle_of_an_epoch(name: str, tmp_path: Path) -> None:
    from lightning.pytorch.callbacks import ModelCheckpoint
    from torchdata.stateful_dataloader import StatefulDataLoader

    def fit(module: Any, **options: Any) -> None:
        batches = StatefulDataLoader(loader(4).dataset, batch_size=8)
        where = {"ckpt_path": tmp_path / "stop.ckpt", "weights_only": True} if options.pop("resume", False) else {}
        lightning_trainer(tmp_path, max_epochs=2, **options).fit(module, batches, **where)

    whole, first, second = (lightning_module(name, ATTACK) for _ in range(3))
    fit(whole)
    save = ModelCheckpoint(tmp_path, "stop", every_n_train_steps=6)
    fit(first, max_steps=6, enable_checkpointing=True, callbacks=[save])
    fit(second, resume=True)
    assert second.method.step == 8
    own = plain_state_dict(second.model)
    for key, value in plain_state_dict(whole.model).items():
        assert torch.equal(own[key], value), key
