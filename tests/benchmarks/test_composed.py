"""Steps composed from parts, by hand and on ranks. No time is asserted."""

from __future__ import annotations

import pytest
import torch

import composed
from composed import compose, roles_alone
from conadv.core.catalog import METHODS
from conadv.core.handoff import Twin
from conadv.study.bench.alternate import silent
from conadv.study.bench.contender import Contender, wire
from conadv.study.bench.layout import Echo, role_alone
from conadv.study.bench.workload import Workload

TINY = Workload("resnet8", width=4, chunk_size=6, image_size=8)
ROLES = {
    "vanilla": [[3.0, 6.0]],
    "recycled": [[3.1, 6.2], [3.0, 6.0]],
    "disadv": [[3.0, 6.0], [5.0, 10.0]],
    "conadv": [[3.0, 6.0], [3.05, 6.1], [2.0, 7.0]],
}
BETWEEN = {
    2: {
        "vanilla": {"exchange": [0.1, 0.3, 0.2], "hand-off": [0.0, 0.0, 0.0]},
        "recycled": {"exchange": [0.4, 0.4, 0.4], "hand-off": [0.5, 0.7, 0.6]},
        "disadv": {"exchange": [0.4, 0.4, 0.4], "hand-off": [0.0, 0.0, 0.0]},
    },
    3: {
        "vanilla": {"exchange": [0.3], "hand-off": [0.0]},
        "conadv": {"exchange": [0.5], "hand-off": [0.6]},
    },
}


def test_a_step_is_the_longest_rank_with_its_hand_off_and_then_the_exchange() -> None:
    two = compose(2, ROLES, BETWEEN[2])
    assert two["vanilla-1"] == [3.0, 6.0]
    assert two["vanilla-2"] == pytest.approx([3.2, 6.2])
    assert two["recycled"] == pytest.approx([3.1 + 0.6 + 0.4, 6.2 + 0.6 + 0.4])  # clean makes the twins
    assert two["disadv"] == pytest.approx([5.4, 10.4])  # nothing to hand over
    three = compose(3, ROLES, BETWEEN[3])
    assert three["vanilla-3"] == pytest.approx([3.3, 6.3])
    assert three["conadv"] == pytest.approx([3.05 + 0.5, 7.0 + 0.6 + 0.5])  # hidden in the first round, not the second


def test_every_method_is_compared_with_vanilla(monkeypatch) -> None:
    monkeypatch.setattr(composed, "OVERLAPPED", {name: METHODS[name].overlapped for name in ("recycled", "conadv")})
    monkeypatch.setattr(composed, "run_ranks", lambda tasks, size, workload, rounds: [BETWEEN[size]])
    monkeypatch.setattr(composed, "roles_alone", lambda workload, rounds, tell: ROLES)
    found = composed.measure(TINY, 2, silent)
    assert all(result.to_json()["composed"] is True for result in found.results)
    assert {result.name for result in found.results} >= {
        *("recycled/vanilla-2", "recycled/vanilla-1", "disadv/vanilla-2", "disadv/vanilla-1", "vanilla-2/vanilla-1"),
        *("conadv/vanilla-3", "conadv/vanilla-1", "vanilla-3/vanilla-1"),
    }


@pytest.mark.parametrize("method", list(METHODS))
def test_each_role_can_work_alone(method: str) -> None:
    for rank in range(METHODS[method].overlapped.count("|") + 1):
        step = role_alone(Contender(method, method, METHODS[method].overlapped), rank, TINY, steps=1)
        step()
        step()


def test_roles_alone_are_reported_rank_by_rank() -> None:
    found = roles_alone(TINY, 1, silent)
    widths = {name: method.overlapped.count("|") + 1 for name, method in METHODS.items()}
    assert {method: len(ranks) for method, ranks in found.items()} == widths
    assert all(len(rounds) == 1 and rounds[0] > 0 for ranks in found.values() for rounds in ranks)


def test_an_echo_gives_back_images_as_they_are() -> None:
    images, labels = TINY.pixels()
    echo = Echo(wire(TINY), TINY)
    echo.put(Twin(images, labels))
    twin = echo.take()
    assert torch.equal(twin.images, images) and torch.equal(twin.labels, labels)
