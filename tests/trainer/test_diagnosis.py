"""`--diagnose`: no number of the training changes, a resumed run logs the same, and so does every layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import tasks
import tiny
from conadv import cli
from ranks import Pool

MEASURED = {
    "stale_distance", "stale_agreement", "weight_drift", "lemma1_constant", "stale_loss", "fresh_loss",
    "gradient_norm", "stale_gradient_norm", "gradient_error", "gradient_variance",
}  # fmt: skip
METHODS = {
    "disadv": {"method": "disadv"},
    "conadv": {"method": "conadv", "delay": 2},
    "recycled": {"method": "recycled"},
    "share": {"method": "conadv", "twin_share": 0.5, "chunk_size": 2, "data__mixup": 0.4},
    "views": {"method": "conadv", "data__views": "three", "precision": "bfloat16"},
}


def train(folder: Path, **changes: Any) -> Path:
    assert cli.main(["train", *tiny.words(**changes), "--run", str(folder), "--quiet"]) == 0
    return folder


def lines(run: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in ("seconds", "crc")} for line in found]


@pytest.mark.parametrize("name", METHODS)
def test_training_is_bitwise_the_same(name: str, tmp_path: Path) -> None:
    without = train(tmp_path / "without", **METHODS[name])
    run = train(tmp_path / "with", diagnose=2, **METHODS[name])
    assert tiny.equal(tiny.state(without), tiny.state(run))
    bare = [{key: value for key, value in line.items() if key not in MEASURED} for line in lines(run)]
    assert bare == lines(without)
    measured = [line for line in lines(run) if "stale_loss" in line]
    assert [line["step"] for line in measured] == [1, 3, 5]
    # The twins that the step has learnt from are those that were measured.
    if name != "share":  # where adv_loss is a sum over the chunks with twins
        assert all(line["stale_loss"] == pytest.approx(line["adv_loss"], rel=1e-6) for line in measured)
    assert all(MEASURED - line.keys() <= {"lemma1_constant"} for line in measured)
    fresh = name == "disadv"
    assert all((line["stale_distance"] == line["weight_drift"] == 0) == fresh for line in measured)


def test_a_resumed_run_logs_what_one_that_never_stopped_does(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", method="conadv", delay=2, diagnose=1)
    parts = train(tmp_path / "parts", method="conadv", delay=2, max_steps=3)
    words = ["--resume", str(parts), "--model", "tiny:net", "--max-steps", "none", "--diagnose", "1", "--quiet"]
    assert cli.main(["train", *words]) == 0
    assert lines(parts)[3:] == lines(whole)[3:]
    assert not MEASURED & lines(parts)[2].keys()


@pytest.mark.parametrize(
    ("method", "size", "layout", "every"),
    [("conadv", 3, "clean | adv | attack", 1), ("recycled", 2, "adv | clean", 3), ("share", 2, None, 3)],
)
def test_every_layout_measures_the_same(
    method: str, size: int, layout: str | None, every: int, pool: Pool, tmp_path: Path
) -> None:
    fields = {**METHODS[method], "diagnose": every, "epochs": 2, "checkpoint__every": 10}
    alone = lines(train(tmp_path / "alone", **fields))
    several = tmp_path / "several"
    assert set(pool.run(size, tasks.train, str(several), False, {**fields, "layout": layout or "none"})) == {0}
    for one, other in zip(alone, lines(several), strict=True):
        assert one == pytest.approx(other, rel=1e-9)


@pytest.mark.parametrize("method", ["vanilla", "sam"])
def test_methods_without_twins_refuse(method: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    assert cli.main(["train", *tiny.words(method=method, diagnose=1), "--run", str(run)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"error: method {method} has no twins that could be stale: drop --diagnose"
    assert not run.exists()
