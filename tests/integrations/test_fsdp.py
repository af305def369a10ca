"""FSDP2: sharded weights, also the stale ones that twins are generated with, take the steps of unsharded ones."""

from __future__ import annotations

import pytest
import torch

from support.frameworks import NAMES, assert_equal, sharded
from support.ranks import Pool


@pytest.mark.parametrize("name", NAMES)
def test_fully_shard_takes_the_steps_of_distributed_data_parallel(name: str, pool: Pool) -> None:
    """With a real attack: weights of the wrong age would give other twins."""
    reference = pool.run(2, sharded, name, "ddp", 4)[0]
    for state in pool.run(2, sharded, name, "fsdp", 4):
        for key in (key for key in reference if "running" not in key and "tracked" not in key):
            torch.testing.assert_close(state[key], reference[key], rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", NAMES)
def test_the_state_is_whole_and_resumes(name: str, pool: Pool) -> None:
    """Stale weights are gathered for a file, and shared out again."""
    for one, other in zip(
        pool.run(2, sharded, name, "fsdp", 4), pool.run(2, sharded, name, "fsdp", 4, True), strict=True
    ):
        assert_equal(other, one)
