"""Results computed in advance by a few threads, in order."""

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
    """`map` whose results are made by `workers` threads, at most `ahead` of them before they are asked for.

    An error in a worker is raised here, in its place. However this ends, no worker is left running.
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
