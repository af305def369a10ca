"""A `map` that computes results in advance, in threads, and yields them in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def ordered_map(
    function: Callable[[Item], Result], items: Iterable[Item], workers: int, ahead: int
) -> Generator[Result]:
    """Map a function over items with `workers` threads, at most `ahead` results in advance.

    An error in a worker is raised when its result is due. No worker is left running, however this ends.
    """
    if workers == 0:
        yield from map(function, items)
        return
    items = iter(items)
    pool = ThreadPoolExecutor(workers, thread_name_prefix="conadv-data")
    waiting: deque[Future[Result]] = deque()
    try:
        waiting.extend(pool.submit(function, item) for item in islice(items, max(ahead, workers)))
        while waiting:
            result = waiting.popleft().result()
            waiting.extend(pool.submit(function, item) for item in islice(items, 1))
            yield result
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
