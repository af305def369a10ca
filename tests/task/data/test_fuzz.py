"""Some hundred damaged and hostile data sets; `tools/faults/fuzz.py` has as many as there is time for."""

from __future__ import annotations

from pathlib import Path

import pytest

from task.data.hostile import FORMATS, build, exercise

CASES, GROUPS = 160, 8


@pytest.mark.timeout(120)
@pytest.mark.parametrize("group", range(GROUPS), ids=list(FORMATS))
def test_a_hostile_data_set_is_read_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: int) -> None:
    for seed in range(group, CASES, GROUPS):
        folder = tmp_path / str(seed)
        folder.mkdir()
        monkeypatch.setenv("CONADV_CACHE", str(folder / "cache"))
        kind, path = build(seed, folder)
        assert exercise(seed, path) in ("read", "refused"), f"seed {seed}: {kind}"
