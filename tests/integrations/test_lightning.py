"""Lightning and Fabric: a training_step that returns the method's loss takes the steps of the plain loop."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from support.frameworks import (
    NAMES,
    accumulated,
    assert_equal,
    assert_same,
    expected,
    lightning_module,
    lightning_resumed,
    lightning_trainer,
    loader,
    one_by_one,
)
from support.ranks import Pool
from support.settings import small_batches

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
@pytest.mark.parametrize("ranks", [1, 2])
def test_resuming_in_the_middle_of_an_epoch(name: str, ranks: int, tmp_path: Path, pool: Pool) -> None:
    whole = pool.run(ranks, lightning_resumed, name, str(tmp_path / "whole"), None)
    resumed = pool.run(ranks, lightning_resumed, name, str(tmp_path / "resumed"), 6)
    for one, other in zip(whole, resumed, strict=True):
        assert_equal(other, one)
