"""The tables of methods and attacks: every row builds what it names, and every attack keeps what `Attack` promises."""

from __future__ import annotations

import inspect
from copy import deepcopy
from dataclasses import asdict, fields
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from conadv import PGD, split_batchnorm
from conadv.catalog import ATTACKS, METHODS
from conadv.config import AttackFields
from conadv.core.attack import Attack
from support.settings import small_batches, small_cnn

EPSILON = 8 / 255
every_attack = pytest.mark.parametrize("name", ATTACKS)


def build(name: str, **changes: object) -> Attack:
    """The attack that a recipe with these fields has."""
    return ATTACKS[name].build(asdict(AttackFields(name=name, **{"epsilon": EPSILON, **changes})))  # type: ignore[arg-type]


@every_attack
def test_each_attack_is_of_its_class_and_has_every_member_of_the_protocol(name: str) -> None:
    attack = build(name)
    assert type(attack).__name__ == ATTACKS[name].target.partition(":")[2]
    members = [member for member in vars(Attack) if not member.startswith("_")]
    assert members
    assert all(callable(getattr(attack, member)) for member in ("__call__", *members))


@every_attack
@pytest.mark.parametrize("own", [{"norm": "l2", "grid": False}, {"norm": "linf", "grid": True}])
def test_the_fields_of_a_recipe_reach_the_class(name: str, own: dict[str, Any]) -> None:
    changed = {"epsilon": 0.25, "step_size": 0.125, "steps": 3, "direction": "raw", "random_start": 0.5}
    settings = {**changed, "targeted": True, "statistics": "running", **own}
    attack = build(name, **settings)
    takes = ATTACKS[name].takes
    assert takes
    assert {field: getattr(attack, field) for field in takes} == {field: settings[field] for field in takes}


def test_no_field_of_a_recipe_is_without_an_attack_that_takes_it() -> None:
    taken = {field for row in ATTACKS.values() for field in row.takes}
    assert taken == {field.name for field in fields(AttackFields)} - {"name"}


def test_further_arguments_reach_the_class() -> None:
    assert ATTACKS["pgd"].build({"epsilon": EPSILON, "unknown": 1}, branch="adv").branch == "adv"


@every_attack
@pytest.mark.parametrize("random_start", [0.0, 1.0])
def test_twins_stay_in_the_ball_and_in_range_and_depend_on_the_seed_alone(name: str, random_start: float) -> None:
    attack, model = build(name, random_start=random_start), split_batchnorm(small_cnn())
    images, labels = small_batches(1)[0]
    twins = attack(model, F.cross_entropy, images, labels, seed=3)
    torch.rand(1)
    assert torch.equal(twins, attack(model, F.cross_entropy, images, labels, seed=3))
    assert not torch.equal(twins, images)
    assert (twins - images).abs().max() <= EPSILON * (1 + 1e-12)
    assert twins.min() >= 0
    assert twins.max() <= 1


@every_attack
def test_without_epsilon_and_random_start_the_twin_is_the_image(name: str) -> None:
    attack = build(name, epsilon=0.0, random_start=0.0)
    images, labels = small_batches(1)[0]
    assert torch.equal(attack(split_batchnorm(small_cnn()), F.cross_entropy, images, labels), images)


@every_attack
def test_an_attack_leaves_no_trace(name: str) -> None:
    model = split_batchnorm(small_cnn())
    before, randomness = deepcopy(model.state_dict()), torch.get_rng_state()
    images, labels = small_batches(1)[0]
    build(name)(model, F.cross_entropy, images, labels)
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), randomness)
    assert model.training


@every_attack
def test_twins_that_are_called_exact_as_bytes_are(name: str) -> None:
    images, labels = small_batches(1)[0]
    images = (images * 255).round() / 255
    for random_start in (0.0, 1.0):
        attack = build(name, random_start=random_start)
        if attack.exact_as_bytes(from_images=False):
            levels = 255 * attack(split_batchnorm(small_cnn()), F.cross_entropy, images, labels)
            torch.testing.assert_close(levels, levels.round(), rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", METHODS)
def test_a_method_takes_the_options_of_its_row(name: str) -> None:
    row = METHODS[name]
    options = {"attack": PGD(EPSILON), "delay": row.default_delay, "adv_weight": 0.5, "rho": 0.05}
    method = row.build(split_batchnorm(small_cnn(), row.branches), F.cross_entropy, options, chunk_size=4)
    assert set(row.options) <= inspect.signature(type(method)).parameters.keys()
    assert method.delay == row.default_delay
