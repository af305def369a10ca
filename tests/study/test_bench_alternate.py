"""The alternating measurement, on a clock that only moves when told to."""

from __future__ import annotations

import gc
import time

import pytest

from conadv.study.bench.alternate import Lap, alternate, in_turn, rotated, time_run


class Clock:
    """Time as a test wants it."""

    def __init__(self) -> None:
        self.now = Lap(0.0, 0.0)
        self.ran: list[str] = []

    def __call__(self) -> Lap:
        return self.now

    def takes(self, name: str, wall: float, cpu: float):
        def run() -> None:
            self.ran.append(name)
            self.now = Lap(self.now.wall + wall, self.now.cpu + cpu)

        return run


def test_every_round_runs_each_once_and_begins_with_the_next() -> None:
    clock = Clock()
    alternate({name: clock.takes(name, 1, 1) for name in "ABC"}, 4, warmup=0, clock=clock)
    assert "".join(clock.ran) == "ABCBCACABABC"


def test_laps_are_what_the_clocks_say_of_each() -> None:
    clock = Clock()
    runs = {"fast": clock.takes("fast", 1, 0.5), "slow": clock.takes("slow", 4, 3)}
    assert alternate(runs, 3, clock=clock) == {"fast": [Lap(1, 0.5)] * 3, "slow": [Lap(4, 3)] * 3}


def test_warm_up_is_run_but_not_kept() -> None:
    seconds = iter([100.0, 50.0, 2.0, 3.0])
    laps = in_turn({"A": lambda: Lap(next(seconds), 0.0)}, 2, warmup=2)
    assert [lap.wall for lap in laps["A"]] == [2.0, 3.0]


def test_preparing_comes_before_each_lap_and_is_not_timed() -> None:
    clock = Clock()
    prepare = clock.takes("prepare", 7, 7)
    laps = alternate({name: clock.takes(name, 1, 1) for name in "AB"}, 1, warmup=1, prepare=prepare, clock=clock)
    assert clock.ran == ["prepare", "A", "prepare", "B", "prepare", "B", "prepare", "A"]
    assert laps == {"A": [Lap(1, 1)], "B": [Lap(1, 1)]}


def test_progress_is_told_after_each_round() -> None:
    told: list[tuple[int, int]] = []
    alternate({"A": lambda: None}, 2, warmup=1, tell=lambda done, total: told.append((done, total)))
    assert told == [(1, 3), (2, 3), (3, 3)]


def test_no_garbage_is_collected_meanwhile_and_then_again() -> None:
    seen = []
    alternate({"A": lambda: seen.append(gc.isenabled())}, 1, warmup=0)
    assert seen == [False]
    with pytest.raises(ZeroDivisionError):
        alternate({"A": lambda: 1 / 0}, 1)
    assert gc.isenabled()


def test_the_real_clock_counts_waiting() -> None:
    assert time_run(lambda: time.sleep(0.01)).wall >= 0.01


@pytest.mark.parametrize("items", [[], ["A"]])
def test_rotation_of_one_or_none(items: list[str]) -> None:
    assert rotated(items, 5) == items
