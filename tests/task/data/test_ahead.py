"""`ordered_map` keeps the order, is bounded, and ends when its consumer does."""

from __future__ import annotations

import threading
import time
from itertools import count

import pytest

from conadv.task.data.ahead import ordered_map


@pytest.mark.parametrize("workers", [0, 1, 4])
def test_results_keep_the_order_whoever_is_first(workers: int) -> None:
    def work(number: int) -> int:
        time.sleep(0.01 if number % 3 == 0 else 0)
        return number * number

    assert list(ordered_map(work, range(20), workers, 8)) == [n * n for n in range(20)]
    assert list(ordered_map(work, [], workers, 8)) == []


def test_no_more_is_made_than_was_allowed() -> None:
    asked = []

    def items():
        for number in count():
            asked.append(number)
            yield number

    results = ordered_map(lambda number: number, items(), 2, 5)
    next(results)
    assert len(asked) == 6
    next(results)
    assert len(asked) == 7
    results.close()


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_an_error_comes_in_its_place_and_nothing_after_it(workers: int) -> None:
    def work(number: int) -> int:
        if number == 4:
            raise ValueError("four")
        return number

    results = ordered_map(work, count(), workers, 6)
    assert [next(results) for _ in range(4)] == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="four"):
        next(results)
    assert list(results) == []


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_of_the_items_reaches_the_consumer(workers: int) -> None:
    def items():
        yield 1
        raise KeyError("no more")

    with pytest.raises(KeyError, match="no more"):
        list(ordered_map(lambda number: number, items(), workers, 4))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("conadv-data")]


def test_work_that_was_not_begun_is_dropped_when_the_consumer_goes() -> None:
    done, gate = [], threading.Event()

    def work(number: int) -> int:
        if number:
            gate.wait(5)
        done.append(number)
        return number

    results = ordered_map(work, range(50), 1, 40)
    assert next(results) == 0
    threading.Timer(0.05, gate.set).start()
    results.close()
    assert len(done) <= 2
