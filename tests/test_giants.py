"""Promise: every number in a flag or a file has a bound, and what would ask for too much memory is refused first."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conadv import cli, config, memory
from conadv.setting import Setting
from support import tiny
from support.ranks import Run

FLOAT32 = torch.finfo(torch.float32).max
GIANTS = ("1" + "0" * 5000, "1e308", "1e39", str(2**63 - 1), "1000000000000", "1000000000", "100000", "8192", "4000")
RECIPE = [setting for setting in config.settings().values() if setting.kind in (int, float)]


def key(setting: Setting) -> str:
    return setting.key


@pytest.mark.parametrize("setting", RECIPE, ids=key)
@given(data=st.data())
def test_every_numeric_field_has_a_bound_that_float32_and_int64_hold(setting, data):
    numbers = st.integers(0, 10**400) if setting.kind is int else st.floats() | st.integers(10**30, 10**400)
    text = str(data.draw(numbers))
    try:
        taken = setting.parse([text] * (setting.length or 1) if setting.length is not None else text)
    except ValueError as refusal:
        problem = str(refusal)
    else:
        problem = ""
    if problem:
        assert "\n" not in problem and setting.flag in problem
        return
    for number in taken if isinstance(taken, tuple) else (taken,):
        assert isinstance(number, setting.kind)
        assert math.isfinite(number)
        assert 0 <= number <= (2**63 - 1 if setting.kind is int else FLOAT32 / 1e12)


def largest(setting: Setting) -> str | None:
    """The largest of the giants that the field takes."""
    for text in GIANTS:
        try:
            setting.parse(text)
        except ValueError:
            continue
        return text
    return None


@pytest.mark.parametrize("setting", [setting for setting in RECIPE if largest(setting)], ids=key)
def test_the_largest_number_that_a_field_takes_trains_or_ends_in_one_line(setting, tmp_path):
    """On synthetic data and a built-in network, which every number reaches."""
    changes = {"model": "resnet8", "data.name": "synthetic", "data.train_size": 24, "max_steps": 1, "epochs": 1}
    changes |= {"schedule.warmup_epochs": 0, "data.augment": "none", "precision": "float32", "data.image_size": 8}
    giant = largest(setting)
    if setting.key == "chunk_size":
        changes |= {"batch_size": giant, "data.train_size": giant}
    if setting.key == "batch_size":
        changes |= {"data.train_size": giant}
    if setting.key == "attack.steps":
        changes |= {"max_steps": 1, "attack.steps": 2}  # time is the user's own
        giant = "2"
    run = Run(tmp_path / "run", [*tiny.words(**changes | {setting.key: giant}), "--run-dir", str(tmp_path / "run")], 1)
    (status,) = run.statuses(timeout=100)
    run.close()
    said = run.said()
    assert status in (0, 1, 2), said
    assert "Traceback" not in said
    if status:
        (line,) = run.complaints()
        assert line.startswith("error: ")


@pytest.mark.parametrize(
    "words",
    [
        "--width 4000",
        "--width 4000 --model resnet50",
        "--delay 100000",
        "--attack.steps 1000000000",
        "--data.classes 1000000000",
        "--data.image-size 100000",
        "--threads 100000",
        "--optimizer.lr 1e308",
        "--optimizer.lr 1e39",
        "--optimizer.weight-decay 1e308",
        "--timeout 1e308",
        "--data.name synthetic --data.train-size 1000000000000",
        "--data.name synthetic --data.image-size 8192 --data.channels 10000",
        "--data.name synthetic --model resnet50 --data.image-size 8192 --data.train-size 512 --chunk-size 256",
    ],
)
def test_giants_are_refused_in_one_line_that_names_what_to_lower(words, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(memory, "free_memory", lambda: 8 * 2**30)
    monkeypatch.chdir(tmp_path)
    assert (
        cli.main(
            [
                "train",
                "digits",
                "--batch-size",
                "256",
                "--chunk-size",
                "64",
                "--data.train-size",
                "1437",
                "--epochs",
                "1",
                *words.split(),
            ]
        )
        == 2
    )
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert any(flag in line for flag in words.split()[::2])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes")]
)
def test_out_of_memory_says_what_to_lower(error, monkeypatch, capsys):
    def fail(*_):
        raise error

    monkeypatch.setattr(config, "load_recipe", fail)
    assert cli.main(["train"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: out of memory: lower --chunk-size, --width")


def test_another_error_of_the_runtime_is_still_a_traceback(monkeypatch):
    def fail(*_):
        raise RuntimeError("a bug")

    monkeypatch.setattr(config, "load_recipe", fail)
    with pytest.raises(RuntimeError, match="a bug"):
        cli.main(["train"])
