"""--compile: the same numbers, few graphs that are made once, plain names in checkpoints, and errors of one line."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from conadv import cli
from conadv.trainer import build
from conadv.trainer.kernels import compile_model
from support import tiny

# The kinds of passes of each method: by branch, with statistics or without. Evaluation is not compiled. The first
# twins of recycled come from a pass of their own.
GRAPHS = {"vanilla": 1, "disadv": 3, "conadv": 3, "recycled": 3, "sam": 2}

# The compiler looks for `.grad` on whatever it is given; it hides the warning, unless warnings are errors.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")


@pytest.fixture(autouse=True)
def _fresh_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A backend that runs the traced graph without generating C++, which takes minutes."""
    monkeypatch.setattr(build, "compile_model", partial(compile_model, backend="eager"))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def train(folder: Path, **changes: Any) -> int:
    return cli.main(["train", *tiny.words(**changes), "--run", str(folder), "--quiet"])


def assert_the_same_numbers(tmp_path: Path, graphs: int, **more: Any) -> None:
    changes = {"eval_every": 1, "epochs": 2, "schedule__warmup_epochs": "0%", **more}
    assert train(tmp_path / "plain", **changes) == 0
    assert train(tmp_path / "compiled", **changes, compile="true") == 0
    assert tiny.distance(tiny.state(tmp_path / "compiled"), tiny.state(tmp_path / "plain")) < 1e-12
    counters = torch._dynamo.utils.counters
    assert (counters["stats"]["unique_graphs"], dict(counters["graph_break"])) == (graphs, {})


@pytest.mark.parametrize("method", GRAPHS)
def test_a_compiled_run_has_the_same_numbers_and_a_graph_for_each_kind_of_pass(method, tmp_path):
    assert_the_same_numbers(tmp_path, GRAPHS[method], method=method)


def test_backward_passes_are_compiled_too_and_a_run_resumes_bit_for_bit(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "compile_model", partial(compile_model, backend="aot_eager"))
    changes = {"method": "conadv", "compile": "true"}
    assert train(tmp_path / "whole", **changes) == 0
    assert train(tmp_path / "part", **changes, max_steps=3) == 0
    words = [
        "train",
        "--resume",
        str(tmp_path / "part"),
        "--model",
        "support.tiny:net",
        "--max-steps",
        "none",
        "--quiet",
    ]
    assert cli.main(words) == 0
    assert tiny.equal(tiny.state(tmp_path / "part"), tiny.state(tmp_path / "whole"))


def test_a_layer_with_a_forward_pass_of_its_own_keeps_its_numbers(tmp_path):
    for compiles in ("true", "false"):
        changes = {"model": "support.tiny:split_by_its_author", "max_steps": 2, "compile": compiles}
        assert train(tmp_path / compiles, **changes) == 0
    assert tiny.distance(tiny.state(tmp_path / "true"), tiny.state(tmp_path / "false")) < 1e-12


def test_a_compiler_that_fails_is_one_line(tmp_path, monkeypatch, capsys):
    def fail(*_: object) -> None:
        raise RuntimeError("no C++ compiler was found")

    monkeypatch.setattr(build, "compile_model", partial(compile_model, backend=fail))
    assert train(tmp_path / "run", compile="true") == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: --compile: ")
    assert error.endswith("no C++ compiler was found: drop --compile, or fix what it names")
