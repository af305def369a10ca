"""`conadv bench`: what it prints, and what it refuses."""

from __future__ import annotations

import io
import json

import pytest

from conadv import cli
from conadv.setting import settings_of
from conadv.study.bench import layout, step
from conadv.study.bench.alternate import progress
from conadv.study.bench.command import render
from conadv.study.bench.result import Findings, Goal, Result, Spread
from conadv.study.bench.workload import Workload

SMALL = ["--model", "resnet8", "--width", "4", "--chunk-size", "4", "--image-size", "8", "--rounds", "2"]


@pytest.fixture
def stand_ins(monkeypatch):
    """Benchmarks that take no time, and remember what they were asked."""
    asked = []

    def measure(name):
        def run(sizes, rounds, tell):
            asked.append((name, sizes, rounds))
            return Findings([Result(f"{name}/other", Spread.of([2.0]))], ["a note"])

        return run

    modules = {"step": step, "layout": layout}
    for name, module in modules.items():
        monkeypatch.setattr(module, "measure", measure(name))
        monkeypatch.setattr(module, "ROUNDS", 7)
    return asked


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nothing"], "choose step or layout"),
        (["attack"], "python benchmarks/attack.py"),
        (["data"], "python benchmarks/data.py"),
        (["step", "--rounds", "0"], "--rounds is 0 but must be from 1 to 1000000"),
        (["step", "--chunk-size", "0"], "change --chunk-size"),
        (["step", "--image-size", "0"], "change --image-size"),
        (["step", "--model", "resnet9"], "resnet9"),
        (["step", "--model", "resnet8", "--image-size", "x"], "image-size"),
        (["step", "--model", "torch.nn:Identity"], "build it for 10 classes"),
    ],
)
def test_mistakes_get_one_line(words, said: str, capsys) -> None:
    assert cli.main(["bench", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert said in err


def test_a_rank_that_fails_ends_the_benchmark_with_status_1(monkeypatch, capsys) -> None:
    def fail(workload, rounds, tell):
        raise ChildProcessError("a rank of the benchmark failed (status 1): see above")

    monkeypatch.setattr(layout, "measure", fail)
    assert cli.main(["bench", "layout"]) == 1
    assert "a rank of the benchmark failed" in capsys.readouterr().err


def test_the_table_says_it_all() -> None:
    spread = Spread.of([1.0, 1.5, 2.0])
    results = [
        Result("recycled/vanilla-2", spread, Goal("≤", 1.03), composed=False),
        Result("conadv/vanilla-3", spread, flops=2.5, composed=True),
        Result("disadv/vanilla-2 composed", spread, composed=True),
        Result("forward", spread, unit="seconds_per_image"),
        Result("update", spread, unit="seconds"),
    ]
    text = render(
        {
            "machine": {"processor": "an abacus", "gpu": None},
            "sizes": {"layout": {"model": "resnet20"}},
            "results": [{"benchmark": "layout", **result.to_json()} for result in results],
            "notes": ["a note"],
        }
    )
    lines = {line.split()[1]: line for line in text.splitlines() if line.startswith("layout")}
    assert lines["recycled/vanilla-2"].split()[2:5] == ["1.500", "1.100", "1.900"]
    assert lines["recycled/vanilla-2"].endswith("≤ 1.03  missed")
    assert "(composed)" in lines["conadv/vanilla-3"] and "2.500" in lines["conadv/vanilla-3"]
    assert "(composed)" not in lines["disadv/vanilla-2"]
    assert "forward per image" in text and "1500" in lines["update"]
    assert text.startswith("processor an abacus\nmodel resnet20\n") and text.endswith("a note")


def test_without_a_name_all_are_run(stand_ins, capsys) -> None:
    assert cli.main(["bench", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [entry["benchmark"] for entry in document["results"]] == ["step", "layout"]
    assert document["notes"][0] == "step: a note"
    small = Workload("resnet20", None, 64, 32, 10)
    assert stand_ins == [("step", small, 7), ("layout", small, 7)]


def test_sizes_that_are_given_are_taken(stand_ins) -> None:
    words = ["--model", "resnet8", "--rounds", "3", "--width", "4", "--chunk-size", "6", "--image-size", "8"]
    assert cli.main(["bench", "step", *words, "--classes", "3"]) == 0
    assert stand_ins == [("step", Workload("resnet8", 4, 6, 8, 3), 3)]


def test_help_teaches_every_size(capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert cli.main(["bench", "--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"{setting.flag} " in text for setting in settings_of(Workload))


def test_json_is_all_there_is_on_standard_output(capsys) -> None:
    assert cli.main(["bench", "step", *SMALL, "--json"]) == 0
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert {"processor", "cores", "torch", "load"} <= document["machine"].keys()
    assert document["sizes"]["step"]["chunk_size"] == 4
    first = document["results"][0]
    assert (first["name"], first["n"], first["benchmark"]) == ("vanilla/plain", 4, "step")
    assert {"ratio", "low", "high"} <= first.keys()
    assert "round 3/3" in err


def test_a_table_is_printed_otherwise(stand_ins, capsys) -> None:
    assert cli.main(["bench", "step"]) == 0
    assert "step/other" in capsys.readouterr().out


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_a_bar_on_a_terminal() -> None:
    stream = Terminal()
    tell = progress("step", stream)
    for done in (1, 2, 1, 2):  # two measurements, one after the other
        tell(done, 2)
    assert "step, 0 s left" in stream.getvalue()
    assert "2/2" in stream.getvalue()


def test_progress_elsewhere_is_one_line_for_a_short_measurement() -> None:
    stream = io.StringIO()
    tell = progress("step", stream)
    for done in (*range(1, 101), *range(1, 101)):
        tell(done, 100)
    assert stream.getvalue().count("\n") == 2
    assert stream.getvalue().count("round 100/100") == 2
    assert "step, 0 s left" in stream.getvalue()
