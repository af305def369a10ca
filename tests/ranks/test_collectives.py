"""The processes of a run, and one that is alone."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from conadv.ranks.collectives import PeerError, World, joined
from support import ranks, tasks


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
        assert world.is_waiting
    assert not world.is_waiting
    assert world.waited() == 0.0
    with pytest.raises(PeerError, match="connection lost"), world.waiting():
        raise RuntimeError("connection lost")
    assert world.is_waiting  # it never stopped waiting
    assert world.waited() > 0.0


class AsyncWork:
    """NCCL's: waiting orders streams and returns at once, whether or not the others ever answer."""

    def __init__(self, polls_until_done: float) -> None:
        self.left = polls_until_done
        self.waits = 0

    def is_completed(self) -> bool:
        self.left -= 1
        return self.left < 0

    def wait(self) -> bool:
        self.waits += 1
        return True


def test_where_a_wait_does_not_block_a_rank_that_does_not_answer_is_noticed():
    world = World(0, 2, torch.device("cpu"), timeout=0.2, polls=True)
    with pytest.raises(PeerError, match=r"no answer within 0\.2 seconds"):
        world.wait(AsyncWork(polls_until_done=float("inf")))
    assert world.is_waiting


def test_where_a_wait_does_not_block_it_is_polled_for():
    world = World(0, 2, torch.device("cpu"), timeout=20, polls=True)
    work = AsyncWork(polls_until_done=5)
    world.wait(work)
    assert (work.left, work.waits) == (-1, 1)


def test_so_it_is_for_tensors_of_a_rank_0_that_does_not_send_them(monkeypatch):
    """A broadcast that blocks would wait for as long as NCCL does."""
    never = AsyncWork(polls_until_done=float("inf"))
    monkeypatch.setattr(dist, "broadcast", lambda message, source, async_op=False: never if async_op else None)
    with pytest.raises(PeerError, match=r"no answer within 0\.2 seconds"):
        World(1, 2, torch.device("cpu"), timeout=0.2, polls=True).broadcast_tensors([torch.ones(2)])


def test_ranks_that_do_not_come_together_are_an_error_after_the_timeout(monkeypatch):
    with ranks.store() as port:
        for name, value in ranks.environment(0, 2, port).items():
            monkeypatch.setenv(name, value)
        with pytest.raises(PeerError, match="the 2 ranks could not connect"), joined(1):
            pass


def test_when_torchrun_starts_again_nothing_of_before_counts(pool):
    """It keeps the store, with the addresses of processes that are gone."""
    assert pool.run_twice(2, tasks.speak) == [[True, False], [True, False]]


def test_nodes_that_counted_another_number_of_restarts_come_together(pool):
    """As after the loss of a rank on one of two nodes: only its own agent counts a restart."""
    assert pool.run_counted([0, 0, 1, 1], tasks.speak) == [True, False, False, False]
