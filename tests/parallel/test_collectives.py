"""The processes of a run, and one that is alone."""

from __future__ import annotations

import pytest
import torch

import ranks
import tasks
from conadv.parallel.collectives import PeerError, World, joined


def test_alone_everything_vanishes():
    with joined(1) as world:
        assert (world.rank, world.size, world.is_main, world.heartbeats) == (0, 1, True, None)
        tensor = torch.tensor([2.0])
        assert world.all_reduce(tensor) is tensor
        assert world.start_all_reduce(tensor) is None
        assert world.broadcast(b"abc") == b"abc"
        assert world.all_reduce_max(-3) == -3
        world.barrier()


@pytest.mark.parametrize("data", [b"", b"x", bytes(range(256)) * 5000])
def test_every_rank_gets_what_the_leading_one_has(data, pool):
    assert pool.run(4, tasks.collectives, data) == [(data, 14, 6.0)] * 4


def test_what_goes_wrong_while_waiting_is_another_ranks_fault():
    world = World(0, 1, torch.device("cpu"))
    with world.waiting():
        assert world.is_waiting.is_set()
    assert not world.is_waiting.is_set()
    with pytest.raises(PeerError, match="connection lost"), world.waiting():
        raise RuntimeError("connection lost")
    assert world.is_waiting.is_set()  # it never stopped waiting


def test_ranks_that_do_not_come_together_are_an_error_after_the_timeout(monkeypatch):
    with ranks.store() as port:
        for name, value in ranks.environment(0, 2, port).items():
            monkeypatch.setenv(name, value)
        with pytest.raises(PeerError, match="the 2 ranks did not come together"), joined(1):
            pass


def test_when_torchrun_starts_again_nothing_of_before_counts(pool):
    """It keeps the store, with the addresses of processes that are gone."""
    assert pool.run_twice(2, tasks.speak) == [[True, False], [True, False]]
