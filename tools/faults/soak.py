"""Disturb runs as seeds say: each must end with the bits of an undisturbed run after --resume, or refuse in one line.

    python tools/faults/soak.py [--minutes 10] [--seed 0] [--cases N] [--jobs 2] [--kinds SIGKILL,reset] [--state FILE]

scenario of a seed ──► start ► fault ► all end? ► --resume ► fault ► ... ► --resume ► same bits, nothing left

A run that does anything else is printed with its seed: `--seed S --cases 1` replays it, with the same `--kinds`. With
`--state` the counts are kept in a file, and the next call continues behind its last seed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
import time
import traceback
import uuid
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1]))

from faults.attempts import Attempt, Problem, by_torchrun, disturb, ends_well
from faults.forks import Server
from faults.scenario import HARMLESS, KINDS, STEPS, Scenario
from support import tiny

# 8 images in batches of 4, in 2 chunks: a run takes a few tenths of a second of processor time.
FIELDS: dict[str, Any] = {"data.name": "synthetic", "data.train_size": 8, "data.image_size": 8, "data.channels": 1}
FIELDS |= {"batch_size": 4, "chunk_size": 2, "epochs": STEPS // 2, "checkpoint.every": 1, "checkpoint.keep": 2}
# Metrics that are a function of the recipe alone.
NUMBERS = ("step", "epoch", "lr", "loss", "clean_loss", "adv_loss", "skipped", "test_top1")
# Seconds that a rank waits for others: where it must survive on a busy machine, and where it must notice a fault.
PATIENT, IMPATIENT = 60.0, 8.0
# Every process that we start carries this, so that those left behind can be found.
TOKEN = uuid.uuid4().hex


class References:
    """The undisturbed run of each configuration, made when it is first needed."""

    def __init__(self, folder: Path, server: Server) -> None:
        self.server = server
        self._folder = folder
        self._locks: dict[str, threading.Lock] = {}
        self._guard = threading.Lock()

    def get(self, scenario: Scenario) -> Path:
        name = "-".join([str(scenario.size), *map(str, scenario.fields.values())]).replace(" ", "")
        with self._guard:
            lock = self._locks.setdefault(name, threading.Lock())
        with lock:
            folder = self._folder / name
            if not (folder / "summary.json").exists():
                ends_well(Attempt(self.server, folder, scenario.size, {**FIELDS, **scenario.fields}, timeout=PATIENT))
        return folder


class Tally:
    """What has happened so far, also in earlier calls."""

    def __init__(self, first: int, state: Path | None) -> None:
        kept = json.loads(state.read_text()) if state and state.exists() else {}
        self.next: int = kept.get("next", first)
        self.counts: Counter[str] = Counter(kept.get("counts", {}))
        self.problems: dict[str, str] = kept.get("problems", {})
        self._state = state
        self._lock = threading.Lock()

    def take(self) -> int:
        with self._lock:
            self.next += 1
            return self.next - 1

    def add(self, counts: Counter[str]) -> None:
        with self._lock:
            self.counts += counts
            self._keep()

    def complain(self, seed: int, problem: str) -> None:
        with self._lock:
            self.problems[str(seed)] = problem[-3000:]
            self._keep()
        print(f"replay with --seed {seed} --cases 1:\n{problem}", flush=True)

    def keep(self) -> None:
        with self._lock:
            self._keep()

    def _keep(self) -> None:
        if self._state:
            content = {"next": self.next, "counts": self.counts, "problems": self.problems}
            self._state.write_text(json.dumps(content, indent=1))

    def show(self) -> None:
        for name, number in sorted(self.counts.items()):
            print(f"{name:40}  {number:6,}")
        print(f"{self.counts['runs']:,} runs, {self.counts['kills']:,} kills, problems with seeds {[*self.problems]}")


def soak(scenario: Scenario, place: Path, references: References) -> Counter[str]:
    """One run with its disturbances, until it ends; what happened, or a Problem."""
    counts: Counter[str] = Counter({"runs": 1, f"kind: {scenario.kind}": 1, f"method: {scenario.fields['method']}": 1})
    whole = references.get(scenario)
    fields = {**FIELDS, **scenario.fields}
    run = place / "run"
    if scenario.kind in ("agent", "restart"):
        fields["model"] = "support.tiny:Slow"  # the same numbers, and time for a kill from outside
        counts += by_torchrun(scenario, run, fields, references.server)
    else:
        for number, faults in enumerate(scenario.attempts):
            timeout = PATIENT if scenario.kind in (*HARMLESS, "two processes", "flag mismatch") else IMPATIENT
            attempt = Attempt(
                references.server, run, scenario.size, fields, number, timeout, scenario.is_real and number == 0
            )
            counts += disturb(attempt, faults)
    ends_well(Attempt(references.server, run, scenario.size, fields, 99, PATIENT))
    _compare(run, whole)
    return counts


def _compare(run: Path, whole: Path) -> None:
    """What a disturbed run leaves is what one leaves that was not."""
    if not tiny.equal(tiny.state(run), tiny.state(whole)):
        raise Problem("other weights than those of the undisturbed run")
    if _metrics(run) != _metrics(whole):
        raise Problem("other metrics than those of the undisturbed run")
    names = [{str(path.relative_to(folder)) for path in folder.rglob("*")} for folder in (run, whole)]
    if names[0] != names[1]:
        raise Problem(f"other files than those of the undisturbed run: {sorted(names[0] ^ names[1])}")


def _metrics(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: line[key] for key in NUMBERS if key in line} for line in lines]


def left_behind() -> list[int]:
    """Processes that carry our token, beside this one and its children, which fork ranks and track resources."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            ours = f"CONADV_SOAK={TOKEN}".encode() in path.read_bytes()
            parent = int((path.parent / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if ours and os.getpid() not in (int(path.parent.name), parent):
            found.append(int(path.parent.name))
    return found


def serve(tally: Tally, last_seed: float, end: float, kinds: tuple[str, ...], folder: Path, refs: References) -> None:
    """Take one seed after the other until the time or the seeds are over."""
    while time.monotonic() < end and (seed := tally.take()) < last_seed:
        scenario = Scenario.from_seed(seed, kinds)
        with tempfile.TemporaryDirectory(dir=folder, ignore_cleanup_errors=True) as place:
            try:
                tally.add(soak(scenario, Path(place), refs))
            except Exception as problem:
                text = str(problem) if isinstance(problem, Problem) else traceback.format_exc()
                said = "\n".join(path.read_text()[-1500:] for path in sorted(Path(place).glob("*.txt")))
                tally.complain(seed, f"{scenario}\n{text}\n{said}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10, help="begin no run after this time")
    parser.add_argument("--seed", type=int, default=0, help="the first scenario")
    parser.add_argument("--cases", type=float, default=float("inf"), help="how many, where time allows")
    parser.add_argument("--jobs", type=int, default=3, help="runs at a time; they mostly wait")
    parser.add_argument("--kinds", type=lambda text: tuple(text.split(",")), default=KINDS, help="only these kinds")
    parser.add_argument("--state", type=Path, help="a file that keeps counts from call to call")
    options = parser.parse_args()
    os.environ["CONADV_SOAK"] = TOKEN
    tally = Tally(options.seed, options.state)
    end, last_seed = time.monotonic() + 60 * options.minutes, options.seed + options.cases
    with tempfile.TemporaryDirectory(prefix="conadv-soak-") as folder:
        server = Server()
        references = References(Path(folder) / "undisturbed", server)
        arguments = (tally, last_seed, end, options.kinds, Path(folder), references)
        threads = [threading.Thread(target=serve, args=arguments) for _ in range(options.jobs)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        server.close()
    tally.next = int(min(tally.next, last_seed))  # each thread may have taken a seed that it did not begin
    if left := left_behind():
        tally.complain(-1, f"processes were left behind: {left}")
    tally.keep()
    tally.show()
    return 1 if tally.problems else 0


if __name__ == "__main__":
    sys.exit(main())
