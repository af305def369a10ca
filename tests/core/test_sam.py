"""SAM in a user's loop: models that are not split, and lengths that are none."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from conadv import Sam, plain_state_dict, split_batchnorm
from support.settings import small_batches, small_cnn, train


def test_a_model_that_is_not_split_takes_the_steps_of_one_that_is() -> None:
    """Which are those of the definition; the running statistics are those of the first pass."""
    plain, split = small_cnn(), split_batchnorm(small_cnn(), ("main",))
    for model in (plain, split):
        train(Sam(model, F.cross_entropy, rho=0.5), model, small_batches(2))
    torch.testing.assert_close(plain.state_dict(), plain_state_dict(split), rtol=0, atol=1e-12)


@pytest.mark.parametrize("rho", [0, -1, math.inf, math.nan])
def test_a_length_above_0_is_needed(rho: float) -> None:
    with pytest.raises(ValueError, match="a length above 0, such as"):
        Sam(small_cnn(), F.cross_entropy, rho=rho)
