"""The table of methods: every row builds what it names; and the fields of `[attack]` are arguments of PGD."""

from __future__ import annotations

from typing import Any

import pytest
import torch.nn.functional as F

from conadv import PGD, split_batchnorm
from conadv.catalog import METHODS
from conadv.config import flatten, load_recipe
from conadv.trainer.build import attack_of
from support.settings import small_cnn


@pytest.mark.parametrize("own", [{"norm": "l2", "grid": False}, {"norm": "linf", "grid": True}])
def test_the_fields_of_a_recipe_reach_the_attack(own: dict[str, Any]) -> None:
    changed = {"epsilon": 0.25, "step_size": 0.125, "steps": 3, "direction": "raw", "random_start": 0.5}
    settings = {**changed, "targeted": True, "statistics": "running", **own}
    recipe = load_recipe("digits", {f"attack.{field}": value for field, value in settings.items()})
    assert attack_of(recipe) == PGD(**settings, branch="adv")
    assert settings.keys() == {key.removeprefix("attack.") for key in flatten(recipe) if key.startswith("attack.")}


@pytest.mark.parametrize("name", METHODS)
def test_a_method_takes_its_options_and_leaves_the_others_out(name: str) -> None:
    row = METHODS[name]
    options = {"attack": PGD(8 / 255), "delay": row.default_delay, "adv_weight": 0.5, "rho": 0.05}
    method = row.build(split_batchnorm(small_cnn(), row.branches), F.cross_entropy, options, chunk_size=4)
    assert method.delay == row.default_delay
