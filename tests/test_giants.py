"""The largest values of fields train or end in one line; those above a bound are refused in a line that names them."""

from __future__ import annotations

import pytest

from conadv import cli, config, memory
from support import tiny
from support.ranks import Run

# The largest numbers that fields of their kind take; attack.steps, delay, width and data.image_size cost time and
# memory, which are the user's own.
LARGEST = {
    "batch_size": 10**12, "chunk_size": 10**12, "epochs": 10**6, "max_steps": 10**12, "seed": 2**63 - 1,
    "timeout": 10**7, "clip_norm": 10**6, "eval_robust": 10**12,
    "attack.epsilon": 1, "attack.step_size": 10**6, "optimizer.lr": 10**6, "optimizer.weight_decay": 10**6,
    "schedule.power": 10**6, "data.train_size": 10**12, "data.copies": 64, "data.held_out": 10**12,
    "data.channels": 10**4, "data.workers": 1024, "checkpoint.every": 10**12,
}  # fmt: skip


@pytest.mark.parametrize("key", LARGEST)
def test_the_largest_number_that_a_field_takes_trains_or_ends_in_one_line(key, tmp_path):
    """On synthetic data and a built-in network, which every number reaches."""
    changes = {"model": "resnet8", "data.name": "synthetic", "data.train_size": 24, "max_steps": 1, "epochs": 1}
    changes |= {"schedule.warmup_epochs": 0, "data.augment": "none", "precision": "float32", "data.image_size": 8}
    changes |= {"data.train_size": LARGEST[key]} if key in ("batch_size", "chunk_size") else {}
    changes |= {"batch_size": LARGEST[key]} if key == "chunk_size" else {}
    words = tiny.words(**changes | {key: LARGEST[key]})
    run = Run(tmp_path / "run", [*words, "--run-dir", str(tmp_path / "run")], 1)
    (status,) = run.statuses(timeout=100)
    run.close()
    assert status in (0, 1, 2), run.said()
    assert "Traceback" not in run.said()
    if status:
        (line,) = run.complaints()
        assert line.startswith("error: ")


@pytest.mark.parametrize(
    "words",
    [
        "--width 40000",
        "--delay 100000",
        "--attack.steps 1000000000",
        "--data.image-size 100000",
        "--threads 100000",
        "--optimizer.lr 1e308",
        "--optimizer.weight-decay 1e308",
        "--timeout 1e308",
        "--data.name synthetic --data.train-size 1000000000000",
        "--data.name synthetic --data.image-size 8192 --data.channels 10000",
    ],
)
def test_giants_are_refused_in_one_line_that_names_what_to_lower(words, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(memory, "free_memory", lambda: 8 * 2**30)
    monkeypatch.chdir(tmp_path)
    given = words.split()
    sizes = {"--batch-size": "256", "--chunk-size": "64", "--data.train-size": "1437", "--epochs": "1"}
    more = [word for flag, value in sizes.items() if flag not in given for word in (flag, value)]
    assert cli.main(["train", "digits", *more, *given]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert any(flag in line for flag in given[::2])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes")]
)
def test_out_of_memory_says_what_to_lower(error, monkeypatch, capsys):
    def fail(*_):
        raise error

    monkeypatch.setattr(config.files, "_read", fail)
    assert cli.main(["train"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: out of memory: lower --chunk-size, --width")


def test_another_error_of_the_runtime_is_still_a_traceback(monkeypatch):
    def fail(*_):
        raise RuntimeError("a bug")

    monkeypatch.setattr(config.files, "_read", fail)
    with pytest.raises(RuntimeError, match="a bug"):
        cli.main(["train"])
