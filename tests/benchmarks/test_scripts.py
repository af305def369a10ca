"""Each script runs as its first lines say, and bad input is one line."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
SCRIPTS = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem not in ("libraries", "scripts"))
SMALL = ["--model", "resnet8", "--width", "4", "--chunk-size", "4", "--image-size", "8"]


def status_of(monkeypatch: pytest.MonkeyPatch, name: str, *words: str) -> int:
    """Of the script in this process, which has imported PyTorch."""
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *words])
    warnings.filterwarnings("ignore", "Cyclopts application invoked without tokens")  # it takes them from sys.argv
    try:
        runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def run(name: str, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(FOLDER / f"{name}.py"), *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_script_says_how_it_is_called(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert f"python benchmarks/{name}.py" in (FOLDER / f"{name}.py").read_text(encoding="utf-8").split('"""')[1]
    assert status_of(monkeypatch, name, "--help") == 0
    assert "--image-size" in capsys.readouterr().out


def test_json_is_all_there_is_on_standard_output() -> None:
    done = run("lars", *SMALL, "--rounds", "2", "--json")
    document = json.loads(done.stdout)
    assert {"processor", "cores", "torch", "load"} <= document["machine"].keys()
    assert document["sizes"]["lars"]["chunk_size"] == 4
    first = document["results"][0]
    assert (first["name"], first["n"], first["benchmark"]) == ("lars/sgd", 2, "lars")
    assert "round 3/3" in done.stderr


def test_a_table_is_printed_otherwise() -> None:
    done = run("attack", *SMALL, "--rounds", "1")
    assert "foolbox/pgd" in done.stdout
    assert "≥ 1.3" in done.stdout


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["lars", "--chunk-size", "0"], "chunk_size is 0"),
        (["data", "--images", "65"], "65 images"),
        (["attack", "--model", "resnet9"], "resnet9"),
    ],
)
def test_mistakes_get_one_line(
    words: list[str], says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status_of(monkeypatch, *words) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert error.startswith("error: ") and error.count("\n") == 1
    assert says in error
