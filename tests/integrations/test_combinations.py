"""Every loop takes the steps of a plain one with every method, every mistake is answered, and the docs list both."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, product
from typing import Any

import pytest
import torch

from combinations import COMBINATIONS, DOCS, Combination, written
from support.frameworks import ALARMS, NAMES, expected
from support.ranks import Pool
from support.refusals import REFUSALS, Refusal, answers
from support.settings import small_batches

# Other libraries warn of their own settings; what conadv says stays an error.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.filterwarnings(f"error:{ALARMS}")]
COUNT = 4  # batches of each process


def cases() -> Iterator[Any]:
    """Every row with one process and two, with and without accumulation, by every method.

    Of a slow row two methods run with accumulation and the others without, and the rest where there is time.
    """
    for row in COMBINATIONS:
        for ranks, accumulate, name in product(row.ranks, (1, 2), NAMES):
            usual = (accumulate == 2) == (name in ("conadv", "recycled"))
            marks = [pytest.mark.slow] if row.slow and not usual else []
            yield pytest.param(row, ranks, accumulate, name, marks=marks, id=f"{row}-{ranks}-{accumulate}-{name}")


@pytest.mark.parametrize(("row", "ranks", "accumulate", "name"), list(cases()))
def test_the_steps_are_those_of_a_plain_loop(
    row: Combination, ranks: int, accumulate: int, name: str, pool: Pool
) -> None:
    """The gradient of a step is the mean over its batches, of all processes and accumulated ones."""
    pytest.importorskip(row.library, reason=f"{row.library} is not installed: make integrations")
    turns = [list(enumerate(batches)) for batches in zip(*[iter(small_batches(COUNT * ranks))] * ranks, strict=True)]
    steps = [list(chain(*turns[first : first + accumulate])) for first in range(0, COUNT, accumulate)]
    reference = expected(name, steps)
    states = pool.run(ranks, row.train, name, COUNT, accumulate) if ranks > 1 else [row.train(name, COUNT, accumulate)]
    compared = dict(reference.named_parameters()) if ranks > 1 else reference.state_dict()
    for state in states:
        for key, value in compared.items():
            torch.testing.assert_close(state[key], value.detach(), rtol=0, atol=1e-10)


@pytest.mark.parametrize("row", [row for row in REFUSALS if row.library != "torch"], ids=str)
def test_a_mistake_is_answered(row: Refusal, pool: Pool) -> None:
    pytest.importorskip(row.library, reason=f"{row.library} is not installed: make integrations")
    assert set(answers(row, pool)) == {row.message}


def test_the_docs_list_the_combinations() -> None:
    text = DOCS.read_text()
    assert text == written(text), "run python tools/combinations.py"
