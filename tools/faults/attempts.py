"""One attempt at a run: its ranks, the fault that they are given, and whether they ended as they should."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from conadv.catalog import METHODS
from conadv.ranks.layout import Layout
from faults.forks import FOLDER, ROOT, Server
from faults.inject import PAUSE
from faults.scenario import HARMLESS, Fault, Scenario
from support import tiny
from support.launcher import Torchrun
from support.ranks import environment, store

# Seconds beyond what is promised: a busy machine is no failure, waiting for ever is. An interpreter imports PyTorch.
SLACK, SLACK_OF_IMPORTS = 100.0, 600.0
MISMATCHES = (["--seed", "7"], ["--optimizer.lr", "3"], ["--attack.epsilon", "1/255"], ["--epochs", "9"])
# Statuses that a kind may end with, beside 0, which is that of a run that ended before its fault.
STATUSES = {
    "SIGKILL": {1, -signal.SIGKILL},
    "SIGTERM": {143, 1, -signal.SIGTERM},  # a rank that does not listen yet dies of it, and the others say so
    "SIGSTOP": {1, -signal.SIGKILL},
    "full disk": {1, 2},
    "failing fsync": {1, 2},
    "failing rename": {1, 2},
    "lost messages": {1, -signal.SIGKILL},
    "reset": {1},
}


class Interpreter:
    """A process of its own, with the interface of `multiprocessing.Process`."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self.pid = process.pid
        self.kill = process.kill

    @property
    def exitcode(self) -> int | None:
        return self._process.poll()

    def join(self, timeout: float | None = None) -> None:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout)

    def close(self) -> None:
        pass


def _with_tests() -> dict[str, str]:
    path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(ROOT / "tools"), str(ROOT / "tests"))))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


class Problem(Exception):  # noqa: N818 - of the run under test, not of this program
    """What a run did that it must not do."""


@dataclass
class Attempt:
    """`conadv train` on so many ranks in a folder: from its start, or resumed where the folder holds a run."""

    server: Server
    folder: Path
    size: int
    fields: dict[str, Any]
    number: int = 0
    timeout: float = 60
    is_real: bool = False
    processes: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.output = self.folder.with_name(f"{self.folder.name}-{self.number}.txt")
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        if (self.folder / "config.toml").exists():
            model = str(self.fields.get("model", "support.tiny:net"))  # which no folder may name
            self.words = ["--resume", FOLDER, "--model", model, "--timeout", str(self.timeout)]
        else:
            self.words = [*tiny.words(**{**self.fields, "timeout": self.timeout}), "--run-dir", FOLDER]
        self._store = store()

    @property
    def patience(self) -> float:
        """Seconds after which all ranks must have ended."""
        return self.timeout + 15 + (SLACK_OF_IMPORTS if self.is_real else SLACK)

    def start(self, faults: tuple[Fault, ...] = (), odd: list[str] | None = None) -> None:
        """Start all ranks; `odd` are further words for the victim of the fault."""
        port = self._store.__enter__()
        for rank in range(self.size):
            own = next((fault for fault in faults if rank in fault.victims), None)
            words = ["train", *self.words, *(odd or [] if own else [])]
            outside = own is None or odd or own.point == "after"
            self.processes.append(self._start(words, environment(rank, self.size, port), None if outside else own))

    def _start(self, words: list[str], settings: dict[str, str], fault: Fault | None) -> Any:
        if not self.is_real:
            return self.server.start(words, self.folder, settings, self.output, fault)
        words = [str(self.folder) if word == FOLDER else word for word in words]
        told = json.dumps([words, settings, str(self.output), asdict(fault) if fault else None])
        return Interpreter(subprocess.Popen([sys.executable, "-m", "faults.inject", told], env=_with_tests()))

    def statuses(self, seconds: float, ranks: tuple[int, ...] | None = None) -> list[int | None]:
        """How these ranks ended (all by default); None: not within so many seconds."""
        chosen = [self.processes[rank] for rank in (range(self.size) if ranks is None else ranks)]
        end = time.monotonic() + seconds
        for process in chosen:
            process.join(max(0.0, end - time.monotonic()))
        return [process.exitcode for process in chosen]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
            process.close()
        self.processes = []
        self._store.__exit__()

    @property
    def is_reached(self) -> bool:
        """Whether a rank came to the point of its fault."""
        return Path(f"{self.output}.reached").exists()

    def said(self) -> str:
        return self.output.read_text() if self.output.exists() else ""

    def complaints(self) -> list[str]:
        return [line for line in self.said().splitlines() if line.startswith("error: ")]


