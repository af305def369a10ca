"""A rank that dies, raises or stops answering ends the run everywhere, and one line says which it was."""

from __future__ import annotations

import signal
import socket

import pytest

from support import tiny
from support.promises import few

ENDLESS = {"epochs": 100_000, "checkpoint.every": 1000}


ADVICE = " (raise the timeout if a step may take longer than {} seconds)"
ROLES = "clean | adv | attack"
LAGS = "2 clean+adv | attack"  # with a delay of 3, the last rank may
# layout, ranks, signal, and the ranks that get it, by their names; the rest waits for a timeout
LOST = [
    (ROLES, 3, signal.SIGKILL, {0: "rank 0 (lane 0, clean)"}),
    (ROLES, 3, signal.SIGKILL, {1: "rank 1 (lane 0, adv)"}),
    (ROLES, 3, signal.SIGKILL, {2: "rank 2 (lane 0, attack)"}),
    (ROLES, 3, signal.SIGKILL, {0: "rank 0 (lane 0, clean)", 2: "rank 2 (lane 0, attack)"}),
    ("clean | adv+attack", 6, signal.SIGKILL, {5: "rank 5 (lane 2, adv+attack)"}),
    (LAGS, 3, signal.SIGKILL, {2: "rank 2 (lane 0, attack)"}),
    (ROLES, 3, signal.SIGSTOP, {2: "rank 2 (lane 0, attack)"}),
    (LAGS, 3, signal.SIGSTOP, {2: "rank 2 (lane 0, attack)"}),
]


@pytest.mark.parametrize(
    ("layout", "size", "number", "lost"),
    few(LOST, lambda layout, size, number, lost: number == signal.SIGKILL or layout == ROLES),
)
def test_lost_ranks_of_any_role_are_named(layout, size, number, lost, start):
    run = start(tiny.words(**ENDLESS, layout=layout, delay=3 if layout == LAGS else 1, timeout=6), size)
    run.wait_for_step(3)
    for rank in lost:
        run.kill(rank, number)
    others = [rank for rank in range(size) if rank not in lost]
    assert run.statuses(*others) == [1] * len(others)
    named, advice = ", ".join(lost.values()), ADVICE.format(6) * (number == signal.SIGSTOP)
    line = f"error: {named} stopped answering: the run ends on all {size} ranks{advice}"
    assert run.complaints() == [line], run.said()
    assert "Traceback" not in run.said()


@pytest.mark.promise  # waits for a timeout
def test_a_rank_that_lives_but_keeps_the_others_waiting_is_named(start):
    words = tiny.words(**ENDLESS, layout=ROLES, timeout=6, model="support.tiny:Faulty")
    run = start(words, 3, **tiny.fault("sleep", rank=1, forward_pass=20))
    assert run.statuses() == [1, -signal.SIGKILL, 1]
    line = f"error: rank 1 (lane 0, adv) stopped answering: the run ends on all 3 ranks{ADVICE.format(6)}"
    assert run.complaints() == [line], run.said()


@pytest.mark.parametrize(
    ("kind", "status", "line"),
    [
        ("value", 2, "error: rank 1 (lane 0, adv): this image cannot be read"),
        ("bug", 1, "error: rank 1 (lane 0, adv): KeyError: 'a bug'"),
    ],
)
def test_an_error_on_one_rank_is_told_once_and_a_bug_with_its_trace(kind, status, line, start):
    words = tiny.words(**ENDLESS, layout=ROLES, model="support.tiny:Faulty")
    run = start(words, 3, **tiny.fault(kind, rank=1, forward_pass=20))
    assert run.statuses() == [status] * 3
    assert run.complaints() == [line], run.said()
    assert run.said().count("Traceback") == (kind == "bug")


@pytest.mark.parametrize(
    ("layout", "named"),
    [
        ("none", "rank 1 (lane 1, clean+adv+attack)"),
        ("clean | adv | attack", "rank 1 (lane 0, adv)"),
    ],
)
def test_a_rank_whose_weights_differ_in_one_bit_is_named(layout, named, start):
    words = tiny.words(**ENDLESS, layout=layout, model="support.tiny:Faulty")
    run = start(words, 3, **tiny.fault("drift", rank=1, forward_pass=20))
    assert run.statuses() == [1, 1, 1]
    (line,) = run.complaints()
    assert f"the weights on {named} differ from those on rank 0" in line
    assert "Traceback" not in run.said()


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
    run = start(tiny.words(**ENDLESS, layout=ROLES, timeout=4), 3, **by_hand())
    run.wait_for_step(3)
    run.kill(rank, number)
    others = [other for other in range(3) if other != rank]
    assert run.statuses(*others, timeout=4 + 15 + 10) == [1, 1]
    line = f"error: rank {rank} (lane 0, {name}) stopped answering: the run ends on all 3 ranks"
    asked = number == signal.SIGSTOP and rank > 0  # the store, which answers: it is known that the others waited
    assert set(run.complaints()) == {line + ADVICE.format(4) * asked}, run.said()
    assert len(run.complaints()) == 1 or rank == 0  # without a store nobody knows who speaks


@pytest.mark.parametrize("rank", [0, 1])
def test_where_rank_0_keeps_the_store_an_error_is_told_once(rank, start):
    words = tiny.words(**ENDLESS, layout=ROLES, model="support.tiny:Faulty")
    run = start(words, 3, **by_hand(), **tiny.fault("value", rank=rank, forward_pass=20))
    assert run.statuses() == [2, 2, 2]
    (line,) = run.complaints()
    assert line.startswith(f"error: rank {rank} (lane 0, ")
    assert line.endswith("this image cannot be read")


@pytest.mark.promise  # waits for a timeout
def test_a_rank_that_stops_before_all_have_come_ends_the_others(start):
    run = start(tiny.words(**ENDLESS, layout=ROLES, timeout=3), 3, **by_hand(), STOP_RANK="0")
    assert run.statuses(1, 2) == [1, 1]
    assert all("could not connect" in line for line in run.complaints())
    assert run.complaints()


def test_without_the_store_a_lost_rank_still_ends_the_run(start):
    run = start(tiny.words(**ENDLESS, layout=ROLES), 3)
    run.wait_for_step(3)
    run.store.__exit__()
    run.kill(1)
    assert run.statuses() == [1, -signal.SIGKILL, 1]
    assert run.complaints()
    assert set(run.complaints()) == {
        "error: the launcher, which hosts the store of the run, stopped answering: the run ends on all 3 ranks"
    }
