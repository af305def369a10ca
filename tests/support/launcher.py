"""torchrun, as a user starts it, with a way to find and kill its ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from support.waiting import has_taken, until

TESTS = Path(__file__).parents[1]


class Torchrun:
    """`torchrun FLAGS -m conadv WORDS`; what it and its ranks say goes to a file."""

    def __init__(
        self, flags: Sequence[str], words: Sequence[str], output: Path, before: Sequence[str] = (), **settings: str
    ) -> None:
        self._output = output
        command = [*before, sys.executable, "-m", "torch.distributed.run", *flags, "-m", "conadv", *words]
        path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(TESTS))))
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **settings}
        with output.open("w") as file:
            self._process = subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT)
        self.pid = self._process.pid
        self._known: set[psutil.Process] = set()

    def ranks(self) -> dict[int, int]:
        """The process of each rank that lives."""
        found = {}
        for process in self._family():
            with suppress(psutil.Error):  # it has ended meanwhile
                if (rank := process.environ().get("RANK")) is not None:
                    found[int(rank)] = process.pid
                    self._known.add(process)
        return found

    def wait_for_ranks(self, count: int, timeout: float = 120) -> None:
        """Until so many ranks are processes."""
        self._wait_until(lambda: len(self.ranks()) >= count, f"torchrun did not start {count} ranks", timeout)

    def wait_for_step(self, folder: Path, step: int, timeout: float = 120) -> None:
        """Until the run in this folder has taken so many steps."""
        self._wait_until(lambda: has_taken(folder, step), f"the run did not come to step {step}", timeout)

    def status(self, timeout: float = 200) -> int:
        return self._process.wait(timeout)

    def said(self) -> str:
        return self._output.read_text()

    def complaints(self) -> list[str]:
        return [line for line in self.said().splitlines() if line.startswith("error:")]

    def close(self) -> None:
        """End whatever is left of it, and ranks that outlived it."""
        for process in {*self._family(), *self._known}:
            with suppress(psutil.Error):
                process.kill()
        self._process.kill()
        self._process.wait()

    def _family(self) -> list[psutil.Process]:
        try:
            return psutil.Process(self.pid).children(recursive=True)
        except psutil.Error:
            return []

    def _wait_until(self, condition: Callable[[], bool], otherwise: str, timeout: float) -> None:
        until(condition, lambda: f"{otherwise}: {self.said()}", timeout, lambda: self._process.poll() is None)
