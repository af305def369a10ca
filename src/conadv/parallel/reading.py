"""Numbers on their way from the device to the host, which is free to prepare the next step meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor


class Reading:
    """Some numbers of a device, whose copy to the host has begun; the host waits for it only in `numbers`.

    Args:
        values: a tensor of one dimension.
    """

    def __init__(self, values: Tensor) -> None:
        self._there: torch.cuda.Event | None = None
        if values.is_cuda:
            host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            values = host.copy_(values, non_blocking=True)
            self._there = torch.cuda.Event()
            self._there.record()
        self._values = values

    def numbers(self, timeout: float) -> list[float]:
        """The numbers, or a RuntimeError if they are not there within `timeout` seconds."""
        if self._there is not None:
            poll(self._there.query, timeout)
        numbers: list[float] = self._values.tolist()
        return numbers


def poll(is_done: Callable[[], bool], timeout: float) -> None:
    """Ask until something is done, at growing intervals: CUDA's and NCCL's own waits have no timeout."""
    end = time.monotonic() + timeout
    pause = 1e-5
    while not is_done():
        if time.monotonic() > end:
            raise RuntimeError(f"no answer within {timeout:g} seconds")
        time.sleep(pause)
        pause = min(2 * pause, 1e-3)
