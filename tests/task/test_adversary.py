"""PGD and AutoAttack on a model whose robust images are known by formula."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from torch import Tensor, nn

from conadv.task.evaluate import AutoAttack, RobustTest, count_robust

EPSILON = 0.02


def linear(classes: int) -> tuple[nn.Module, Tensor, Tensor]:
    """A linear model with images in the middle of the range, so that the ball around each lies within it."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Flatten(), nn.Linear(27, classes))
    images = 0.3 + 0.4 * torch.rand(60, 3, 3, 3)
    return model, images, model(images).argmax(1)


def robust_by_formula(model: nn.Module, images: Tensor, labels: Tensor) -> int:
    """No other class can be reached: each margin is larger than what the ball can change of it."""
    weights: Tensor = model[1].weight  # type: ignore[index, union-attr, assignment]
    logits = model(images)
    margins = logits.gather(1, labels[:, None]) - logits
    reach = EPSILON * (weights[labels][:, None] - weights).abs().sum(2)
    safe = (margins > reach) | nn.functional.one_hot(labels, logits.shape[1]).bool()
    return int(safe.all(1).sum())


@pytest.mark.parametrize("classes", [10, 5])
def test_autoattack_finds_every_image_that_can_be_fooled_and_pgd_no_other(classes: int) -> None:
    model, images, labels = linear(classes)
    wanted = robust_by_formula(model, images, labels)
    assert 5 < wanted < 55
    before = torch.random.get_rng_state()
    assert count_robust(model, [(images, labels)], AutoAttack(EPSILON)) == (wanted, 60)
    assert wanted <= count_robust(model, [(images, labels)], RobustTest(EPSILON).attack(), restarts=2)[0] < 60
    assert torch.equal(before, torch.random.get_rng_state())


def test_what_autoattack_cannot_do_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, images, labels = linear(3)
    with pytest.raises(ValueError, match="at least 4 classes, and this model has 3"):
        count_robust(model, [(images, labels)], AutoAttack(EPSILON))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'conadv\[robust\]'"):
        AutoAttack(EPSILON)
