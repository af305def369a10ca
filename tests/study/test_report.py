"""The page of a report: what it says, that it is whole and self-contained, and one line for damaged files."""

from __future__ import annotations

import base64
import csv
import json
import re
import shutil
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pandas as pd
import pytest

from conadv import cli
from conadv.study import figures
from conadv.study.compare import cells, conditions, main_cells
from conadv.study.report import find_curves, verdict
from conadv.study.results import read_results
from study.studies import SMALL, make_study


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_study(tmp_path_factory.mktemp("study"), robust=True)


@pytest.fixture(scope="module")
def page(study: Path) -> str:
    assert cli.main(["report", str(study)]) == 0
    return (study / "report.html").read_text(encoding="utf-8")


def tables(page: str) -> list[pd.DataFrame]:
    """The tables of the page, as a reader sees them."""
    found = []
    for text in re.findall(r"<table.*?</table>", page, re.DOTALL):
        head, *rows = [["".join(cell.itertext()) for cell in row] for row in ElementTree.fromstring(text).iter("tr")]
        found.append(pd.DataFrame(rows, columns=head))
    return found


def test_the_order_is_verdict_figure_table_curves(page: str) -> None:
    places = [
        page.index(text) for text in ('class="verdict"', "<figure>", "<table", "Training curves", "How it was done")
    ]
    assert places == sorted(places)
    assert len(re.findall("<p>", page[places[0] : places[1]])) == 3
    assert "95 % confidence interval of the mean" in page


def test_the_table_shows_the_numbers(page: str, study: Path) -> None:
    expected = conditions(main_cells(cells(read_results(study))))
    assert tables(page)[0].columns[0] == "arm"
    shown = tables(page)[0].set_index("arm")
    assert list(shown.index) == list(expected.index)
    row, text = expected.loc["ConAdv, batch 50"], shown.loc["ConAdv, batch 50"]
    assert text["test accuracy, %"] == f"{row.test_top1:.1f} ± {row.test_top1_std:.1f}"
    assert text["robust accuracy, %"] == f"{row.test_top1 / 2:.1f} ± {row.test_top1_std / 2:.1f}"
    assert text["minus vanilla, points"] == f"+{row.difference:.1f}"
    assert text["95 % interval"] == f"+{row.difference_low:.1f} to +{row.difference_high:.1f}"
    assert shown.loc["vanilla, batch 50"]["minus vanilla, points"] == "baseline"
    assert shown.loc["recycled $x_2$, batch 50"]["seeds"] == "3 (1 to do)"


def test_every_run_is_a_dot_in_the_opening_figure(page: str, study: Path) -> None:
    done = main_cells(cells(read_results(study)))
    done = done[done.done]
    uri = re.search(r'<img src="data:image/svg\+xml;base64,([^"]+)"', page)
    assert uri is not None
    drawing = ElementTree.fromstring(base64.b64decode(uri[1]))
    hollow = [
        use
        for use in drawing.iter("{http://www.w3.org/2000/svg}use")
        if "fill-opacity: 0" in (use.get("style") or "") or "fill: none" in (use.get("style") or "")
    ]
    assert len(hollow) == 2 * len(done), "test and robust accuracy of each run"


def test_the_page_is_self_contained_and_escaped(page: str) -> None:
    assert "<script" not in page and "default-src 'none'" in page
    assert set(re.findall(r'(?:src|srcset|href)="([^:"]*):', page)) == {"data"}
    assert "&lt;study&gt;" in page and "<study>" not in page
    assert "&lt;b&gt;" in page and "<b>" not in page.split("</style>")[1]
    assert "<code>code</code>" in page
    assert "prefers-color-scheme: dark" in page


