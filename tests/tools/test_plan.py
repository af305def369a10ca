"""The fault plan is a function of its seed, and its forked ranks are ranks: killed, resumed, compared."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from faults.forks import Server
from faults.scenario import KINDS, Scenario
from faults.soak import References, soak


def test_a_seed_is_always_the_same_scenario():
    scenarios = [Scenario.from_seed(seed) for seed in range(400)]
    assert scenarios == [Scenario.from_seed(seed) for seed in range(400)]
    assert {scenario.kind for scenario in scenarios} == set(KINDS)


def test_no_rank_has_two_faults_in_one_attempt():
    for scenario in (Scenario.from_seed(seed) for seed in range(400)):
        for faults in scenario.attempts:
            victims = [rank for fault in faults for rank in fault.victims]
            assert victims
            assert len(set(victims)) == len(victims)
            assert set(victims) <= set(range(scenario.size))


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Iterator[References]:
    server = Server()
    yield References(tmp_path_factory.mktemp("undisturbed"), server)
    server.close()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["SIGKILL", "kill during resume", "SIGTERM", "failing rename", "pause"])
def test_a_disturbed_run_ends_as_if_undisturbed(references: References, tmp_path: Path, kind: str):
    counts = soak(Scenario.from_seed(4, (kind,)), tmp_path, references)
    assert counts["runs"] == 1
