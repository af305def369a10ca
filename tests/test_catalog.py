"""The fields of `[attack]` are arguments of PGD."""

from __future__ import annotations

from typing import Any

import pytest

from conadv import PGD
from conadv.config import flatten, load_recipe
from conadv.trainer.build import attack_of


@pytest.mark.parametrize("own", [{"norm": "l2", "grid": False}, {"norm": "linf", "grid": True}])
def test_the_fields_of_a_recipe_reach_the_attack(own: dict[str, Any]) -> None:
    changed = {"epsilon": 0.25, "step_size": 0.125, "steps": 3, "direction": "raw", "random_start": 0.5}
    settings = {**changed, "targeted": True, "statistics": "running", **own}
    recipe = load_recipe("digits", {f"attack.{field}": value for field, value in settings.items()})
    assert attack_of(recipe) == PGD(**settings, branch="adv")
    assert settings.keys() == {key.removeprefix("attack.") for key in flatten(recipe) if key.startswith("attack.")}
