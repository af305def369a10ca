"""`conadv train --attackers`: the same weights with and without, and one line where it cannot work."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from conadv.cli import main
from conadv.config import attackers_of
from conadv.study.timeline import read_timeline
from conadv.trainer import build
from conadv.trainer.build import check_fit
from support import fake_ray, tasks, tiny

WORDS = ["train", "digits", "--model", "support.tiny:net", "--max-steps", "1"]


class FakePool(fake_ray.FakePool):
    """A pool that is played in this process: one of its attackers is lost in each third step."""

    def __init__(self, make_model, attackers, resources, address):
        super().__init__(make_model, attackers, wait=0.01, replaces=True, slowness=0.3)
        self.closed, self._chance, self._begun = False, random.Random(0), 0

    def begin(self, t, ahead):
        if t % 3 == 2 and self._actors:
            self._ray.kill(self._actors[self._chance.choice(list(self._actors))])
        super().begin(t, ahead)

    def close(self):
        self.closed = True


@pytest.fixture
def made(monkeypatch):
    """The pools that runs have made."""
    pools = []

    def make(*arguments):
        pools.append(FakePool(*arguments))
        return pools[-1]

    monkeypatch.setattr(build, "Pool", make)
    monkeypatch.setattr(FakePool, "_tell_once", lambda *_: None)
    return pools


def train(folder: Path, stop_after: int = 0, resume: bool = False, **changes: object) -> dict:
    status = tasks.train(str(folder), resume, {"method": "conadv", **changes} if not resume else changes, stop_after)
    assert status == (143 if stop_after else 0)
    return tiny.state(folder)


@pytest.mark.parametrize("delay", [1, 2])
def test_attackers_change_no_number(made, tmp_path, delay):
    alone = train(tmp_path / "alone", delay=delay)
    assert tiny.equal(alone, train(tmp_path / "pool", delay=delay, attackers="2", profile=2))
    assert [pool.closed for pool in made] == [True]
    lines = [json.loads(line) for line in (tmp_path / "pool" / "metrics.jsonl").read_text().splitlines()]
    assert sum(line["twins_pool"] for line in lines) > 0
    assert all(line["twins_pool"] + line["twins_here"] == 6 for line in lines)
    assert all(line["attackers"] <= 2 and line["seconds_waited"] >= 0 for line in lines)
    rows = read_timeline(tmp_path / "pool")
    assert [row for row in rows if isinstance(row, int)] == [0]
    spans = [span for row, own in rows.items() if str(row).startswith("attacker") for span in own]
    begin, end = (
        function(getattr(span, side) for span in rows[0] if span.name == "step")
        for function, side in ((min, "start"), (max, "end"))
    )
    assert any(begin < span.start < end and span.name == "attack" for span in spans)  # on one clock


def train_on_a_rank(folder: str, changes: dict[str, object]) -> int:
    """With a pool that is played on each rank."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "Pool", FakePool)
        patch.setattr(FakePool, "_tell_once", lambda *_: None)
        return tasks.train(folder, False, changes)


def test_two_ranks_with_attackers_change_no_number(pool, tmp_path):
    states = []
    for number in ("none", "2"):
        changes = {"method": "conadv", "delay": 2, "attackers": number}
        assert pool.run(2, train_on_a_rank, str(tmp_path / number), changes) == [0, 0]
        states.append(tiny.state(tmp_path / number))
    assert tiny.equal(*states)
    lines = [json.loads(line) for line in (tmp_path / "2" / "metrics.jsonl").read_text().splitlines()]
    assert sum(line["twins_pool"] for line in lines) > 0


@pytest.mark.parametrize(("before", "after"), [("2", "none"), ("none", "2"), ("1", "3")])
def test_resumes_bitwise_with_and_without_attackers(made, tmp_path, before, after):
    whole = train(tmp_path / "whole")
    train(tmp_path / "run", stop_after=3, attackers=before)
    assert tiny.equal(whole, train(tmp_path / "run", resume=True, attackers=after))
    assert made and all(pool.closed for pool in made)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--method", "vanilla"], "which only conadv with a delay of 1 or more has"),
        (["--method", "disadv"], "which only conadv with a delay of 1 or more has"),
        (["--attackers", "many"], "attackers 'many': give a number, or a Ray cluster"),
        (["--attackers", "4@127.0.0.1:1"], "no Ray cluster answers at 127.0.0.1:1"),
    ],
)
def test_where_attackers_cannot_work_is_one_line(words, said, tmp_path, capsys):
    method = [] if "--method" in words else ["--method", "conadv"]
    attackers = [] if "--attackers" in words else ["--attackers", "2"]
    assert main([*WORDS, *method, *attackers, *words, "--run-dir", str(tmp_path / "run")]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("error: ") and said in line
    assert not (tmp_path / "run").exists()


def test_roles_and_attackers_exclude_each_other():
    recipe = tiny.recipe(method="conadv", layout="clean | adv | attack", attackers="2")
    with pytest.raises(ValueError, match="exclude each other: drop --layout or --attackers"):
        check_fit(recipe, 3)


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("3", (3, None)),
        ("ray://head:10001", (None, "ray://head:10001")),
        ("8@head:6379", (8, "head:6379")),
        ("auto", (None, "auto")),
    ],
)
def test_addresses(text, parsed):
    assert attackers_of(tiny.recipe(attackers=text)) == parsed
