"""What is sent of a step is what was known of it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conadv.ranks.outcome import CULPRITS, Outcome, Report

RANKS = 4
ranks = st.integers(0, RANKS - 1)
outcomes = st.builds(
    Outcome,
    clean_loss=st.floats(0, 9),
    adv_loss=st.floats(0, 9),
    culprits=st.none() | st.dictionaries(ranks, st.sampled_from(CULPRITS)),
    stop=st.integers(0, 64),
    drifted=st.sets(ranks).map(lambda found: tuple(sorted(found))),
    save=st.booleans(),
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@given(outcomes)
def test_an_outcome_crosses_as_numbers(dtype, outcome):
    report = Report(RANKS)
    numbers = report.pack(outcome, torch.zeros(1, dtype=dtype))
    assert numbers.dtype == dtype
    assert len(numbers) == report.size
    assert report.unpack(numbers, outcome.clean_loss, outcome.adv_loss, outcome.save) == outcome
