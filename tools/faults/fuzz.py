"""Fuzz what is read: thousands of damaged and hostile inputs, each in a process with bounded memory and time.

    python tools/faults/fuzz.py data|inputs|runs --seed 0 --cases 10000 [--minutes 4] [--state FILE]

data      data sets of every format (faults/hostile.py)
inputs    recipes, study files, flags, layouts, plans, checkpoints, metrics, reports, traces (faults/inputs.py)
runs      a flipped bit or a truncation in any file of a run, which is then resumed (faults/flips.py)

Case number s is a function of s alone: `--seed s --cases 1` is the same case again. A case is good if the input is
read, or refused in one line; `runs` also wants the bits of an undisturbed run. An exception of another kind, a process
that dies, and a case that takes longer than its time are failures; each is printed with its seed, and the exit status
is 1. With `--state` the counts are kept in a file, and the next call continues behind its last case.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from importlib import import_module
from itertools import count
from pathlib import Path
from queue import Empty, Queue

MEMORY = 3_900_000_000  # bytes of address space, the libraries included
PROCESSOR_SECONDS, WALL_SECONDS = 60.0, 600.0  # of one case; a busy machine is no failure, waiting for ever is
CASES = {"data": "faults.hostile", "inputs": "faults.inputs", "runs": "faults.flips"}
GOOD = ("read", "refused", "same bits")


def work(what: str) -> None:
    """Read a seed a line from standard input and write what came of it, a line of JSON each."""
    cases = import_module(CASES[what])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    answers.write("{}\n")  # everything is imported
    answers.flush()
    for line in sys.stdin:
        with tempfile.TemporaryDirectory(prefix="conadv-fuzz-") as folder:
            os.environ["CONADV_CACHE"] = str(Path(folder) / "cache")
            resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            kind, path = cases.build(int(line), Path(folder))  # writing a bomb may take what reading it must not
            answers.write(json.dumps({"kind": kind}) + "\n")
            answers.flush()
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY, resource.RLIM_INFINITY))
            try:
                outcome, trace = cases.exercise(int(line), path), ""
            except BaseException as error:
                outcome, trace = type(error).__name__, traceback.format_exc()
            answers.write(json.dumps({"outcome": outcome, "trace": trace}) + "\n")
            answers.flush()


def processor_seconds(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def end_if_late(process: subprocess.Popen[str], answered: threading.Event, late: threading.Event) -> None:
    """Kill a process that has used up its time before it answers."""
    started, used = time.monotonic(), processor_seconds(process.pid)
    while not answered.wait(0.5):
        spent = processor_seconds(process.pid) - used
        if spent > PROCESSOR_SECONDS or time.monotonic() - started > WALL_SECONDS:
            late.set()
            process.kill()
            return


class Worker:
    """A process that takes one case after the other, and another one after it died or was ended."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._process: subprocess.Popen[str] | None = None

    def case(self, seed: int) -> dict[str, str]:
        process = self._process or self._start()
        assert process.stdin is not None
        process.stdin.write(f"{seed}\n")
        process.stdin.flush()
        built = self._answer(process)
        done = self._answer(process) if "kind" in built else built
        if "kind" not in built:
            built = {"kind": "?"}
        return {**built, **done}

    def _start(self) -> subprocess.Popen[str]:
        command = [sys.executable, __file__, self._what, "--worker"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self._answer(self._process)
        return self._process

    def _answer(self, process: subprocess.Popen[str]) -> dict[str, str]:
        answered, late = threading.Event(), threading.Event()
        watch = threading.Thread(target=end_if_late, args=(process, answered, late))
        watch.start()
        assert process.stdout is not None
        line = process.stdout.readline()
        answered.set()
        watch.join()
        if line:
            return dict(json.loads(line))
        self.close()
        return {"outcome": "hang" if late.is_set() else f"died ({process.returncode})", "trace": ""}

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


class Tally:
    """The outcomes counted by kind, the failures with their seeds, and the case to continue with."""

    def __init__(self, first: int, state: Path | None) -> None:
        kept = json.loads(state.read_text()) if state and state.exists() else {}
        self.next: int = kept.get("next", first)
        self.counts: Counter[str] = Counter(kept.get("counts", {}))
        self.failures: list[int] = kept.get("failures", [])
        self._state = state

    def add(self, seed: int, result: dict[str, str]) -> None:
        self.counts[f"{result['kind']}, {result['outcome']}"] += 1
        if result["outcome"] not in GOOD:
            self.failures.append(seed)
            print(f"seed {seed}: {result['kind']}: {result['outcome']}\n{result['trace']}", flush=True)

    def keep(self) -> None:
        if self._state:
            self._state.write_text(json.dumps({"next": self.next, "counts": self.counts, "failures": self.failures}))

    def show(self) -> None:
        for name, number in sorted(self.counts.items()):
            print(f"{name:40}  {number:7,}")
        print(f"{self.counts.total():,} cases, {len(self.failures)} failures: {sorted(self.failures)}")


def run(what: str, tally: Tally, end: int, jobs: int, minutes: float) -> None:
    """Take all cases before `end`, or as many as there is time for."""
    todo: Queue[int] = Queue()
    for seed in range(tally.next, end):
        todo.put(seed)
    last, done = time.monotonic() + 60 * minutes, count(1)

    def serve() -> None:
        worker = Worker(what)
        while time.monotonic() < last:
            try:
                seed = todo.get_nowait()
            except Empty:
                break
            tally.add(seed, worker.case(seed))
            if (number := next(done)) % 1000 == 0:
                print(f"{number} cases, {len(tally.failures)} failures", file=sys.stderr, flush=True)
        worker.close()

    threads = [threading.Thread(target=serve) for _ in range(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    tally.next = end - todo.qsize()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=CASES)
    parser.add_argument("--seed", type=int, default=0, help="the first case")
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument("--minutes", type=float, default=1e6, help="at most so long")
    parser.add_argument("--state", type=Path, help="a file that keeps counts from call to call")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.what)
        return 0
    tally = Tally(options.seed, options.state)
    with tempfile.TemporaryDirectory(prefix="conadv-fuzz-", ignore_cleanup_errors=True) as folder:
        os.environ["TMPDIR"] = folder  # of the workers, which may be killed before they remove what they wrote
        run(options.what, tally, options.seed + options.cases, options.jobs, options.minutes)
    tally.keep()
    tally.show()
    return 1 if tally.failures else 0


sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1]))
if __name__ == "__main__":
    sys.exit(main())