def test_the_papers_numbers_come_on_request_and_the_output_is_one_json_object(
    study: Path, page: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "ICLR 2022" not in page
    capsys.readouterr()
    assert cli.main(["report", str(study), "--paper", "--json", "-o", str(tmp_path / "with.html")]) == 0
    found = json.loads(capsys.readouterr().out)
    done = sum(cell.summary is not None for cell in read_results(study))
    assert found == {
        "page": str(tmp_path / "with.html"),
        "csv": str(tmp_path / "with.csv"),
        "cells": len(read_results(study)),
        "done": done,
    }
    text = (tmp_path / "with.html").read_text(encoding="utf-8")
    assert "ICLR 2022" in text and "<td>ConAdv</td><td>77.4</td>" in text


def test_cells_are_in_the_csv_file(study: Path, page: str) -> None:
    rows = list(csv.DictReader((study / "report.csv").read_text(encoding="utf-8").splitlines()))
    results = read_results(study)
    assert [row["cell"] for row in rows] == [result.cell for result in results]
    known = {row["cell"]: float(row["test_top1"]) for row in rows if row["test_top1"]}
    assert known == {one.cell: one.summary["test_top1"] for one in results if one.summary}


# The verdict


def verdict_of(tmp_path: Path, outcome, text: str = SMALL) -> list[str]:
    everyone = cells(read_results(make_study(tmp_path, text, outcome)))
    return verdict(everyone, conditions(main_cells(everyone)))


def test_a_verdict_names_what_is_better_and_worse(tmp_path: Path) -> None:
    runs = {
        "vanilla": (50, 50, 50, 50, 50),
        "conadv": (55.1, 54.9, 55.2, 54.8, 55),
        "recycled": (45, 45.1, 45, 44.9, 45),
    }
    text = SMALL.replace("[0, 1]", "[0, 1, 2, 3, 4]")
    found = verdict_of(tmp_path, lambda v: float(runs[v["method"]][v["seed"]]), text)
    assert found[0].startswith("“conadv” has the highest test accuracy, 55.0 ± 0.2 %")
    assert "More accurate than vanilla: “conadv” (+5.0 points); less accurate: “recycled” (−5.0 points)" in found[1]
    assert found[2] == "Each mean is over 5 seeds; 15 of 15 runs have finished."


def test_a_verdict_does_not_prefer_one_of_equals(tmp_path: Path) -> None:
    found = verdict_of(tmp_path, lambda v: 40.0 if v["method"] == "recycled" else 50.0)
    assert found[0].startswith("“vanilla” and “conadv” share the highest test accuracy, 50.0 ± 0.0 %")


@pytest.mark.parametrize(
    ("outcome", "says"),
    [
        (lambda v: None, "No run has finished"),
        (lambda v: "broken", "6 failed"),
        (lambda v: None if v["method"] == "vanilla" else 30.0, "no vanilla arm"),
        (lambda v: 30.0 if v["seed"] == 0 else None, "seeds are too few"),
        (lambda v: 30.0 + 3 * v["seed"] + len(v["method"]) * (-1) ** v["seed"], "No difference from vanilla is sig"),
    ],
)
def test_a_report_claims_no_more_than_the_runs_show(tmp_path: Path, outcome, says: str) -> None:
    assert says in " ".join(verdict_of(tmp_path, outcome))
    assert cli.main(["report", str(tmp_path)]) == 0


# Curves


def test_a_curve_of_accuracy_ends_with_that_of_the_summary(tmp_path: Path) -> None:
    folder = make_study(tmp_path, SMALL, lambda values: 30.0 + values["seed"], steps=12)  # the last one measured is 10
    curves = find_curves(folder, main_cells(cells(read_results(folder))))
    vanilla = curves[curves.label == "vanilla"]
    assert vanilla.test_top1.dropna().tolist() == pytest.approx([30.5 * 5 / 12, 30.5 * 10 / 12, 30.5])
    assert vanilla.epoch[vanilla.test_top1.notna()].tolist() == [2.5, 5.0, 6.0]


def test_curves_are_those_of_vanilla_and_of_the_most_accurate_arms(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[list[str]] = []
    monkeypatch.setattr(figures, "lines", lambda curves, labels, *rest: drawn.append(labels) or figures.Plot("", ""))
    folder = make_study(tmp_path, SMALL, lambda v: {"vanilla": 30.0, "recycled": 31.0, "conadv": 32.0}[v["method"]])
    for most in (3, 2):
        monkeypatch.setattr(figures, "MOST_LINES", most)
        assert cli.main(["report", str(folder)]) == 0
    assert drawn == [["vanilla", "recycled", "conadv"]] * 2 + [["vanilla", "conadv"]] * 2
    shutil.rmtree(folder / "runs")
    assert cli.main(["report", str(folder)]) == 0
    assert len(drawn) == 4 and "Training curves" not in (folder / "report.html").read_text(encoding="utf-8")


# Bad input


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("results.jsonl", "[" * 100_000),
        ("results.jsonl", "[[]]"),
        ("origin.json", '"\\ud800"'),
        ("study.toml", "[" * 100_000),
    ],
)
def test_a_damaged_file_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, text: str) -> None:
    (make_study(tmp_path, SMALL, steps=8) / name).write_text(text, encoding="utf-8")
    assert cli.main(["report", str(tmp_path)]) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ") and message.count("\n") == 1
    assert name in message and "damaged" in message
    assert not (tmp_path / "report.html").exists()


def test_damaged_lines_of_metrics_are_left_out(tmp_path: Path) -> None:
    folder = make_study(tmp_path, SMALL, lambda values: 30.0, steps=8)
    for path in folder.glob("runs/*/metrics.jsonl"):
        path.write_text(path.read_text(encoding="utf-8") + '[]\n{"epoch": "x"}\n{', encoding="utf-8")
    assert cli.main(["report", str(folder)]) == 0
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "Training curves" in page and "robust" not in page, "what was not measured has no column"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["nowhere"], "is not a study (no results.jsonl)"),
        (["{study}", "-o", "page.pdf"], "ends in .html"),
        (["{study}", "-o", "{study}/runs.html"], "which is a folder"),
        (["{study}", "-o", "{study}/results.jsonl/page.html"], "cannot write"),
    ],
)
def test_bad_input_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], says: str) -> None:
    make_study(tmp_path, SMALL, lambda values: 30.0)
    (tmp_path / "runs.html").mkdir()
    assert cli.main(["report", *(word.format(study=tmp_path) for word in words)]) == 2
    message = capsys.readouterr().err
    assert says in message and message.count("\n") == 1


def test_an_empty_study_and_an_absent_library_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "results.jsonl").write_text("")
    assert cli.main(["report", str(tmp_path)]) == 2
    assert "has no cells" in capsys.readouterr().err
    monkeypatch.delitem(sys.modules, "conadv.study.report", raising=False)
    monkeypatch.setitem(sys.modules, "pandas", None)
    monkeypatch.delitem(sys.modules, "conadv.study.compare", raising=False)
    assert cli.main(["report", str(tmp_path)]) == 2
    assert "pip install 'conadv[study]'" in capsys.readouterr().err
