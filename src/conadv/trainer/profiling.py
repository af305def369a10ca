"""`--profile`: a Chrome trace of some steps per rank, for Perfetto, TensorBoard and `conadv timeline`."""

from __future__ import annotations

import gc
import json
import time
from contextlib import ExitStack
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from conadv.atomic import replacing, replacing_path
from conadv.core.step import PREFIX, STEP, recording, span
from conadv.ranks.pool import Pool

# The first steps, which also allocate memory and choose kernels, are not recorded.
_WARMUP = 3


class Profile:
    """Records some steps after the first ones.

    Args:
        steps: how many steps to record; 0: do nothing.
        folder: where to write the traces.
        rank: the rank of this process.
        pool: its attackers, whose work goes into a file of its own.
    """

    def __init__(self, steps: int, folder: Path, rank: int, pool: Pool | None = None) -> None:
        self._pool, self._since = pool, 0.0
        self._left = _WARMUP + steps if steps else 0
        self._steps = steps
        self._file = folder / f"rank-{rank}.json"
        self._recorder: profile | None = None
        self._open = ExitStack()
        self._step = ExitStack()

    def begin_step(self) -> None:
        """Call before each step."""
        if not self._left:
            return
        self._left -= 1
        if self._recorder is None and self._left < self._steps:
            self._start()
        if self._recorder is not None:
            self._step.enter_context(span(STEP))

    def end_step(self) -> None:
        """Call after each step."""
        self._step.close()
        if self._recorder is not None and not self._left:
            self.close()

    def close(self) -> None:
        """Write the trace, if steps were recorded."""
        self._step.close()
        if self._recorder is None:
            return
        recorder, self._recorder, self._left = self._recorder, None, 0
        self._open.close()
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with replacing_path(self._file) as temporary:
            recorder.export_chrome_trace(str(temporary))
        if self._pool is not None:
            events = [
                {"cat": "user_annotation", "ph": "X", "name": f"{PREFIX}attack", "pid": attacker, "tid": 0}
                | {"ts": began * 1e6, "dur": (ended - began) * 1e6}
                for attacker, began, ended in self._pool.worked
                if ended > self._since
            ]
            with replacing(self._file.with_stem(f"{self._file.stem}-attackers")) as file:
                file.write(json.dumps({"traceEvents": events}).encode())
        del recorder
        gc.collect()  # PyTorch crashes if a recorded process group is freed only when the interpreter ends

    def _start(self) -> None:
        self._since = time.time()
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
        self._recorder = self._open.enter_context(profile(activities=activities))
        self._open.enter_context(recording())
