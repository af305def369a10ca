"""Accelerate: backward, accumulation, two ranks, the end of an epoch, and checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.frameworks import (
    NAMES,
    accelerate_loop,
    accelerate_resumed,
    accumulated,
    assert_equal,
    assert_same,
    expected,
    loader,
    one_by_one,
)
from support.ranks import Pool
from support.settings import small_batches

accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed: make integrations")
# Accelerate warns of its own settings; what conadv says stays an error.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.filterwarnings("error:.*ranks differ")]
each = pytest.mark.parametrize("name", NAMES)


@pytest.fixture(autouse=True)
def reset() -> Iterator[None]:
    from accelerate.state import AcceleratorState, GradientState

    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@each
def test_backward(name: str) -> None:
    model, _ = accelerate_loop(name, loader(4))
    assert_same(model, expected(name, one_by_one(small_batches(4))))


@each
def test_accumulation_with_a_smaller_last_group(name: str) -> None:
    """Accelerate divides by 2 also where the epoch's last group has one batch, and steps after it."""
    model, synchronized = accelerate_loop(name, loader(5), accumulate=2, clip=0.05)
    assert synchronized == [False, True, False, True, True]
    assert_same(model, expected(name, accumulated(small_batches(5)), clip=0.05, divisor=2))


@each
@pytest.mark.parametrize("size", [1, 2])
def test_resuming_in_the_middle_of_an_epoch(name: str, size: int, tmp_path: Path, pool: Pool) -> None:
    whole = pool.run(size, accelerate_resumed, name, None, 8)
    resumed = pool.run(size, accelerate_resumed, name, str(tmp_path / "stop"), 8)
    for one, other in zip(whole, resumed, strict=True):
        assert_equal(other, one)
