"""The profile of a run: traces per rank, and the picture that is drawn of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from conadv import wrappers as spans
from conadv.cli import main
from conadv.study import timeline
from conadv.study.timeline import Span, draw_timeline, read_timeline
from support import tasks, tiny
from support.ranks import Pool


def test_the_names_are_those_of_the_code() -> None:
    assert tuple(timeline.COLOURS) == spans.SPANS and (timeline.PREFIX, timeline.STEP) == (spans.PREFIX, spans.STEP)


def test_a_profiled_run_leaves_a_trace_per_rank_and_becomes_a_picture(pool: Pool, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    changes = {"method": "conadv", "layout": "clean | adv | attack", "profile": 2}
    assert pool.run(3, tasks.train, str(folder), False, changes) == [0] * 3
    found = read_timeline(folder)
    names = {rank: {one.name for one in rank_spans} for rank, rank_spans in found.items()}
    assert sum(one.name == "step" for one in found[0]) == 2
    assert {"load", "clean pass", "gradient sum", "update"} <= names[0]
    assert {"hand-off", "adversarial pass", "gradient sum"} <= names[1] and "clean pass" not in names[1]
    assert {"load", "attack", "hand-off"} <= names[2] and "adversarial pass" not in names[2]
    assert main(["timeline", str(folder), "-o", str(tmp_path / "steps.svg")]) == 0
    picture = (tmp_path / "steps.svg").read_text()
    assert "rank 2" in picture and "run:" in picture


def test_a_profile_changes_no_number(pool: Pool, tmp_path: Path) -> None:
    states = []
    for steps in (0, 2):
        folder = tmp_path / str(steps)
        assert pool.run(1, tasks.train, str(folder), False, {"method": "recycled", "profile": steps}) == [0]
        states.append(tiny.state(folder))
    assert tiny.equal(*states)
    assert not (tmp_path / "0" / "traces").exists()


def write_trace(folder: Path, rank: int, events: list[dict[str, Any]], **about: Any) -> None:
    path = folder / "traces" / f"rank-{rank}.json"
    path.parent.mkdir(exist_ok=True)
    known = [{"cat": "user_annotation", **event} for event in events]
    path.write_text(json.dumps({**about, "traceEvents": known}))


def test_spans_are_put_on_one_clock(tmp_path: Path) -> None:
    """Rank 1 began 5 ms later; time 0 is the start of the last step that all have."""
    for rank, base in ((0, 1_000_000_000), (1, 1_005_000_000)):
        events = [
            {"name": "conadv: step", "ts": 1000.0, "dur": 9000.0},
            {"name": "conadv: attack", "ts": 2000.0, "dur": 500.0},
            {"cat": "cpu_op", "name": "conadv: update", "ts": 1.0, "dur": 1.0},
        ]
        write_trace(tmp_path, rank, events, baseTimeNanoseconds=base)
    found = read_timeline(tmp_path)
    assert found[1] == [Span("step", 0.0, 9.0), Span("attack", 1.0, 1.5)]
    assert found[0] == [Span("step", -5.0, 4.0), Span("attack", -4.0, -3.5)]
    assert draw_timeline([("two ranks", found)], tmp_path / "x.png")["two ranks, ms per step"] == pytest.approx(9)


EVENT = '{"cat": "user_annotation", "name": "conadv: step", "ts": %s, "dur": 9.0}'


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        '{"traceEvents": 3}',
        '{"traceEvents": [{"cat": 1}]}',
        f'{{"traceEvents": [{EVENT % 10**400}]}}',  # no clock shows that
        f'{{"baseTimeNanoseconds": {10**400}, "traceEvents": [{EVENT % 1.0}]}}',
    ],
)
def test_what_is_no_trace_is_refused_in_one_line(content: str, tmp_path: Path, capsys) -> None:
    (tmp_path / "traces").mkdir()
    assert main(["timeline", str(tmp_path)]) == 2
    assert "has no traces" in capsys.readouterr().err
    (tmp_path / "traces" / "rank-0.json").write_text(content)
    assert main(["timeline", str(tmp_path)]) == 2
    message = capsys.readouterr().err
    assert "profile" in message and message.count("\n") == 1


def test_the_step_of_median_length_is_drawn(tmp_path: Path) -> None:
    """Steps of 10, 50 and 20 ms; rank 1 was recorded from the second one on, and begins each 1 ms later."""
    lengths, starts = (10, 50, 20), (0, 10, 60)
    for rank in (0, 1):
        events = [
            {"name": "conadv: step", "ts": 1e3 * (start + rank), "dur": 1e3 * (length - rank)}
            for start, length in list(zip(starts, lengths, strict=True))[rank:]
        ]
        write_trace(tmp_path, rank, events)
    found = read_timeline(tmp_path)
    assert found[1] == [Span("step", -50.0, -1.0), Span("step", 0.0, 19.0)]
    assert draw_timeline([("a", found)], tmp_path / "a.svg")["a, ms per step"] == 19.0
