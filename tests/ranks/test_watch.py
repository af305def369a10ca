"""A rank that dies, raises or stops answering ends the run everywhere, and one line says which it was."""

from __future__ import annotations

import signal
import socket

import pytest

from support import tiny
from support.promises import few

ENDLESS = {"epochs": 100_000, "checkpoint.every": 1000}


@pytest.mark.parametrize(("rank", "name"), [(0, "clean"), (1, "adv"), (2, "attack")])
def test_a_killed_rank_of_any_role_is_named(rank, name, start):
    run = start(tiny.words(**ENDLESS, layout="clean | adv | attack"), 3)
    run.wait_for_step(3)
    run.kill(rank)
    statuses = run.statuses()
    assert statuses.pop(rank) == -signal.SIGKILL
    assert statuses == [1, 1]
    assert run.complaints() == [
        f"error: rank {rank} (lane 0, {name}) stopped answering: the run ends on all 3 ranks"
    ], run.said()
    assert "Traceback" not in run.said()


def test_a_killed_rank_of_another_lane_is_named(start):
    run = start(tiny.words(**ENDLESS, layout="clean | adv+attack"), 6)
    run.wait_for_step(3)
    run.kill(5)
    assert run.statuses() == [1, 1, 1, 1, 1, -signal.SIGKILL]
    assert run.complaints() == ["error: rank 5 (lane 2, adv+attack) stopped answering: the run ends on all 6 ranks"], (
        run.said()
    )


def test_two_killed_ranks_are_both_named(start):
    run = start(tiny.words(**ENDLESS, layout="clean | adv | attack"), 3)
    run.wait_for_step(3)
    run.kill(0)
    run.kill(2)
    assert run.statuses(1) == [1]
    (complaint,) = run.complaints()
    assert "rank 0 (lane 0, clean), rank 2 (lane 0, attack) stopped answering" in complaint


def test_a_rank_that_hangs_is_noticed_after_the_timeout(start):
    run = start(tiny.words(**ENDLESS, layout="clean | adv | attack", timeout=6), 3)
    run.wait_for_step(3)
    run.kill(2, signal.SIGSTOP)
    assert run.statuses(0, 1) == [1, 1]
    assert run.complaints() == ["error: rank 2 (lane 0, attack) stopped answering: the run ends on all 3 ranks"], (
        run.said()
    )


@pytest.mark.promise  # waits for a timeout
def test_a_rank_that_lives_but_keeps_the_others_waiting_is_named(start):
    words = tiny.words(**ENDLESS, layout="clean | adv | attack", timeout=6, model="support.tiny:Faulty")
    run = start(words, 3, **tiny.fault("sleep", rank=1, forward_pass=20))
    assert run.statuses(0, 2) == [1, 1]
    assert run.complaints() == [
        "error: rank 1 (lane 0, adv) kept the others waiting for 6 seconds: raise --timeout if a step may take longer"
    ], run.said()


def test_a_mistake_of_the_user_on_one_rank_is_told_once_with_its_place(start):
    words = tiny.words(**ENDLESS, layout="clean | adv | attack", model="support.tiny:Faulty")
    run = start(words, 3, **tiny.fault("value", rank=1, forward_pass=20))
    assert run.statuses() == [2, 2, 2]
    assert run.complaints() == ["error: rank 1 (lane 0, adv): this image cannot be read"], run.said()
    assert "Traceback" not in run.said()


def test_a_fault_in_the_code_on_one_rank_is_told_once_with_its_trace(start):
    words = tiny.words(**ENDLESS, layout="clean | adv | attack", model="support.tiny:Faulty")
    run = start(words, 3, **tiny.fault("bug", rank=2, forward_pass=20))
    assert run.statuses() == [1, 1, 1]
    assert run.complaints() == ["error: rank 2 (lane 0, attack): KeyError: 'a bug'"], run.said()
    assert run.said().count("Traceback") == 1


