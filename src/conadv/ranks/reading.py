"""Copy numbers from the device to the host without blocking the host."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor


class Reading:
    """A copy of a tensor to the host that has started; the host waits for it only in `numbers`.

    Args:
        values: a tensor with one dimension.
    """

    def __init__(self, values: Tensor) -> None:
        self._copied: torch.cuda.Event | None = None
        if values.is_cuda:
            host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            values = host.copy_(values, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()
        self._values = values

    def numbers(self, timeout: float) -> list[float]:
        """Wait for the numbers; a RuntimeError after `timeout` seconds."""
        if self._copied is not None:
            poll(self._copied.query, timeout)
        numbers: list[float] = self._values.tolist()
        return numbers


def poll(is_done: Callable[[], bool], timeout: float) -> None:
    """Poll at growing intervals until `is_done`; a RuntimeError after `timeout` seconds.

    The waits of CUDA and NCCL have no timeout.
    """
    end = time.monotonic() + timeout
    pause = 1e-5
    while not is_done():
        if time.monotonic() > end:
            raise RuntimeError(f"no answer within {timeout:g} seconds")
        time.sleep(pause)
        pause = min(2 * pause, 1e-3)
