"""The first signal stops a run after its step, saved and with the command that goes on; a second one stops at once."""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import time

import pytest

from conadv import cli
from conadv.trainer import stop
from conadv.trainer.stop import StopRequest, listening
from support import tiny
from support.waiting import until

ENDLESS = {"epochs": 100_000, "checkpoint.every": 1000, "checkpoint.keep": 10}
TERM, INT = signal.SIGTERM, signal.SIGINT


def test_a_signal_behind_another_that_is_not_for_us_is_noted():
    """As Python passes them on: one byte each, of every signal that has a handler."""
    reader, writer = socket.socketpair()
    with reader, writer:
        writer.send(bytes([signal.SIGCHLD, TERM, TERM]))  # `timeout` sends two, at once
        writer.shutdown(socket.SHUT_WR)
        request = StopRequest()
        stop._listen(reader, request)
    assert request.signal == TERM


def test_before_the_ranks_have_met_a_signal_ends_the_process_with_its_own_status(monkeypatch, capfd):
    ended = []
    monkeypatch.setattr(stop, "end_process", ended.append)
    StopRequest(stop._leave).take(TERM)
    assert ended == [143]
    assert "before the first step" in capfd.readouterr().err


def test_afterwards_signals_do_what_they_did_before():
    heard = []
    before = signal.signal(TERM, lambda number, frame: heard.append(number))
    wakeup = signal.set_wakeup_fd(-1)
    try:
        with listening():
            assert heard == []
        os.kill(os.getpid(), TERM)
        until(lambda: heard == [TERM])
        assert signal.set_wakeup_fd(-1) == -1
    finally:
        signal.signal(TERM, before)
        signal.set_wakeup_fd(wakeup)


@pytest.mark.parametrize("by_torchrun", [True, False])
def test_when_torchrun_is_gone_the_run_is_asked_to_stop(by_torchrun, monkeypatch, capsys):
    """Without torchrun, as under nohup, a process may outlive the one that started it."""
    if by_torchrun:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setattr(stop, "_LOOK", 0.01)
    parent = os.getppid()
    with listening() as request:
        request.obey_by(None)
        time.sleep(0.1)
        assert request.signal is None
        monkeypatch.setattr(os, "getppid", lambda: 1)
        if by_torchrun:
            until(lambda: request.signal == TERM)
            assert f"torchrun (process {parent}) is gone" in capsys.readouterr().err
            os.kill(os.getpid(), INT)  # does not interrupt the stop
        time.sleep(0.1)
        assert request.signal == (TERM if by_torchrun else None)


@pytest.mark.parametrize(
    ("number", "size", "asked"), [(INT, 1, [0]), (TERM, 1, [0]), (TERM, 3, [0]), (TERM, 3, [1]), (TERM, 3, [0, 1, 2])]
)
def test_a_signal_while_data_is_listed_ends_all_ranks_at_once(number, size, asked, start):
    """There is nothing to save, and a listing may take longer than a scheduler waits."""
    run = start(tiny.words(layout="clean | adv | attack" if size == 3 else "none"), size, ENDLESS_LISTING="yes")
    until(lambda: "listing" in run.said())
    for rank in asked:
        run.kill(rank, number)
    assert run.statuses(timeout=20) == [128 + number] * size
    name = signal.Signals(number).name
    line = f"stopped by {name} before the first step: nothing is lost; start it again with the same command"
    assert [said for said in run.said().splitlines() if said != "listing"] == [line]
    assert not run.folder.exists()


def test_a_resumed_run_that_is_stopped_before_its_next_step_says_how_to_resume(start):
    run = start(tiny.words(**ENDLESS), 1)
    run.wait_for_step(3)
    run.kill(0, TERM)
    assert run.statuses() == [143]
    kept = sorted(run.folder.rglob("*"))
    resumed = start(["--resume", str(run.folder), "--model", "support.tiny:net"], 1, "resumed", ENDLESS_LISTING="yes")
    until(lambda: "listing" in resumed.said())
    resumed.kill(0, TERM)
    assert resumed.statuses(timeout=10) == [143]
    command = f"to resume: conadv train --resume {run.folder} --model support.tiny:net"
    line = f"stopped by SIGTERM before the first step: nothing is lost; {command}"
    assert resumed.said().splitlines()[-1] == line
    assert sorted(run.folder.rglob("*")) == kept