def ends_well(attempt: Attempt) -> None:
    """Run it undisturbed."""
    attempt.start()
    try:
        statuses = attempt.statuses(attempt.patience + 100)
    finally:
        attempt.close()
    if statuses != [0] * attempt.size:
        raise Problem(f"undisturbed ranks ended with {statuses}")


def disturb(attempt: Attempt, faults: tuple[Fault, ...]) -> Counter[str]:
    """Run it with its faults, and check how it ended; what happened, counted."""
    try:
        match faults[0].kind:
            case "flag mismatch":
                return _mismatch(attempt, faults[0])
            case "two processes":
                return _two(attempt, faults[0])
            case _:
                return _one(attempt, faults)
    finally:
        attempt.close()


def _one(attempt: Attempt, faults: tuple[Fault, ...]) -> Counter[str]:
    first = faults[0]
    attempt.start(faults)
    if first.kind == "pause":
        _wake(attempt, first.victims[0])
    if first.kind == "SIGSTOP":
        others = tuple(rank for rank in range(attempt.size) if rank not in first.victims)
        ended = attempt.statuses(attempt.patience, others)
        if None in ended:
            raise Problem(f"ranks {others} hang beside a stopped one: {ended}")
        os.kill(attempt.processes[first.victims[0]].pid, signal.SIGKILL)
    for fault in faults[1:]:
        _hunt(attempt, fault)
    statuses = attempt.statuses(attempt.patience)
    if None in statuses:
        raise Problem(f"ranks hang: {statuses}")
    _check(attempt, first, statuses)
    happened = Counter({f"fault: {first.kind}": int(attempt.is_reached)})
    return +(happened + (_killed(attempt, faults, statuses) if first.kind == "SIGKILL" else Counter()))


def _hunt(attempt: Attempt, fault: Fault) -> None:
    """Kill ranks from outside a while after the first rank has ended."""
    end = time.monotonic() + attempt.patience
    while all(process.exitcode is None for process in attempt.processes) and time.monotonic() < end:
        time.sleep(0.005)
    time.sleep(fault.number / 100)
    for rank in fault.victims:
        if attempt.processes[rank].exitcode is None:
            with suppress(ProcessLookupError):
                os.kill(attempt.processes[rank].pid, signal.SIGKILL)


def _killed(attempt: Attempt, faults: tuple[Fault, ...], statuses: list[int | None]) -> Counter[str]:
    """Who was killed where."""
    method = attempt.fields["method"]
    layout = Layout.fit(attempt.fields.get("layout"), METHODS[method].duties, attempt.size)
    killed = [rank for rank, status in enumerate(statuses) if status == -signal.SIGKILL]
    happened = Counter({"kills": len(killed), "kills of real interpreters": len(killed) if attempt.is_real else 0})
    for rank in killed:
        point = next(fault.point for fault in faults if rank in fault.victims)
        happened[f"killed at: {point}"] += 1
        happened[f"killed with: {method}, {layout} on {attempt.size}"] += 1
        happened["killed as: " + layout.describe(rank).rpartition(", ")[2].rstrip(")")] += 1
        happened[f"killed: {'resumed' if '--resume' in attempt.words else 'first'} attempt"] += 1
    return happened


def _check(attempt: Attempt, fault: Fault, statuses: list[int | None]) -> None:
    allowed = {0} if fault.kind in HARMLESS else {0} | STATUSES[fault.kind]
    if not set(statuses) <= allowed:
        raise Problem(f"ranks ended with {statuses}, not within {sorted(allowed)}")
    if "Traceback" in attempt.said():
        raise Problem("a traceback")
    failed = [rank for rank, status in enumerate(statuses) if status in (1, 2)]
    if failed and not attempt.complaints():
        raise Problem(f"ranks {failed} failed without a line")


def _wake(attempt: Attempt, victim: int) -> None:
    """Let a stopped rank continue a moment after it stopped."""
    process = attempt.processes[victim]
    while process.exitcode is None:
        try:
            state = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return
        if state == "T":
            time.sleep(PAUSE)
            os.kill(process.pid, signal.SIGCONT)
            return
        time.sleep(0.02)


