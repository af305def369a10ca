"""A process that dies by a signal is reported with the signal's name: runs, their ranks, and workers of the tests."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from conadv import last_words
from support import tiny
from support.launcher import Torchrun
from support.waiting import until

ROOT = Path(__file__).parents[1]
HINT = "set ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16"
PROGRAM = """
import os, signal, sys, time
from conadv import last_words
with last_words.witnessed("rank 3"):
    {end}
"""


def ended(end: str) -> tuple[int, str]:
    """How a process ends, and what is printed on standard error until the witness ends, too."""
    words = [sys.executable, "-c", PROGRAM.format(end=end)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(words, env=environment, stderr=subprocess.PIPE, text=True)
    return done.returncode, done.stderr


@pytest.mark.parametrize("name", ["SIGILL", "SIGSEGV", "SIGBUS", "SIGFPE", "SIGABRT", "SIGKILL"])
def test_a_signal_that_ends_a_process_is_named(name):
    status, said = ended(f"os.kill(os.getpid(), signal.{name})")
    assert status == -signal.Signals[name]
    line, _, stack = said.partition("\n")
    assert line.startswith(f"rank 3 died of {name}")
    assert (HINT in line) == (name == "SIGILL")
    assert ("memory" in line) == (name == "SIGKILL")
    assert ('File "<string>", line 5 in <module>' in stack) == (name != "SIGKILL")


@pytest.mark.parametrize(
    ("end", "status"),
    [
        ("pass", 0),
        ("sys.exit(2)", 2),
        ("last_words.leave(); os._exit(1)", 1),
        ("os.fork() or os.kill(os.getpid(), signal.SIGSEGV); os.wait()", 0),  # only a child crashes
        ("os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
    ],
)
def test_an_end_that_is_no_crash_is_not_reported(end, status):
    assert ended(end) == (status, "")


def test_signals_to_the_group_of_a_process_leave_its_witness(tmp_path):
    """Ctrl-C, or what a scheduler sends to all processes before it kills them."""
    code = PROGRAM.format(end="signal.signal(signal.SIGINT, signal.SIG_IGN); print(flush=True); time.sleep(60)")
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", code], env=environment, process_group=0, **pipes) as process:
        process.stdout.readline()
        os.killpg(process.pid, signal.SIGINT)
        os.killpg(process.pid, signal.SIGKILL)
        assert process.stderr.read().startswith("rank 3 died of SIGKILL")


def test_a_status_is_explained():
    assert last_words.explained_status(-signal.SIGSEGV) == "died of SIGSEGV"
    assert HINT in last_words.explained_status(-signal.SIGILL)
    assert last_words.explained_status(3) == "ended with status 3"


def test_a_rank_under_torchrun_that_dies_is_named_with_its_signal(tmp_path):
    words = tiny.words(epochs=100_000, layout="clean+adv+attack")
    launcher = Torchrun(
        ["--nproc-per-node", "2"], ["train", *words, "--run-dir", str(tmp_path / "run")], tmp_path / "said.txt"
    )
    try:
        launcher.wait_for_step(tmp_path / "run", 2)
        os.kill(launcher.ranks()[1], signal.SIGILL)
        assert launcher.status() == 1
        until(lambda: "rank 1 (lane 1, clean+adv+attack) died of SIGILL" in launcher.said(), launcher.said, 10)
        (line,) = [line for line in launcher.said().splitlines() if " died of " in line]
        assert HINT in line
    finally:
        launcher.close()
