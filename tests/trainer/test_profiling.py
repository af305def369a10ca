"""A profile has the steps that were asked for, behind the first ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from conadv.trainer.profiling import profiled
from conadv.wrappers import PREFIX, STEP


@pytest.mark.parametrize("steps", [1, 2])
def test_it_has_as_many_steps_as_were_asked_for(tmp_path: Path, steps: int) -> None:
    feed = (number for number in range(9))
    taken = []
    for number in profiled(feed, steps, tmp_path / "rank-3.json"):
        assert any(tmp_path.iterdir()) == (number >= 3 + steps)
        taken.append(number)
    assert taken == list(range(9))
    events = json.loads((tmp_path / "rank-3.json").read_text())["traceEvents"]
    assert [event["name"] for event in events].count(f"{PREFIX}{STEP}") == steps
