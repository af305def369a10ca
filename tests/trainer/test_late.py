"""Outcomes read one step late, as on a GPU: the same weights and the same metrics as where each is read at once."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from conadv import cli
from conadv.trainer import train as training
from conadv.trainer.build import build_job
from support import tasks, tiny
from support.fake_ranks import record_rank


@pytest.fixture
def read_late(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Call it, and runs of this process read late."""
    return lambda: monkeypatch.setattr(
        training, "build_job", lambda *arguments, **more: replace(build_job(*arguments, **more), late=True)
    )


def train(folder: Path, **changes: Any) -> int:
    fields = {"checkpoint__every": 2, "checkpoint__keep": 10, **changes}
    return cli.main(["train", *tiny.words(**fields), "--run", str(folder), "--quiet"])


def lines(folder: Path) -> list[dict[str, Any]]:
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "seconds"} for line in metrics]


@pytest.mark.parametrize(
    "changes", [{"method": "recycled", "eval_every": 1}, {"method": "conadv", "delay": 2}], ids=str
)
def test_reading_late_changes_nothing(changes, tmp_path, read_late):
    assert train(tmp_path / "now", **changes) == 0
    read_late()
    assert train(tmp_path / "late", **changes) == 0
    assert tiny.equal(tiny.state(tmp_path / "late"), tiny.state(tmp_path / "now"))
    assert lines(tmp_path / "late") == lines(tmp_path / "now")


@pytest.mark.parametrize("step", [3, 5], ids=["before a checkpoint", "in the last step"])
def test_a_run_that_ends_for_it_has_saved_no_such_weights(step, tmp_path, read_late, monkeypatch, capsys):
    read_late()
    for name, value in tiny.fault("loss", 0, 6 * step + 2).items():
        monkeypatch.setenv(name, value)
    assert train(tmp_path / "run", method="vanilla", model="support.tiny:Faulty", checkpoint__every=step + 1) == 1
    assert f"error: step {step}: the loss on rank 0" in capsys.readouterr().err
    assert [line["step"] for line in lines(tmp_path / "run")] == list(range(step))
    assert not list((tmp_path / "run" / "checkpoints").glob("step-*"))


LAGGING = {"method": "conadv", "delay": 2, "layout": "attack | clean | adv", "checkpoint__keep": 10}


def test_ranks_that_may_lag_end_with_the_same_bits_also_stopped_and_resumed(pool, tmp_path):
    whole, late, part = (tmp_path / name for name in ("whole", "late", "part"))
    assert pool.run(3, tasks.train, str(whole), False, LAGGING) == [0] * 3
    assert pool.run(3, tasks.train_late, str(late), False, LAGGING) == [0] * 3
    assert pool.run(3, tasks.train_late, str(part), False, LAGGING, 1, 1) == [143] * 3
    assert pool.run(3, tasks.train_late, str(part), True, {"layout": LAGGING["layout"]}) == [0] * 3
    for folder in (late, part):
        assert tiny.equal(tiny.state(folder), tiny.state(whole))
        assert lines(folder) == lines(whole)
        assert len(list((folder / "checkpoints").glob("step-*"))) > 1  # besides that of the end


@pytest.mark.parametrize("delay", [1, 3])
def test_ranks_communicate_in_the_order_of_runs_that_read_at_once(delay):
    changes = {"method": "conadv", "layout": "clean | adv | attack", "delay": delay}
    for rank in range(3):
        assert record_rank(rank, 3, changes, late=True) == record_rank(rank, 3, changes)
