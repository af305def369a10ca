"""Kill ranks of runs at random moments, for minutes: each run must end as one that nobody disturbed.

python tests/soak.py [--minutes 10] [--kills 50] [--seed 0]

undisturbed run ─┐
same recipe ─────┴► start ► SIGKILL to some rank ► all end? ► --resume ► SIGKILL ► ... ► ends ► same bits, nothing left
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
import uuid
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tiny
from launcher import Torchrun
from ranks import Run

# Ranks, layout and method of the runs, which take turns; the second is also started by torchrun.
PLANS: list[tuple[int, dict[str, Any]]] = [
    (1, {"method": "conadv"}),
    (3, {"method": "conadv", "layout": "clean | adv | attack"}),
    (2, {"method": "recycled", "layout": "clean | adv"}),
    (2, {"method": "conadv", "delay": 2, "layout": "clean+adv | attack"}),
    (2, {"method": "vanilla"}),
    (4, {"method": "disadv", "layout": "clean | adv+attack", "batch_size": 16}),
]
FIELDS = {"model": "tiny:Slow", "epochs": 24, "checkpoint.every": 1, "checkpoint.keep": 2, "timeout": 20}
# Every process that we start carries this, so that those left behind can be found.
TOKEN = uuid.uuid4().hex


@dataclass
class Tally:
    """What has happened so far."""

    kills: int = 0
    during_writes: int = 0
    runs: int = 0
    by_role: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)


def main() -> int:
    parser = argparse.ArgumentParser(description="Kill ranks at random moments; every run must end as if undisturbed.")
    parser.add_argument("--minutes", type=float, default=10, help="how long, at least until there were enough kills")
    parser.add_argument("--kills", type=int, default=50, help="at least so many")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    os.environ["CONADV_SOAK"] = TOKEN
    chance, tally = random.Random(options.seed), Tally()
    end = time.monotonic() + 60 * options.minutes
    with tempfile.TemporaryDirectory(prefix="conadv-soak-") as folder:
        for trial in range(1000):
            if time.monotonic() > end and tally.kills >= options.kills and tally.during_writes:
                break
            size, fields = PLANS[trial % len(PLANS)]
            place = Path(folder) / f"trial-{trial}"
            place.mkdir()
            by_torchrun = trial % len(PLANS) == 1 and trial < len(PLANS)
            (soak_torchrun if by_torchrun else soak)(place, size, {**FIELDS, **fields}, chance, tally)
            said = f"{time.monotonic() - end + 60 * options.minutes:6.0f} s  {tally.runs} runs, {tally.kills} kills"
            print(f"{said}, {tally.during_writes} of them while a checkpoint was written", flush=True)
            if tally.problems:
                break
    return report(options, tally)


def report(options: argparse.Namespace, tally: Tally) -> int:
    tally.problems += [f"process {pid} was left behind" for pid in left_behind()]
    result = {"seed": options.seed, "kills": tally.kills, "during_writes": tally.during_writes, "runs": tally.runs}
    print(json.dumps({**result, "killed": dict(tally.by_role), "problems": tally.problems}))
    return 1 if tally.problems else 0


def soak(place: Path, size: int, fields: dict[str, Any], chance: random.Random, tally: Tally) -> None:
    """One run, killed and resumed until it comes to its end, and one that is left alone."""
    whole = start(place / "whole", size, fields)
    folder = place / "run"
    for attempt in range(200):
        run = start(folder, size, fields, attempt)
        killed = disturb(run, size, fields, chance, tally)
        statuses = run.statuses(timeout=90)
        run.close()
        if None in statuses:
            tally.problems.append(f"{folder}: ranks did not end after a kill: {statuses}")
            return
        if not killed:
            break
    tally.runs += 1
    if statuses != [0] * size:
        tally.problems.append(f"{folder}: ended with {statuses}: {run.said()}")
    if whole.statuses(timeout=300) != [0] * size:
        tally.problems.append(f"{whole.folder}: an undisturbed run failed: {whole.said()}")
    whole.close()
    compare(folder, whole.folder, tally)


def start(folder: Path, size: int, fields: dict[str, Any], attempt: int = 0) -> Run:
    """Start a run, or go on with it where its folder was made before it was killed."""
    if (folder / "config.toml").exists():
        words = ["--resume", str(folder), "--model", str(fields["model"])]
    else:
        words = [*tiny.words(**fields), "--run-dir", str(folder)]
    return Run(folder, words, size, output=folder.with_name(f"{folder.name}-{attempt}.txt"))


def disturb(run: Run, size: int, fields: dict[str, Any], chance: random.Random, tally: Tally) -> bool:
    """Kill a rank at a random moment: of its start, some steps later, or of a write; False: it has ended before."""
    victim, kind = chance.randrange(size), chance.choice(["start", "step", "step", "write"])
    if kind != "start":
        wait_for_steps(run, chance.randrange(1, 8))
    if kind == "write":
        victim = 0
        wait_for_write(run)
    else:
        time.sleep(chance.uniform(0.0, 0.5))
    if not run.processes[victim].is_alive():
        return False
    run.kill(victim)
    run.statuses(victim)
    tally.kills += run.processes[victim].exitcode == -signal.SIGKILL
    tally.during_writes += any((run.folder / "checkpoints").glob(".step-*.partial"))
    roles = str(fields.get("layout", "all")).split("|")
    tally.by_role[roles[victim % len(roles)].strip()] += 1
    return True


def wait_for_steps(run: Run, steps: int) -> None:
    """Until the run has taken so many steps more, or has ended."""
    wanted = steps_of(run) + steps
    while run.processes[0].is_alive() and steps_of(run) < wanted:
        time.sleep(0.01)


def steps_of(run: Run) -> int:
    path = run.folder / "metrics.jsonl"
    return len(path.read_bytes().splitlines()) if path.exists() else 0


def wait_for_write(run: Run) -> None:
    """Until a checkpoint is being written, or the run has ended."""
    checkpoints = run.folder / "checkpoints"
    known = set(checkpoints.glob(".step-*.partial"))
    while run.processes[0].is_alive() and not set(checkpoints.glob(".step-*.partial")) - known:
        pass


def soak_torchrun(place: Path, size: int, fields: dict[str, Any], chance: random.Random, tally: Tally) -> None:
    """One run that torchrun starts again each time when one of its ranks is killed."""
    whole, folder = start(place / "whole", size, fields), place / "run"
    words = ["train", *tiny.words(**fields), "--run-dir", str(folder)]
    launcher = Torchrun(["--nproc-per-node", str(size), "--max-restarts", "4"], words, place / "said.txt")
    try:
        for step in (6, 18, 30):
            launcher.wait_for_step(folder, step)
            time.sleep(chance.uniform(0, 0.5))
            victim, pid = chance.choice(sorted(launcher.ranks().items()))
            os.kill(pid, signal.SIGKILL)
            tally.kills += 1
            tally.by_role[f"rank {victim} under torchrun"] += 1
            time.sleep(2)  # until the ranks of before have left
        if launcher.status(timeout=300):
            tally.problems.append(f"{folder}: torchrun gave up: {launcher.said()[-2000:]}")
    except AssertionError as problem:
        tally.problems.append(str(problem)[-2000:])
    launcher.close()
    whole.statuses(timeout=300)
    whole.close()
    tally.runs += 1
    compare(folder, whole.folder, tally)


def compare(run: Path, whole: Path, tally: Tally) -> None:
    """What a disturbed run leaves is what one leaves that was not."""
    if tally.problems:
        return
    if not tiny.equal(tiny.state(run), tiny.state(whole)):
        tally.problems.append(f"{run}: other weights than those of the undisturbed run")
    if metrics(run) != metrics(whole):
        tally.problems.append(f"{run}: other metrics than those of the undisturbed run")
    names = [{str(path.relative_to(folder)) for path in folder.rglob("*")} for folder in (run, whole)]
    if names[0] != names[1]:
        tally.problems.append(f"{run}: other files than those of the undisturbed run: {sorted(names[0] ^ names[1])}")


def metrics(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "seconds"} for line in lines]


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


if __name__ == "__main__":
    sys.exit(main())
