"""As a script: run an example whose attackers have started before its first step, and print how many twins they made.

By itself an example of milliseconds is over before its attackers have started.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from typing import Any

import conadv.ray
from conadv.ray import Pool
from support import torchvision_ops
from support.waiting import until


class StartedPool(Pool):
    """A pool that waits for its attackers, when it is made and in each step."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings, wait=60)
        self.made = 0.0
        until(lambda: len(self._ready()) == len(self._actors), seconds=200)

    def end(self) -> None:
        self.made += self.metrics()["twins_pool"]
        super().end()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        print(f"twins of the pool {self.made:.0f}", flush=True)


if __name__ == "__main__":
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112  # by default 15, with which they starve on a busy machine
    torchvision_ops.declare()
    conadv.ray.Pool = StartedPool  # type: ignore[misc, assignment]
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
