"""results.jsonl: damaged lines, the run that represents an arm, and runs that lack pictures."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest

from conadv import cli
from conadv.study.results import GALLERY, read_results, showcase, without_pictures
from study.studies import make_study

STUDY = """
arm = [{name = "a"}, {name = "b", grids = ["tuning"]}, {name = "plain", method = "vanilla"},
       {name = "zero", attack.epsilon = 0}]
grid = [{name = "tuning", seed = [5, 6]}, {name = "final", seed = [0, 1]}, {name = "more", seed = [2]}]
"""


def test_an_arm_is_shown_by_its_first_cell_that_is_not_for_tuning(tmp_path: Path) -> None:
    folder = make_study(tmp_path, STUDY)
    seeds = {arm: result.values["seed"] for arm, result in showcase(read_results(folder)).items()}
    assert seeds == {"a": 0, "b": 5, "plain": 0, "zero": 0}


def test_pictures_are_missing_where_there_is_a_checkpoint_and_an_adversary(tmp_path: Path) -> None:
    folder = make_study(tmp_path, STUDY)
    for result in read_results(folder):
        (folder / "runs" / result.cell / "checkpoints" / "step-00000001").mkdir(parents=True)
    assert [result.arm for result in without_pictures(folder)] == ["a", "b"]
    first = without_pictures(folder)[0]
    (folder / "runs" / first.cell / GALLERY).write_text("{}", encoding="utf-8")
    assert [result.arm for result in without_pictures(folder)] == ["b"]


def test_a_run_without_a_checkpoint_or_an_end_can_have_no_pictures(tmp_path: Path) -> None:
    folder = make_study(tmp_path, STUDY, lambda values: None)
    assert without_pictures(folder) == []
    assert without_pictures(make_study(tmp_path / "done", STUDY)) == []


def changed(line: dict[str, Any], random: Random) -> Any:
    """A line of which one entry, at any depth, is of another kind, out of range, or gone."""
    strange = random.choice(
        [None, 3, -1.5, "", "../x", "\ud800", [], [[1]], {}, {"a": [1]}, True, 10**400, 1e999, "<b>"]
    )
    place: Any = line
    while True:
        key = random.choice(list(place))
        if isinstance(place[key], dict) and place[key] and random.random() < 0.7:
            place = place[key]
            continue
        if random.random() < 0.2:
            del place[key]
        else:
            place[key] = strange
        return line


def damaged(text: str, random: Random) -> str:
    match random.randrange(4):
        case 0:
            return json.dumps(changed(json.loads(text), random))
        case 1:
            start = random.randrange(len(text))
            return text[:start] + text[start + random.randrange(1, 40) :]
        case 2:
            start = random.randrange(len(text))
            return (
                text[:start] + random.choice(["[" * 100_000, "NaN", '"', "}", "\\", "1e999", "9" * 5000]) + text[start:]
            )
        case _:
            return random.choice(["[]", "3", "null", '"x"', "{}", "NaN", "[" * 100_000, " "])


@pytest.mark.parametrize("seed", range(60))
def test_a_damaged_line_gives_a_report_or_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], seed: int
) -> None:
    """Whatever is wrong with one line of results.jsonl."""
    random = Random(seed)
    folder = make_study(tmp_path, '[grid]\nmethod = ["vanilla", "conadv"]\nseed = [0, 1]\n', steps=3)
    path = folder / "results.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines()
    number = random.randrange(len(lines))
    lines[number] = damaged(lines[number], random)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    status = cli.main(["report", str(folder)])
    message = capsys.readouterr().err
    assert status in (0, 2)
    if status == 2:
        assert message.startswith("error: ") and message.count("\n") == 1 and "damaged" in message
