"""A node is lost for good: under `torchrun --nnodes 1:2` the run continues on the ranks that are left, same batch."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from conadv import cli
from support import tiny
from support.launcher import Torchrun
from support.waiting import until

FIELDS = {"epochs": 10, "checkpoint.every": 2, "checkpoint.keep": 1000, "model": "support.tiny:Slow", "layout": "auto"}


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[Torchrun]]:
    """Two agents of one elastic job, of which the first keeps the store; none is left after the test."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    patience = "last_call_timeout=20,keep_alive_interval=1,keep_alive_max_attempt=4"
    flags = ["--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "3", "--rdzv-backend", "c10d"]
    flags += ["--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "elastic", "--rdzv-conf", patience]
    words = ["train", *tiny.words(**FIELDS), "--run-dir", str(tmp_path / "run")]
    started = [Torchrun(flags, words, tmp_path / "said-0.txt")]
    until(lambda: _listens(port), seconds=200)
    started.append(Torchrun(flags, words, tmp_path / "said-1.txt"))
    yield started
    for launcher in started:
        launcher.close()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_continues_with_fewer_ranks_when_a_node_is_lost_for_good(nodes: list[Torchrun], tmp_path: Path):
    run = tmp_path / "run"
    until(lambda: len(nodes[0].ranks() | nodes[1].ranks()) == 2, nodes[0].said, 300)
    nodes[0].wait_for_step(run, 5, timeout=300)
    assert "on 2 ranks" in nodes[0].said() + nodes[1].said()
    for pid in (nodes[1].pid, *nodes[1].ranks().values()):
        os.kill(pid, signal.SIGKILL)
    assert nodes[0].status(timeout=500) == 0, nodes[0].said()

    (first,) = re.findall(r"run +steps (\d+) to 20 of 24 images on 1 rank ", nodes[0].said())
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 20
    alone = _resumed_alone(run, int(first) - 1, tmp_path / "alone")
    assert tiny.equal(tiny.state(run), tiny.state(alone))


def _resumed_alone(run: Path, step: int, copy: Path) -> Path:
    """The same run, resumed by one process from its checkpoint of this step."""
    shutil.copytree(run, copy)
    (copy / "summary.json").unlink()
    for path in (copy / "checkpoints").glob("step-*"):
        if int(path.stem[5:]) > step:
            path.unlink()
    assert cli.main(["train", "--resume", str(copy), "--model", "support.tiny:Slow", "--quiet"]) == 0
    return copy
