"""`--profile`: a Chrome trace of some steps per rank, for Perfetto, TensorBoard and `conadv timeline`."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Generator
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from conadv.atomic import replace_file, replacing
from conadv.ranks.pool import Pool
from conadv.wrappers import PREFIX, STEP, span

# The first steps, which also allocate memory and choose kernels, are not recorded.
_WARMUP = 3


def profiled(feed: Generator[Any], steps: int, file: Path, pool: Pool | None = None) -> Generator[Any]:
    """Yield what a feed yields, and record into a file some steps that the caller takes between two items.

    The work of the attackers in a pool goes into a file of its own.
    """
    with closing(feed):
        if steps:
            for _, item in zip(range(_WARMUP), feed, strict=False):
                yield item
            yield from _recorded(feed, steps, file, pool)
        yield from feed


def _recorded(feed: Generator[Any], steps: int, file: Path, pool: Pool | None) -> Generator[Any]:
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
    since, recorder = time.time(), profile(activities=activities)
    try:
        with recorder:
            for _, item in zip(range(steps), feed, strict=False):
                with span(STEP):
                    yield item
    finally:
        file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(file) as temporary:
            recorder.export_chrome_trace(str(temporary))
        if pool is not None:
            events = [
                {"cat": "user_annotation", "ph": "X", "name": f"{PREFIX}attack", "pid": attacker, "tid": 0}
                | {"ts": began * 1e6, "dur": (ended - began) * 1e6}
                for attacker, began, ended in pool.worked
                if ended > since
            ]
            path = file.with_stem(f"{file.stem}-attackers")
            replace_file(path, json.dumps({"traceEvents": events}).encode())
        del recorder
        gc.collect()  # PyTorch crashes if a recorded process group is freed only when the interpreter ends
