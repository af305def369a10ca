"""Damaged files in the folder of a study: a report, or one line that says which file; never a traceback."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest

from conadv import cli
from conadv.study.report import write_report
from study.studies import add_gallery, make_study

STUDY = """title = "Damage"
arm = [{name = "vanilla", method = "vanilla"}, {name = "recycled", method = "recycled"}, {name = "conadv"}]
[grid]
seed = [0, 1]
"""
FILES = ("results.jsonl", "origin.json", "study.toml", "curves.json", "metrics.jsonl", "gallery.json")
STRANGE = [None, 3, -1.5, "", "../x", "\ud800", [], [[1]], {}, {"a": [1]}, True, 10**400, 1e999, "<b>", [None, 1]]
PIECES = ["[" * 100_000, "NaN", '"', "}", "\\", "1e999", "9" * 5000, "\x00", "null", "-", "\n"]


def changed(content: Any, random: Random) -> Any:
    """Parsed JSON of which one entry, at any depth, is of another kind, out of range, or gone."""
    place = content
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        if not keys:
            return random.choice(STRANGE)
        key = random.choice(keys)
        if isinstance(place[key], dict | list) and place[key] and random.random() < 0.75:
            place = place[key]
            continue
        if random.random() < 0.25:
            del place[key]
        else:
            place[key] = random.choice(STRANGE)
        return content


def damaged(text: str, random: Random) -> str:
    kind, start = random.randrange(4), random.randrange(len(text) or 1)
    if kind == 0:
        return text[:start] + text[start + random.randrange(1, 40) :]
    if kind == 1:
        return text[:start] + random.choice(PIECES) + text[start:]
    if kind == 2:
        return random.choice(["[]", "3", "null", '"x"', "{}", "NaN", "[" * 100_000, " ", "[[]]", "{", "[{}]"])
    try:
        return json.dumps(changed(json.loads(text), random))
    except ValueError:  # not JSON
        return text[::-1]


def damage_one_file(folder: Path, random: Random, name: str) -> None:
    (path, *_) = sorted([*folder.glob(name), *folder.glob(f"runs/*/{name}")])
    if name == "curves.json":  # read only where the runs are gone
        for metrics in folder.glob("runs/*/metrics.jsonl"):
            metrics.unlink()
    text = path.read_text(encoding="utf-8")
    if name.endswith(".jsonl"):
        lines = text.splitlines()
        number = random.randrange(len(lines))
        lines[number] = damaged(lines[number], random)
        text = "\n".join(lines) + "\n"
    else:
        text = damaged(text, random)
    path.write_text(text, encoding="utf-8", errors="surrogatepass")


def prepare(folder: Path, seed: int) -> str:
    """A study in this folder, and the name of the file that is damaged in it."""
    make_study(folder, STUDY, steps=4)
    for run in (folder / "runs").iterdir():
        add_gallery(run, side=4)
    write_curves = {"loss": {"conadv": [[0.5, 2.3], [1.0, 1.2], [1.5, 0.4]]}, "progress": {}}
    (folder / "curves.json").write_text(json.dumps(write_curves), encoding="utf-8")
    name = FILES[seed % len(FILES)]
    damage_one_file(folder, Random(seed), name)
    return name


def check(folder: Path, seed: int, capsys: pytest.CaptureFixture[str]) -> None:
    name = prepare(folder, seed)
    status = cli.main(["report", str(folder)])
    message = capsys.readouterr().err
    assert status in (0, 2)
    assert message.count("\n") == (status == 2)
    if status == 2:
        assert message.startswith("error: ") and name in message and "damaged" in message


@pytest.mark.parametrize("seed", range(48))
def test_a_damaged_file_gives_a_report_or_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], seed: int
) -> None:
    check(tmp_path, seed, capsys)


@pytest.mark.parametrize("key", ["twin_share", "attack.steps"])
@pytest.mark.parametrize("value", [None, "x", True, 1e999])
def test_a_damaged_setting_of_the_work_of_a_cell_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], key: str, value: Any
) -> None:
    make_study(tmp_path, STUDY, steps=4)
    *lines, last = (tmp_path / "results.jsonl").read_text(encoding="utf-8").splitlines()
    cell = json.loads(last)
    cell["values"][key] = value
    (tmp_path / "results.jsonl").write_text("\n".join([*lines, json.dumps(cell)]), encoding="utf-8")
    assert cli.main(["report", str(tmp_path)]) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1 and "line 6 of" in message and "results.jsonl' is damaged" in message


@pytest.mark.parametrize("name", ["results.jsonl", "origin.json", "metrics.jsonl"])
def test_what_is_no_file_is_refused_before_it_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """A device here; a pipe would keep the report waiting forever."""
    make_study(tmp_path, STUDY, steps=4)
    for path in (*tmp_path.glob(name), *tmp_path.glob(f"runs/*/{name}")):
        path.unlink()
        path.symlink_to("/dev/null")
    assert cli.main(["report", str(tmp_path)]) == 2
    message = capsys.readouterr().err
    assert f"{name} is not a regular file" in message and message.count("\n") == 1


@pytest.mark.slow
def test_many_damaged_files_give_a_report_or_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed in range(48, 348):
        check(tmp_path / str(seed), seed, capsys)


@pytest.mark.slow
def test_the_committed_report_is_what_its_committed_files_give(tmp_path: Path) -> None:
    """The text; figures depend on the version of matplotlib."""
    results = Path(__file__).parents[2] / "docs" / "results"
    write_report(results / "cifar10-500", tmp_path / "cifar10-500.html")
    written, committed = (folder / "cifar10-500.md" for folder in (tmp_path, results))
    assert written.read_text(encoding="utf-8") == committed.read_text(encoding="utf-8")


def test_curves_are_kept_for_when_the_runs_are_gone(tmp_path: Path) -> None:
    folder = make_study(tmp_path, STUDY, steps=20)
    write_report(folder)
    page = (folder / "report.html").read_bytes()
    for metrics in folder.glob("runs/*/metrics.jsonl"):
        metrics.unlink()
    write_report(folder)
    assert (folder / "report.html").read_bytes() == page
    assert b"Training curves" in page