def steps_and_command(said: str) -> tuple[int, str]:
    (line,) = [line for line in said.splitlines() if line.startswith("stopped")]
    match = re.fullmatch(r"stopped after step (\d+); to resume: (.*)", line)
    assert match is not None
    return int(match[1]), match[2]


@pytest.mark.parametrize("number", [TERM, INT])
def test_a_run_saves_its_state_and_says_how_to_go_on(number, start, tmp_path):
    run = start(tiny.words(**ENDLESS), 1)
    run.wait_for_step(3)
    for _ in range(2):  # a second one at once is the same request
        run.kill(0, number)
    assert run.statuses() == [128 + number]
    steps, command = steps_and_command(run.said())
    assert steps >= 3
    assert [path.stem for path in (run.folder / "checkpoints").iterdir()] == [f"step-{steps:08d}"]
    assert len((run.folder / "metrics.jsonl").read_text().splitlines()) == steps
    assert "Traceback" not in run.said()
    program, *words = shlex.split(command)
    assert program == "conadv"
    assert cli.main([*words, "--quiet", "--max-steps", str(steps + 1)]) == 0
    assert cli.main(["train", *tiny.words(**ENDLESS, max_steps=steps + 1), "--run", str(tmp_path / "whole")]) == 0
    assert tiny.equal(tiny.state(run.folder), tiny.state(tmp_path / "whole"))


@pytest.mark.parametrize(("number", "asked"), [(TERM, [0]), (INT, [1]), (INT, [0, 1, 2])], ids=str)
def test_whichever_learning_ranks_are_asked_all_stop_in_the_same_step(number, asked, start):
    run = start(tiny.words(**ENDLESS, layout="clean | adv | attack"), 3)
    run.wait_for_step(3)
    for rank in asked:
        run.kill(rank, number)
    assert run.statuses() == [128 + number] * 3
    steps, command = steps_and_command(run.said())
    assert command.startswith("torchrun --nproc-per-node 3 -m conadv train --resume ")
    assert [path.stem for path in (run.folder / "checkpoints").iterdir()] == [f"step-{steps:08d}"]
    assert run.complaints() == []


def test_a_rank_that_leaves_late_ends_with_the_same_status(start):
    """The others have left a verdict by then, which its thread obeys."""
    run = start(tiny.words(**ENDLESS, layout="clean | adv+attack"), 2, SLOW_LEAVE="1")
    run.wait_for_step(3)
    run.kill(0, TERM)
    assert run.statuses() == [143] * 2


@pytest.mark.slow
def test_no_rank_ends_before_the_state_is_saved(start):
    """Its launcher would end the rank that still writes."""
    run = start(tiny.words(**ENDLESS, layout="clean | adv | attack"), 3, SLOW_SAVE="2")
    run.wait_for_step(3)
    run.kill(1, TERM)
    assert run.statuses(1) == [143]
    assert list((run.folder / "checkpoints").glob("step-*"))
    assert run.statuses() == [143] * 3


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1], ids=["computing", "waiting for another rank"])
def test_a_second_signal_stops_at_once(rank, start):
    words = tiny.words(**ENDLESS, method="recycled", layout="clean | adv", model="support.tiny:Faulty")
    run = start(words, 2, **tiny.fault("sleep", rank=0, forward_pass=30))
    run.wait_for_step(2)
    time.sleep(1)  # until rank 0 sleeps, and rank 1 waits for it
    run.kill(rank, TERM)
    time.sleep(1.2)
    assert run.statuses(rank, timeout=0) == [None]
    run.kill(rank, TERM)
    assert run.statuses(rank, timeout=20) == [143]
