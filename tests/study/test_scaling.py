"""The scaling model against arithmetic by hand, and the page against what the script prints."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from studies.scaling.scaling import Link, Machine, calibrated, estimate, predict

ROOT = Path(__file__).parents[2]
FREE = Link(0.0, float("inf"))
SECONDS = Machine(nodes=4, devices=8, overhead=0.0, seconds=1.0, inside=FREE, between=FREE, jitter=0.0)


def step(method: str, layout: str, lanes: int = 1, batch: int = 4, **changes: object) -> float:
    """Seconds of a step in chunks of one image, where a pass takes a second and communication nothing."""
    return estimate(Machine(**{**vars(SECONDS), **changes}), method, layout, lanes, batch, chunk=1).step


@pytest.mark.parametrize(
    ("method", "layout", "seconds"),
    [
        ("vanilla", "clean", 12),
        ("sam", "clean", 24),
        ("conadv", "clean+adv+attack", 32),
        ("conadv", "clean | adv+attack", 20),
        ("conadv", "clean+adv | attack", 24),
        ("conadv", "clean | adv | attack", 12),
        ("disadv", "clean | adv+attack", 20),
        ("disadv", "clean | adv | attack", 14),  # waits for the first twin, two passes
        ("recycled", "clean | adv", 12),
        ("conadv", "2 clean | 2 adv | attack", 8),
    ],
)
def test_a_step_lasts_as_long_as_its_busiest_rank(method: str, layout: str, seconds: float) -> None:
    assert step(method, layout) == pytest.approx(seconds)


def test_lanes_share_the_chunks_and_a_slow_link_shows() -> None:
    assert step("conadv", "clean | adv | attack", lanes=2) == pytest.approx(6)
    slow = Link(5.0, float("inf"))
    # One chunk: 3 s of learning, and what shows of 4 all_reduces of 2 × 5 s, of which a backward pass hides 2.
    assert step("recycled", "clean | adv", batch=1, inside=slow) == pytest.approx(3 + 4 * 2 * 5 - 2)
    assert step("recycled", "clean | adv", batch=40, inside=slow) == pytest.approx(40 * 5)  # the link is always busy


def test_the_paper_by_hand() -> None:
    machine = calibrated()
    assert predict(machine, "vanilla", 2048, "clean", 2, "images/ms") == pytest.approx(75.7, rel=1e-9)
    assert predict(machine, "vanilla", 32768, "clean", 64, "s") == pytest.approx(622, rel=1e-9)
    # A step of 2048/75.7 ms, of which half of a reduction over 1024 cores shows: 2 × 10 levels of 1 µs for each of 4
    # buckets, and 2 × 102.2 MB at 83 GB/s. The rest of it are three passes; DisAdv takes five.
    shown = 0.5 * (4 * 2 * 10 * 1e-3 + 2 * 4 * 25_557_032 / 83e9 * 1e3)
    five = (2048 / 75.7 - shown) * 5 / 3 + shown + 0.5 * 4 * 2 * 1e-3
    assert predict(machine, "disadv", 2048, "clean | adv+attack", 2, "images/ms") == pytest.approx(
        2048 / five, rel=1e-6
    )


@pytest.mark.parametrize("words", ["", "--batch-size 98304 --nodes 576", "--paper"])
def test_the_page_shows_what_the_script_prints(words: str) -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "studies/scaling/scaling.py", *words.split()],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout in (ROOT / "studies/scaling/README.md").read_text(encoding="utf-8")
