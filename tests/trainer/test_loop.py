"""Numbers that are not finite end a run, and are in no checkpoint; checkpoints come by steps and by time."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from conadv import cli
from support import tiny

# A step has 6 chunks, and each takes a pass for the attack, the images and the twins: this one is in step 2.
PASS_IN_STEP_2 = {"vanilla": 6 * 2 + 3, "conadv": 6 * 3 * 2 + 6 + 8}


@pytest.fixture(params=["vanilla", "conadv"])
def method(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch):
    """Let the model go wrong."""

    def prepare(kind: str, forward_pass: int) -> None:
        for name, value in tiny.fault(kind, 0, forward_pass).items():
            monkeypatch.setenv(name, value)

    return prepare


def train(folder: Path, **changes: Any) -> int:
    fields = {"model": "support.tiny:Faulty", "checkpoint__every": 1, "checkpoint__keep": 10, **changes}
    return cli.main(["train", *tiny.words(**fields), "--run", str(folder), "--quiet"])


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


NAMED = {"loss": "loss", "gradient": "gradient, or a statistic of BatchNorm,"}


@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_a_run_stops_and_says_where_and_what_to_try(what, method, faulty, tmp_path, capsys):
    faulty(what, PASS_IN_STEP_2[method])
    assert train(tmp_path / "run", method=method) == 1
    (line,) = capsys.readouterr().err.splitlines()
    role = {"vanilla": "clean", "conadv": r"clean\+adv\+attack"}[method]
    assert re.fullmatch(
        rf"error: step 2: the {NAMED[what]} on rank 0 \(lane 0, {role}\) is not finite "
        r"\(epoch 1, batch 0, learning rate \d+\.?\d*\): "
        r"try a lower --optimizer.lr or a longer --schedule.warmup-epochs",
        line,
    )
    assert [entry["step"] for entry in lines(tmp_path / "run")] == [0, 1]
    assert train(tmp_path / "whole", method=method, max_steps=2) == 0
    assert tiny.equal(tiny.state(tmp_path / "run"), tiny.state(tmp_path / "whole"))


@pytest.mark.parametrize(
    ("what", "rank", "role"),
    [("loss", 0, "clean"), ("gradient", 0, "clean"), ("loss", 1, "adv"), ("gradient", 1, "adv")],
)
def test_what_one_rank_has_all_notice_in_the_same_step(what, rank, role, start):
    words = tiny.words(model="support.tiny:Faulty", layout="clean | adv | attack", checkpoint__every=1)
    # A rank that learns from twins generates those of the first step itself, in 6 passes.
    run = start(words, 3, **tiny.fault(what, rank, forward_pass=15 + 6 * rank))
    assert run.statuses() == [1, 1, 1]
    (line,) = run.complaints()
    assert line.startswith(f"error: step 2: the {NAMED[what]} on rank {rank} (lane 0, {role}) is not finite (epoch 1,")
    assert "Traceback" not in run.said()
    assert all(tensor.isfinite().all() for tensor in tiny.state(run.folder).values())
    assert [entry["step"] for entry in lines(run.folder)] == [0, 1]


@pytest.mark.parametrize("direction", ["sign", "raw"])
def test_a_gradient_of_the_attack_that_is_not_finite_never_reaches_the_weights(direction, start):
    """A sign of it moves no pixel; as it is, it makes a twin that is noticed when it is learnt from."""
    words = tiny.words(model="support.tiny:Faulty", layout="clean | adv | attack", attack__direction=direction)
    run = start(words, 3, **tiny.fault("loss", 2, forward_pass=15))
    if direction == "sign":
        assert run.statuses() == [0, 0, 0]
    else:
        assert run.statuses() == [1, 1, 1]
        assert "the loss on rank 1 (lane 0, adv) is not finite" in run.said()
    assert all(tensor.isfinite().all() for tensor in tiny.state(run.folder).values())
