"""bfloat16 on the CPU is tried in a child process first, and works or is refused; nothing dies without a word."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from conadv import bf16, cli, config
from support import tiny
from support.launcher import Torchrun

ROOT = Path(__file__).parents[1]
NOTE = "bfloat16 crashes on this processor without a limit: ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16 is set for this run"
# Python imports it in every process. A child that tries bfloat16 dies as on a machine whose AMX does not work.
DYING = """
import os, signal, sys
if "autocast" in sys.orig_argv[-1] and os.environ.get("ONEDNN_MAX_CPU_ISA") not in {survives}:
    os.kill(os.getpid(), signal.SIGILL)
"""
LIMITED, NEVER = ("AVX512_CORE_FP16",), ()


@pytest.fixture(autouse=True)
def unlimited(monkeypatch):
    monkeypatch.delenv(bf16.VARIABLE, raising=False)


@pytest.fixture
def dying(tmp_path, monkeypatch):
    """Let each child that tries bfloat16 die, unless the variable has one of these values."""

    def begin(survives: tuple[str, ...]) -> None:
        (tmp_path / "sitecustomize.py").write_text(DYING.format(survives=survives))
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path), str(ROOT / "src"))))

    return begin


def test_the_real_trial_leaves_this_machine_with_bfloat16_that_works(monkeypatch):
    """On most machines it needs nothing; where AMX does not work, it finds the limit."""
    note = bf16.prepare()
    assert note == (NOTE if bf16.VARIABLE in os.environ else None)
    command = [sys.executable, "-c", bf16._TRIAL]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stderr == ""


def test_a_processor_that_dies_gets_the_limit_and_one_line(dying):
    dying(LIMITED)
    assert bf16.prepare() == NOTE
    assert os.environ[bf16.VARIABLE] == "AVX512_CORE_FP16"


def test_the_limit_of_the_user_is_kept_and_nothing_is_tried(dying, monkeypatch):
    dying(NEVER)
    monkeypatch.setenv(bf16.VARIABLE, "AVX2")
    monkeypatch.setattr(bf16, "_try", pytest.fail)
    assert bf16.prepare() is None
    assert os.environ[bf16.VARIABLE] == "AVX2"


def test_where_the_limit_does_not_help_another_precision_is_advised(dying):
    dying(NEVER)
    with pytest.raises(ValueError, match="use --precision float32"):
        bf16.prepare()
    assert bf16.VARIABLE not in os.environ


def test_where_it_is_too_late_to_set_the_limit_the_variable_and_its_value_are_named(dying):
    dying(LIMITED)
    with pytest.raises(ValueError, match="set ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16 before Python starts"):
        bf16.prepare(sets=False)
    assert bf16.VARIABLE not in os.environ


def test_a_rank_that_tries_nothing_does_what_the_others_found(monkeypatch):
    monkeypatch.setattr(bf16, "_try", pytest.fail)
    assert bf16.prepare(largest=lambda own: max(own, 1), tries=False) == NOTE
    assert os.environ[bf16.VARIABLE] == "AVX512_CORE_FP16"


def command(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "conadv", *words], capture_output=True, text=True)


def test_a_run_on_a_processor_that_dies_trains_and_can_be_evaluated(dying, tmp_path):
    dying(LIMITED)
    run = str(tmp_path / "run")
    words = "train digits --precision bf16 --max-steps 2 --model resnet8 --width 4 --quiet --run-dir"
    done = command(*words.split(), run)
    assert (done.returncode, done.stderr) == (0, NOTE + "\n")
    assert 'precision = "bfloat16"' in (tmp_path / "run" / "config.toml").read_text()
    done = command("eval", run)
    assert (done.returncode, done.stderr) == (0, NOTE + "\n")


@pytest.mark.slow
def test_ranks_try_it_once_and_all_set_the_limit(dying, tmp_path):
    dying(LIMITED)
    words = ["train", *tiny.words(precision="bf16", max_steps=2), "--quiet", "--run-dir", str(tmp_path / "run")]
    launcher = Torchrun(["--nproc-per-node", "2"], words, tmp_path / "said.txt")
    try:
        assert launcher.status() == 0, launcher.said()
    finally:
        launcher.close()
    assert launcher.said().count(NOTE) == 1


def test_a_run_that_cannot_work_ends_with_a_line_and_leaves_no_folder(dying, tmp_path, capsys):
    dying(NEVER)
    run = tmp_path / "run"
    assert cli.main(["train", "digits", "--precision", "bfloat16", "--quiet", "--run-dir", str(run)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: bfloat16 crashes on this processor")
    assert not run.exists()


def test_bf16_is_bfloat16_in_a_flag_a_file_and_python(tmp_path):
    (tmp_path / "short.toml").write_text('precision = "bf16"\n[data]\nname = "digits"\n')
    assert config.load_recipe(str(tmp_path / "short.toml")).precision == "bfloat16"
    assert config.load_recipe("digits", {"precision": "bf16"}).precision == "bfloat16"
    # `conadv.train` reads a recipe that was built by hand in this way.
    assert config.override(config.Recipe(precision="bf16"), {}).precision == "bfloat16"
    with pytest.raises(ValueError, match=r"'bf17' is not one of float32, bfloat16 .* and float64"):
        config.override(config.Recipe(precision="bf17"), {})
