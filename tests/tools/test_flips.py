"""A few damaged runs, so that the fuzzer itself keeps working when the command line changes."""

from __future__ import annotations

from pathlib import Path

from faults import flips


def test_a_damaged_run_is_refused_or_resumed(tmp_path: Path) -> None:
    for seed in range(3):
        _, run = flips.build(seed, tmp_path / str(seed))
        assert flips.exercise(seed, run) in ("refused", "same bits")
