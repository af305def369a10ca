"""Values above a bound, and runs out of memory, end in one line that names what to lower."""

from __future__ import annotations

import pytest

from conadv import cli, config


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
    ],
)
def test_giants_are_refused_in_one_line_that_names_what_to_lower(words, tmp_path, capsys, monkeypatch):
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
