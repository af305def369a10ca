"""The mistakes of docs/integrations.md that need no other library are answered as the table says."""

from __future__ import annotations

import pytest

from support.ranks import Pool
from support.refusals import REFUSALS, Refusal, answers


@pytest.mark.parametrize("row", [row for row in REFUSALS if row.library == "torch"], ids=str)
def test_a_mistake_is_answered(row: Refusal, pool: Pool) -> None:
    assert set(answers(row, pool)) == {row.message}
