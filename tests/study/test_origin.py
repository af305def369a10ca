"""Where results come from is noted once for each place and version."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from conadv.study import results
from conadv.study.results import read_origins, record_origin


def test_the_same_origin_is_noted_once_and_another_one_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "_commit", lambda: "aaaa")
    record_origin(tmp_path)
    record_origin(tmp_path)
    (first,) = read_origins(tmp_path)
    assert first["commit"] == "aaaa"
    assert {"conadv", "torch", "python"} <= set(first["versions"]) and first["cores"] >= 1 and first["processor"]
    monkeypatch.setattr(results, "_commit", lambda: "bbbb")
    record_origin(tmp_path)
    path = tmp_path / results.ORIGIN
    path.write_text(path.read_text(encoding="utf-8").replace('"date": "20', '"date": "19'), encoding="utf-8")
    record_origin(tmp_path)  # another day is not another origin
    assert [one["commit"] for one in read_origins(tmp_path)] == ["aaaa", "bbbb"]


def test_the_commit_is_marked_where_sources_have_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "src" / "conadv" / "study"
    package.mkdir(parents=True)
    source = package / "results.py"
    source.write_text("a = 1\n", encoding="utf-8")
    monkeypatch.setattr(results, "__file__", str(source))
    assert results._commit() is None  # no clone

    def git(*words: str) -> str:
        identity = ["-c", "user.name=n", "-c", "user.email=e@example.org", "-c", "commit.gpgsign=false"]
        done = subprocess.run(
            ["git", "-C", str(tmp_path), *identity, *words], check=True, capture_output=True, text=True
        )
        return done.stdout.strip()

    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "one", "--no-verify")
    commit = git("rev-parse", "HEAD")[:12]
    assert results._commit() == commit
    source.write_text("a = 2\n", encoding="utf-8")
    assert results._commit() == f"{commit} (sources changed since)"


@pytest.mark.parametrize("text", ["[", "{}", "[3]", "[NaN]", "[" * 100_000, '"\\ud800"'])
def test_a_damaged_file_is_one_line_to_a_reader_and_replaced_by_a_sweep(tmp_path: Path, text: str) -> None:
    (tmp_path / results.ORIGIN).write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=r"damaged.*remove it") as caught:
        read_origins(tmp_path)
    assert "\n" not in str(caught.value)
    record_origin(tmp_path)
    assert len(read_origins(tmp_path)) == 1
