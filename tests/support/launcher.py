"""torchrun, as a user starts it, with a way to find and kill its ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

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
        self._known: set[int] = set()

    def ranks(self) -> dict[int, int]:
        """The process of each rank that lives."""
        found = {}
        for pid in _descendants(self.pid):
            rank = _environment(pid).get("RANK")
            if rank is not None:
                found[int(rank)] = pid
                self._known.add(pid)
        return found

    def wait_for_ranks(self, count: int, timeout: float = 120) -> None:
        """Until so many ranks are processes."""
        end = time.monotonic() + timeout
        while len(self.ranks()) < count:
            assert time.monotonic() < end, f"torchrun did not start {count} ranks: {self.said()}"
            assert self._process.poll() is None, self.said()
            time.sleep(0.02)

    def wait_for_step(self, folder: Path, step: int, timeout: float = 120) -> None:
        """Until the run in this folder has taken so many steps."""
        end = time.monotonic() + timeout
        metrics = folder / "metrics.jsonl"
        while not metrics.exists() or len(metrics.read_bytes().splitlines()) < step:
            assert time.monotonic() < end, f"the run did not come to step {step}: {self.said()}"
            assert self._process.poll() is None, self.said()
            time.sleep(0.02)

    def status(self, timeout: float = 200) -> int:
        return self._process.wait(timeout)

    def said(self) -> str:
        return self._output.read_text()

    def complaints(self) -> list[str]:
        return [line for line in self.said().splitlines() if line.startswith("error:")]

    def close(self) -> None:
        """End whatever is left of it."""
        left = [*_descendants(self.pid), self.pid] if self._process.poll() is None else []
        left += [pid for pid in self._known if "RANK" in _environment(pid)]  # ranks that outlived it
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self._process.wait()


def _descendants(pid: int) -> list[int]:
    try:
        children = [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
    return [process for child in children for process in (child, *_descendants(child))]


def _environment(pid: int) -> dict[str, str]:
    try:
        text = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
    except OSError:
        return {}
    return dict(entry.partition("=")[::2] for entry in text.split("\0") if entry)
