"""As a script: run an example whose attackers have started before its first step, and print how many twins they made.

By itself an example of milliseconds is over before its attackers have started.
"""

from __future__ import annotations

import os
import runpy
import sys
import time
from pathlib import Path
from typing import Any

import conadv.ray
from conadv.ray import Pool
from support import torchvision_ops


class StartedPool:
    """A pool that waits for its attackers, when it is made and in each step."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        self._pool, self._twins = Pool(*arguments, **settings, wait=60), 0.0
        end = time.monotonic() + 200
        while len(self._pool._ready()) < len(self._pool._actors):
            assert time.monotonic() < end
            time.sleep(0.05)

    def over(self, method: Any, local: Any) -> Any:
        ended = self._pool.end

        def end() -> None:
            self._twins += self._pool.metrics()["twins_pool"]
            ended()

        self._pool.end = end  # type: ignore[method-assign]
        return self._pool.over(method, local)

    def __enter__(self) -> StartedPool:
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.close()
        print(f"twins of the pool {self._twins:.0f}", flush=True)


if __name__ == "__main__":
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112  # by default 15, with which they starve on a busy machine
    torchvision_ops.declare()
    conadv.ray.Pool = StartedPool  # type: ignore[misc, assignment]
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
