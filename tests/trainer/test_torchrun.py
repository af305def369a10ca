"""Under torchrun: one line for a mistake, restarts from the last checkpoint, two nodes, and no process left behind."""

from __future__ import annotations

import os
import re
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from conadv import cli
from support import tasks, tiny
from support.launcher import Torchrun
from support.waiting import until

LAYOUT = "clean | adv | attack"
ENDLESS = {"epochs": 100_000, "checkpoint.every": 5, "layout": LAYOUT}

Launch = Callable[..., Torchrun]


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    """Start torchrun; however the test ends, it and its ranks are gone after it."""
    started: list[Torchrun] = []

    def begin(flags: list[str], words: list[str], before: list[str] | None = None) -> Torchrun:
        started.append(Torchrun(flags, words, tmp_path / f"said-{len(started)}.txt", before or []))
        return started[-1]

    yield begin
    for launcher in started:
        launcher.close()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "run"


def words(run: Path, **fields: object) -> list[str]:
    return ["train", *tiny.words(**fields), "--run-dir", str(run)]


def is_gone(pid: int) -> bool:
    """Whether a process has ended, or is only waiting for its parent to notice."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def assert_gone(pids: list[int]) -> None:
    until(lambda: all(map(is_gone, pids)), lambda: "a rank was left behind", 10)


def undisturbed(folder: Path, **fields: object) -> dict[str, object]:
    """The state at the end of the same run on one process."""
    assert cli.main(["train", *tiny.words(**fields), "--run", str(folder), "--quiet"]) == 0
    return tiny.state(folder)


def test_a_world_that_does_not_fit_gets_its_line_once(launch, run):
    launcher = launch(["--nproc-per-node", "2"], words(run, layout=LAYOUT))
    assert launcher.status() == 1
    assert launcher.complaints() == [
        f"error: layout '{LAYOUT}' needs a multiple of 3 ranks, and 2 were started: start 3, 6, 9, ... ranks"
    ], launcher.said()
    assert not run.exists()


@pytest.mark.slow
@pytest.mark.parametrize(("number", "role"), list(enumerate(LAYOUT.split(" | "))))
@pytest.mark.parametrize("kind", [signal.SIGSTOP, signal.SIGKILL])
def test_a_rank_that_hangs_or_dies_ends_all_and_torchrun_names_no_other(kind, number, role, launch, run):
    launcher = launch(["--nproc-per-node", "3"], words(run, **ENDLESS, timeout=6))
    launcher.wait_for_step(run, 3)
    ranks = launcher.ranks()
    assert sorted(ranks) == [0, 1, 2]
    os.kill(ranks[number], kind)
    assert launcher.status() == 1
    who = f"rank {number} (lane 0, {role})"
    # Of a rank that dies torchrun knows before the others are sure: they end in silence, and its witness speaks.
    advice = " (raise the timeout if a step may take longer than 6 seconds)"
    lost = f"error: {who} stopped answering: the run ends on all 3 ranks{advice}"
    assert launcher.complaints() == ([lost] if kind == signal.SIGSTOP else []), launcher.said()
    told = [line for line in launcher.said().splitlines() if re.match(r"rank \d .* died of ", line)]
    assert len(told) == 1, launcher.said()
    assert told[0].startswith(f"{who} died of SIGKILL"), launcher.said()
    cause = launcher.said().partition("Root Cause")[2]
    assert f"rank      : {number} " in cause, launcher.said()
    assert_gone(list(ranks.values()))


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "folder"), [(0, "default"), (1, "named"), (2, "named")])
def test_torchruns_restart_brings_a_run_back_to_the_same_end(rank, folder, launch, run, pool, tmp_path, monkeypatch):
    """Slow steps, so that the kills come in time."""
    fields = {"epochs": 20, "checkpoint.every": 3, "model": "support.tiny:Slow"}
    if folder == "default":
        monkeypatch.chdir(tmp_path)
        run = tmp_path / "runs" / "digits-conadv-001"
    place = words(run, **fields, layout=LAYOUT)
    launcher = launch(["--nproc-per-node", "3", "--max-restarts", "2"], place if folder == "named" else place[:-2])
    for step in (8, 20):
        launcher.wait_for_step(run, step)
        ranks = launcher.ranks()
        os.kill(ranks[rank], signal.SIGKILL)
        assert_gone([ranks[rank]])
        wait_for_other_ranks(launcher, ranks)
    assert launcher.status() == 0, launcher.said()
    whole = tmp_path / "whole"
    assert pool.run(3, tasks.train, str(whole), False, {**fields, "layout": LAYOUT}) == [0] * 3
    assert tiny.equal(tiny.state(run), tiny.state(whole))
    steps = len((run / "metrics.jsonl").read_text().splitlines())
    assert steps == 40
    assert not list(run.rglob("*.partial"))
    assert sorted(path.name for path in run.parent.glob("digits*")) in ([], ["digits-conadv-001"])


def wait_for_other_ranks(launcher: Torchrun, before: dict[int, int]) -> None:
    old = set(before.values())
    until(lambda: len(new := set(launcher.ranks().values())) == 3 and not new & old, launcher.said, 60)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_torchrun_saves_the_run(number, launch, run, tmp_path):
    launcher = launch(["--nproc-per-node", "3"], words(run, **ENDLESS))
    launcher.wait_for_step(run, 3)
    ranks = launcher.ranks()
    os.kill(launcher.pid, number)
    assert launcher.status() != 0
    assert_gone(list(ranks.values()))
    (line,) = [line for line in launcher.said().splitlines() if line.startswith("stopped after step")]
    steps = int(line.split(";")[0].split()[-1])
    assert f"to resume: torchrun --nproc-per-node 3 -m conadv train --resume {run}" in line
    assert launcher.complaints() == []
    resumed = ["train", "--resume", str(run), "--model", "support.tiny:net", "--max-steps", str(steps + 2)]
    assert launch(["--nproc-per-node", "3"], resumed).status() == 0
    whole = undisturbed(tmp_path / "whole", **{**ENDLESS, "layout": "none", "max_steps": steps + 2})
    assert tiny.distance(tiny.state(run), whole) <= 1e-12


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.slow
def test_two_nodes_on_one_machine(launch, run, tmp_path):
    flags = ["--nnodes", "2", "--nproc-per-node", "2", "--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    place = words(run, layout="clean | adv+attack")
    nodes = [launch([*flags, "--node-rank", str(number)], place) for number in (0, 1)]
    assert [launcher.status() for launcher in nodes] == [0, 0], nodes[0].said()
    assert tiny.distance(tiny.state(run), undisturbed(tmp_path / "whole")) <= 1e-12
    assert [launcher.said().count("test_top1") for launcher in nodes] == [1, 0]  # only one rank prints


def test_a_restart_that_only_another_node_counted_goes_on_in_the_folder(run, pool, tmp_path):
    fields = {"layout": "clean | adv+attack", "checkpoint.every": 1}
    stopped, finished = pool.run_twice(2, tasks.train_in_two_parts, str(run), fields, 3)
    assert (stopped, finished) == ([143, 143], [0, 0])
    whole = tmp_path / "whole"
    assert pool.run(2, tasks.train, str(whole), False, fields) == [0] * 2
    assert tiny.equal(tiny.state(run), tiny.state(whole))


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 3])
def test_a_killed_rank_of_one_of_two_nodes_is_restarted_on_both(rank, launch, run, tmp_path):
    """Each agent counts its own restarts."""
    fields = {"epochs": 20, "checkpoint.every": 3, "model": "support.tiny:Slow"}
    place = words(run, **fields, layout="clean | adv+attack")
    flags = ["--nnodes", "2", "--nproc-per-node", "2", "--max-restarts", "3", "--rdzv-backend", "c10d"]
    flags += ["--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--rdzv-id", "two-nodes"]
    nodes = [launch(flags, place) for _ in (0, 1)]
    nodes[0].wait_for_step(run, 8)
    ranks = nodes[0].ranks() | nodes[1].ranks()
    os.kill(ranks[rank], signal.SIGKILL)
    assert [launcher.status() for launcher in nodes] == [0, 0], nodes[0].said() + nodes[1].said()
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 40
    assert tiny.distance(tiny.state(run), undisturbed(tmp_path / "whole", **fields)) <= 1e-12


@pytest.mark.slow
def test_ranks_whose_torchrun_was_killed_save_and_end(launch, run):
    launcher = launch(["--nproc-per-node", "3"], words(run, **ENDLESS))
    launcher.wait_for_step(run, 3)
    ranks = launcher.ranks()
    os.kill(launcher.pid, signal.SIGKILL)
    assert_gone(list(ranks.values()))
    said = launcher.said()
    assert f"torchrun (process {launcher.pid}) is gone: stopping" in said
    (line,) = [line for line in said.splitlines() if line.startswith("stopped after step")]
    steps = int(line.split(";")[0].split()[-1])
    assert (run / "checkpoints" / f"step-{steps:08d}.safetensors").exists()
