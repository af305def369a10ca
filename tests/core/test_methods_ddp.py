"""The methods on a DistributedDataParallel model: two processes take the step that one takes with both chunks."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import safetensors.torch
import torch
from torch import Tensor

from conadv.roles import Place
from support.ddp_ranks import (
    RANKS,
    Activated,
    Checkpointed,
    Scenario,
    attack_as_rank,
    first_twin_as_rank,
    in_group,
    mistakes_as_rank,
    second_method_as_rank,
    train,
    train_as_rank,
)
from support.ranks import Pool
from support.settings import SETTINGS, Setting

CHUNKS = Scenario("chunks", chunks=2)
OWN_BUFFERS = Scenario("own buffers", chunks=2, broadcast_buffers=False)
SCENARIOS = (
    Scenario("default"),
    CHUNKS,
    Scenario("frozen", chunks=2, frozen=True),
    OWN_BUFFERS,
    Scenario("own forward pass", chunks=2, norm=Activated),
    Scenario("checkpointing", chunks=2, kind=Checkpointed),
)
COMPILED = (Scenario("compiled inside", compiled="inside"), Scenario("compiled outside", compiled="outside"))
# Longer delays differ in which weights attack, which is not the wrapper's business: two scenarios each.
DISTINCT = [setting for setting in SETTINGS if setting.name in ("vanilla", "disadv", "conadv", "recycled", "sam")]
CASES = [
    (setting, scenario) for setting in SETTINGS for scenario in (SCENARIOS if setting in DISTINCT else SCENARIOS[:2])
]
CASES += [(setting, scenario) for setting in SETTINGS[1:2] for scenario in COMPILED]

Trained = Callable[[Setting, Scenario], list[dict[str, Tensor]]]


@pytest.fixture(scope="module")
def trained(pool: Pool) -> Trained:
    """The state of each of the two ranks after training, computed once for each case."""

    @cache
    def states(setting: Setting, scenario: Scenario) -> list[dict[str, Tensor]]:
        return [*map(safetensors.torch.load, pool.run(RANKS, in_group, train_as_rank, setting, scenario))]

    return states


@pytest.mark.parametrize(("setting", "scenario"), CASES, ids=lambda value: value.name)
def test_two_ranks_take_the_step_of_one(trained: Trained, setting: Setting, scenario: Scenario) -> None:
    states = trained(setting, scenario)
    alone = scenario.model(setting)
    train(alone, setting, 8 // RANKS // scenario.chunks, Place(chunks=RANKS * scenario.chunks), slice(None))
    for key, expected in alone.state_dict().items():
        if "running" in key:
            if not scenario.broadcast_buffers:  # the mean of the moving averages is the moving average of the means
                mean = (states[0][key] + states[1][key]) / 2
                torch.testing.assert_close(mean, expected, rtol=0, atol=1e-12)
        elif "num_batches" in key:
            assert torch.equal(states[0][key], expected)
        else:
            torch.testing.assert_close(states[0][key], expected, rtol=0, atol=1e-12)
            assert torch.equal(states[0][key], states[1][key])


@pytest.mark.parametrize("setting", DISTINCT, ids=lambda setting: setting.name)
def test_with_broadcast_buffers_the_statistics_are_those_of_rank_0(trained: Trained, setting: Setting) -> None:
    """As with BatchNorm itself: rank 0 overwrites the others, also between the two passes of a step."""
    shared, own = (trained(setting, scenario)[0] for scenario in (CHUNKS, OWN_BUFFERS))
    for key, value in own.items():
        torch.testing.assert_close(shared[key], value, rtol=0, atol=1e-12)


def test_an_attack_does_not_meet_the_wrapper(pool: Pool) -> None:
    assert pool.run(RANKS, in_group, attack_as_rank) == [{"equal": True, "untouched": True, "learns": True}] * RANKS


def test_ranks_that_share_a_seed_start_their_attacks_elsewhere(pool: Pool) -> None:
    first, second = pool.run(RANKS, in_group, first_twin_as_rank)
    assert first != second


def test_mistakes_are_refused(pool: Pool) -> None:
    untrained, early, unused, static = pool.run(RANKS, in_group, mistakes_as_rank)[0]
    assert "never trained" in untrained
    assert "split the model, then wrap it" in early
    assert "find_unused_parameters=False" in unused
    assert "leave static_graph out" in static


def test_a_second_method_takes_statistics_that_are_broadcast_for_the_models_own(pool: Pool) -> None:
    """Not for those of a model that writes them by itself, which is refused."""
    assert pool.run(RANKS, in_group, second_method_as_rank) == [1] * RANKS