@pytest.mark.parametrize(
    ("layout", "named"),
    [
        ("none", "rank 1 (lane 1, clean+adv+attack)"),
        ("clean | adv | attack", "rank 0 (lane 0, clean), rank 1 (lane 0, adv)"),  # of two nobody knows which is right
    ],
)
def test_a_rank_whose_weights_differ_in_one_bit_is_named(layout, named, start):
    words = tiny.words(**ENDLESS, layout=layout, model="support.tiny:Faulty")
    run = start(words, 3, **tiny.fault("drift", rank=1, forward_pass=20))
    assert run.statuses() == [1, 1, 1]
    (line,) = run.complaints()
    assert f"the weights of {named} differ from those of other ranks" in line
    assert "Traceback" not in run.said()


@pytest.mark.parametrize("number", few([(signal.SIGKILL,), (signal.SIGSTOP,)], lambda number: number == signal.SIGKILL))
def test_a_lost_rank_that_only_attacks_and_may_lag_is_named(number, start):
    run = start(tiny.words(**ENDLESS, layout="2 clean+adv | attack", delay=3, timeout=6), 3)
    run.wait_for_step(3)
    run.kill(2, number)
    assert run.statuses(0, 1) == [1, 1]
    assert run.complaints() == ["error: rank 2 (lane 0, attack) stopped answering: the run ends on all 3 ranks"], (
        run.said()
    )


def by_hand() -> dict[str, str]:
    """Started without torchrun: rank 0 keeps the store."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return {"TORCHELASTIC_USE_AGENT_STORE": "False", "MASTER_PORT": str(probe.getsockname()[1])}


@pytest.mark.parametrize(
    ("rank", "name", "number"),
    few(
        [(0, "clean", signal.SIGSTOP), (1, "adv", signal.SIGSTOP), (0, "clean", signal.SIGKILL)],
        lambda rank, name, number: number == signal.SIGKILL,
    ),
)
def test_where_rank_0_keeps_the_store_any_rank_that_is_lost_is_named(rank, name, number, start):
    run = start(tiny.words(**ENDLESS, layout="clean | adv | attack", timeout=4), 3, **by_hand())
    run.wait_for_step(3)
    run.kill(rank, number)
    others = [other for other in range(3) if other != rank]
    assert run.statuses(*others, timeout=4 + 15 + 10) == [1, 1]
    line = f"error: rank {rank} (lane 0, {name}) stopped answering: the run ends on all 3 ranks"
    assert set(run.complaints()) == {line}, run.said()
    assert len(run.complaints()) == 1 or rank == 0  # without a store nobody knows who speaks


@pytest.mark.parametrize("rank", [0, 1])
def test_where_rank_0_keeps_the_store_an_error_is_told_once(rank, start):
    words = tiny.words(**ENDLESS, layout="clean | adv | attack", model="support.tiny:Faulty")
    run = start(words, 3, **by_hand(), **tiny.fault("value", rank=rank, forward_pass=20))
    assert run.statuses() == [2, 2, 2]
    (line,) = run.complaints()
    assert line.startswith(f"error: rank {rank} (lane 0, ")
    assert line.endswith("this image cannot be read")


@pytest.mark.promise  # waits for a timeout
def test_a_rank_that_stops_before_all_have_come_ends_the_others(start):
    run = start(tiny.words(**ENDLESS, layout="clean | adv | attack", timeout=3), 3, **by_hand(), STOP_RANK="0")
    assert run.statuses(1, 2) == [1, 1]
    assert all("could not connect" in line for line in run.complaints())
    assert run.complaints()


def test_without_the_store_a_lost_rank_still_ends_the_run(start):
    run = start(tiny.words(**ENDLESS, layout="clean | adv | attack"), 3)
    run.wait_for_step(3)
    run.store.__exit__()
    run.kill(1)
    assert run.statuses() == [1, -signal.SIGKILL, 1]
    assert run.complaints()
    assert set(run.complaints()) == {
        "error: the launcher, which hosts the store of the run, stopped answering: the run ends on all 3 ranks"
    }
