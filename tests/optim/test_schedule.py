"""Schedules: exact where it is promised, and of the right shape in between."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conadv.optim.schedule import Schedule, warmup_constant, warmup_cosine, warmup_poly

positive = st.floats(1e-6, 1e6)
counts = st.tuples(st.integers(1, 400), st.integers(0, 400)).filter(lambda pair: pair[1] <= pair[0])
DECAYING = pytest.mark.parametrize(
    "make",
    [warmup_poly, partial(warmup_poly, power=0.5), partial(warmup_poly, power=1.6), warmup_cosine],
    ids=["poly-2", "poly-0.5", "poly-1.6", "cosine"],
)


@DECAYING
@settings(deadline=None)
@given(peak=positive, counts=counts, share=st.floats(0, 1))
def test_rises_in_equal_parts_to_the_peak_then_falls_to_the_end(
    make: Callable[..., Schedule], peak: float, counts: tuple[int, int], share: float
) -> None:
    steps, warmup = counts
    end = peak * share
    schedule = make(peak, steps, warmup, end=end)
    values = [schedule(step) for step in range(steps)]
    top = max(warmup - 1, 0)
    assert values[top] == peak
    assert values[:top] == pytest.approx([peak / warmup * (step + 1) for step in range(top)], rel=1e-12)
    assert all(later <= earlier * (1 + 1e-12) for earlier, later in zip(values[top:], values[top + 1 :], strict=False))
    assert all(end * (1 - 1e-12) <= value <= peak * (1 + 1e-12) for value in values[top:])
    assert values[0] > 0
    if top < steps - 1:
        assert values[-1] == end
    assert schedule(steps) == schedule(10 * steps) == end


@settings(deadline=None)
@given(peak=positive, warmup=st.integers(0, 400), step=st.integers(0, 1000))
def test_constant_rises_and_stays(peak: float, warmup: int, step: int) -> None:
    expected = peak if step + 1 >= warmup else peak * (step + 1) / warmup
    assert warmup_constant(peak, warmup)(step) == pytest.approx(expected, rel=1e-12)
    assert warmup_constant(peak, warmup)(max(warmup - 1, 0)) == peak


def test_figures_worked_out_by_hand() -> None:
    """11 steps, 3 of warm-up: the peak is step 2, half of the way down is step 6."""
    poly = warmup_poly(8.0, 11, 3, end=4.0)
    cosine = warmup_cosine(8.0, 11, 3, end=4.0)
    cubic = warmup_poly(8.0, 9, power=3)
    assert [poly(step) for step in (0, 1, 2, 6, 10)] == pytest.approx([8 / 3, 16 / 3, 8.0, 5.0, 4.0])
    assert [cosine(step) for step in (2, 4, 6, 10)] == pytest.approx([8.0, 6 + math.sqrt(2), 6.0, 4.0])
    assert [cubic(step) for step in (0, 2, 4, 6, 8)] == pytest.approx([8.0, 3.375, 1.0, 0.125, 0.0])
    assert [warmup_cosine(4.0, 5)(step) for step in (0, 2, 4)] == pytest.approx([4.0, 2.0, 0.0])
    assert [warmup_constant(3.0)(step) for step in (0, 9)] == [3.0, 3.0]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"peak": 0.0}, "peak 0.0"),
        ({"peak": math.nan}, "peak nan"),
        ({"peak": math.inf}, "peak inf"),
        ({"steps": 0}, "in 0 steps"),
        ({"steps": 10.0}, "steps 10.0"),
        ({"warmup": 11}, "warm-up of 11 in 10 steps"),
        ({"warmup": -1}, "warmup -1"),
        ({"warmup": 0.3}, "warmup 0.3"),
        ({"power": 0.0}, "power 0.0"),
        ({"power": math.nan}, "power nan"),
        ({"end": -1.0}, "end -1.0"),
        ({"end": 2.0}, "end 2.0"),
    ],
)
def test_bad_arguments_are_named(wrong: dict[str, Any], message: str) -> None:
    arguments = {"peak": 1.0, "steps": 10, "warmup": 2, **wrong}
    makers: list[Callable[..., Schedule]] = [warmup_poly, *([] if "power" in wrong else [warmup_cosine])]
    for make in makers:
        with pytest.raises(ValueError, match=message):
            make(**arguments)
    if wrong.keys() <= {"peak"}:
        with pytest.raises(ValueError, match=message):
            warmup_constant(arguments["peak"], 2)


@pytest.mark.parametrize("schedule", [warmup_poly(1.0, 10, 2), warmup_cosine(1.0, 10), warmup_constant(1.0)])
@pytest.mark.parametrize("step", [-1, 0.5])
def test_a_step_is_a_whole_number_from_0(schedule: Callable[[Any], float], step: float) -> None:
    with pytest.raises(ValueError, match=f"step {step}"):
        schedule(step)
