"""metrics.jsonl has a line a step, no gap and none twice."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conadv.trainer.metrics import Metrics, read_metrics


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines()


def write(path: Path, start: int, stop: int) -> Metrics:
    metrics = Metrics(path, start)
    for step in range(start, stop):
        metrics.log(step, {"loss": step / 7})
    metrics.close()
    return metrics


def test_each_step_is_a_line_of_json_at_once_also_when_a_number_is_not_finite(tmp_path):
    metrics = Metrics(tmp_path / "metrics.jsonl", 0)
    metrics.log(0, {"loss": 0.1})
    assert lines(tmp_path / "metrics.jsonl") == ['{"step": 0, "loss": 0.1}']
    for step, number in enumerate((float("nan"), float("inf"), -float("inf")), 1):
        metrics.log(step, {"loss": number})
        assert lines(tmp_path / "metrics.jsonl")[-1] == f'{{"step": {step}, "loss": null}}'
    metrics.close()


@given(st.integers(0, 8), st.integers(0, 8), st.binary(max_size=20))
def test_resumed_anywhere_there_is_no_gap_and_no_line_twice(tmp_path_factory, reached, start, torn):
    path = tmp_path_factory.mktemp("run") / "metrics.jsonl"
    start = min(start, reached)
    write(path, 0, reached)
    with path.open("ab") as file:  # the line that a killed run was writing
        file.write(torn)
    assert write(path, start, 9).missing == 0
    assert [line["step"] for line in read_metrics(path)] == list(range(9))
    assert len(lines(path)) == 9


@pytest.mark.parametrize(
    "damage",
    [b"\xff\xfe\n", b"[]\n", b'{"step": null}\n', b"[" * 60_000 + b"\n", b'{"step": 0}\n', b"9" * 5000 + b"\n"],
    ids=range(6),
)
def test_a_damaged_line_ends_what_is_kept_and_the_rest_is_counted(damage, tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, 0, 4)
    whole = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(whole[0] + damage + b"".join(whole[2:]))
    assert write(path, 4, 6).missing == 3
    assert [line["step"] for line in read_metrics(path)] == [0, 4, 5]
    assert path.read_bytes().startswith(whole[0])
    path.unlink()
    assert write(path, 7, 7).missing == 7


def test_what_is_no_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "metrics.jsonl")
    with pytest.raises(ValueError, match="is not a regular file"):
        Metrics(tmp_path / "metrics.jsonl", 0)
    with pytest.raises(ValueError, match="is not a regular file"):
        read_metrics(tmp_path / "metrics.jsonl")


def test_a_disk_that_fills_up_leaves_whole_lines(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    metrics = Metrics(path, 0)
    metrics.log(0, {"loss": 1.0})

    class Full:
        """A file that takes three bytes of a line, and then no more."""

        def __init__(self, file: io.FileIO) -> None:
            self.file = file
            self.room = 3

        def __getattr__(self, name: str) -> object:
            return getattr(self.file, name)

        def write(self, data: bytes) -> int:
            if not self.room:
                raise OSError(28, "No space left on device")
            written = self.file.write(data[: self.room])
            self.room = 0
            return written

    monkeypatch.setattr(metrics, "_file", Full(metrics._file))
    with pytest.raises(OSError, match=r"metrics.jsonl \(No space left on device\): free some space"):
        metrics.log(1, {"loss": 1.0})
    metrics.close()
    assert [json.loads(line)["step"] for line in lines(path)] == [0]


def test_reading_ends_where_a_line_is_torn(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n{"step": 1}\n{"ste')
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 0}, {"step": 1}]
    assert read_metrics(tmp_path / "other.jsonl") == []
