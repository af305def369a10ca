"""A rank that dies, raises or stops answering ends the run everywhere, and one line says which it was."""

from __future__ import annotations

import signal

import pytest

import tiny

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


def test_a_rank_that_lives_but_keeps_the_others_waiting_is_named(start):
    words = tiny.words(**ENDLESS, layout="clean | adv | attack", timeout=6, model="tiny:Faulty")
    run = start(words, 3, **tiny.fault("sleep", rank=1, forward_pass=20))
    assert run.statuses(0, 2) == [1, 1]
    assert run.complaints() == [
        "error: rank 1 (lane 0, adv) kept the others waiting for too long: raise --timeout if a step may take longer"
    ], run.said()


def test_a_mistake_of_the_user_on_one_rank_is_told_once_with_its_place(start):
    words = tiny.words(**ENDLESS, layout="clean | adv | attack", model="tiny:Faulty")
    run = start(words, 3, **tiny.fault("value", rank=1, forward_pass=20))
    assert run.statuses() == [1, 2, 1]
    assert run.complaints() == ["error: rank 1 (lane 0, adv): this image cannot be read"], run.said()
    assert "Traceback" not in run.said()


def test_a_fault_in_the_code_on_one_rank_is_told_once_with_its_trace(start):
    words = tiny.words(**ENDLESS, layout="clean | adv | attack", model="tiny:Faulty")
    run = start(words, 3, **tiny.fault("bug", rank=2, forward_pass=20))
    assert run.statuses() == [1, 1, 1]
    assert run.complaints() == ["error: rank 2 (lane 0, attack): KeyError: 'a bug'"], run.said()
    assert run.said().count("Traceback") == 1


def test_without_the_store_a_lost_rank_still_ends_the_run(start):
    run = start(tiny.words(**ENDLESS, layout="clean | adv | attack"), 3)
    run.wait_for_step(3)
    run.store.__exit__()
    run.kill(1)
    assert run.statuses() == [1, -signal.SIGKILL, 1]
    assert run.complaints()
    assert set(run.complaints()) == {
        "error: the store of the run stopped answering: it is kept by the launcher, or by rank 0"
    }