def _mismatch(attempt: Attempt, fault: Fault) -> Counter[str]:
    """One rank with another flag: all refuse, and leave no folder."""
    attempt.start((fault,), odd=MISMATCHES[fault.number % len(MISMATCHES)])
    statuses = attempt.statuses(attempt.patience)
    if statuses != [2] * attempt.size or len(attempt.complaints()) != 1:
        raise Problem(f"ranks with different flags ended with {statuses}, saying {attempt.complaints()}")
    if attempt.folder.exists():
        raise Problem("ranks with different flags left a folder")
    return Counter({"fault: flag mismatch": 1})


def _two(attempt: Attempt, fault: Fault) -> Counter[str]:
    """A second process resumes while the first trains: it is refused, and the first ends well."""
    attempt.start((fault,))
    end = time.monotonic() + attempt.patience
    while not (attempt.folder / "config.toml").exists() and time.monotonic() < end:
        time.sleep(0.01)
    second = Attempt(attempt.server, attempt.folder, attempt.size, {}, 50)
    second.start()
    try:
        late = second.statuses(second.patience)
    finally:
        second.close()
    first = attempt.statuses(attempt.patience)
    refused = late == [2] * attempt.size and any("is in use by" in line for line in second.complaints())
    if first != [0] * attempt.size or not (refused or late == [0] * attempt.size):
        raise Problem(f"two processes on one folder ended with {first} and {late}: {second.said()}")
    return Counter({"fault: two processes": int(refused)})


def _lives(pid: int) -> bool:
    """Whether a process exists and is not only waiting for its parent to notice its end."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def by_torchrun(scenario: Scenario, run: Path, fields: dict[str, Any], server: Server) -> Counter[str]:
    """torchrun itself is killed, and its ranks end; or one of its ranks is, and all start again."""
    ((fault,),) = scenario.attempts
    words = ["train", *tiny.words(**fields), "--run-dir", str(run)]
    flags = ["--nproc-per-node", str(scenario.size), "--max-restarts", "2"]
    # Where torchrun is killed, its ranks have seconds of work left: they must notice, and a resume meets them.
    pause = "0.3" if scenario.kind == "agent" else "0.01"
    launcher = Torchrun(flags, words, run.with_name("run-0.txt"), SLOW_PASS=pause)
    try:
        launcher.wait_for_ranks(scenario.size, timeout=SLACK_OF_IMPORTS)
        if fault.number:
            launcher.wait_for_step(run, fault.number, timeout=SLACK_OF_IMPORTS)
        ranks = launcher.ranks()
        os.kill(launcher.pid if scenario.kind == "agent" else ranks[fault.victims[0]], signal.SIGKILL)
        beside = _beside(Attempt(server, run, scenario.size, fields, 1)) if scenario.kind == "agent" else ""
        status = launcher.status(timeout=60 + SLACK_OF_IMPORTS)
        end = time.monotonic() + SLACK
        while any(map(_lives, ranks.values())) and time.monotonic() < end:
            time.sleep(0.1)
        if left := [rank for rank, pid in ranks.items() if _lives(pid)]:
            raise Problem(f"ranks {left} outlived their torchrun")
        if status != (-signal.SIGKILL if scenario.kind == "agent" else 0):
            raise Problem(f"torchrun ended with {status}")
        if scenario.kind == "agent" and fault.number and "is gone: stopping" not in launcher.said():
            raise Problem("ranks did not notice that their torchrun is gone")
    finally:
        launcher.close()
    return Counter(
        {"kills": 1, f"fault: {scenario.kind}": 1, beside: 1} if beside else {"kills": 1, "fault: restart": 1}
    )


def _beside(attempt: Attempt) -> str:
    """Start the same run at once, beside ranks without a launcher: refused, or it trains to its end."""
    attempt.start()
    try:
        statuses = attempt.statuses(attempt.patience)
    finally:
        attempt.close()
    if statuses == [0] * attempt.size:
        return "agent: a run at once after it trained to its end"
    refusals = ("is in use by", "already holds a run")
    if statuses != [2] * attempt.size or not any(words in attempt.said() for words in refusals):
        raise Problem(f"beside ranks without a launcher, a run ended with {statuses}: {attempt.said()}")
    return "agent: a run beside its ranks was refused"
