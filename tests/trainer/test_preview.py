"""What a run says of itself before its first step, and that saying it changes nothing."""

from __future__ import annotations

import pytest

from conadv.cli import main
from support import tiny

FLAGS = [word for name, value in tiny.FIELDS.items() for word in (f"--{name.replace('_', '-')}", str(value))]


@pytest.mark.parametrize(("method", "told"), [("conadv", "epsilon 24/255, delay 1"), ("vanilla", "vanilla; lars")])
def test_a_run_says_what_it_will_do(method, told, tmp_path, capsys):
    assert main(["train", "digits", *FLAGS, "--method", method, "--run", str(tmp_path / "run")]) == 0
    lines = capsys.readouterr().err.splitlines()[:4]
    assert [line.split()[0] for line in lines] == ["model", "data", "method", "run"]
    plain = sum(parameter.numel() for parameter in tiny.net(10, 1).parameters())  # without adversarial branches
    assert f"support.tiny:net, {plain:,} parameters" in lines[0] and "8 × 8 × 1, 10 classes" in lines[1]
    assert told in lines[2] and "on 1 rank" in lines[3] and "cpu with 1 thread" in lines[3]


def test_a_resumed_run_says_what_is_left_and_a_complete_one_nothing(tmp_path, capsys):
    run = str(tmp_path / "run")
    assert main(["train", "digits", *FLAGS, "--max-steps", "2", "--run", run]) == 0
    assert main(["train", "--resume", run, "--model", "support.tiny:net", "--max-steps", "6"]) == 0
    assert "run     steps 3 to 6 of" in capsys.readouterr().err
    assert main(["train", "--resume", run, "--model", "support.tiny:net"]) == 0
    told = capsys.readouterr().err
    assert "parameters" not in told
    assert f"{run} is complete" in told
