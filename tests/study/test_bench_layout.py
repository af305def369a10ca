"""The layout benchmark: what is put together from pieces, by hand, and what ranks of their own report. No time is
asserted."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from conadv.core.handoff import Twin
from conadv.core.learner import Losses
from conadv.core.splitbn import pending_statistics
from conadv.parallel.collectives import World
from conadv.parallel.layout import Layout
from conadv.study.bench import layout
from conadv.study.bench.contender import Contender, Echo, build_share, role_alone, wire
from conadv.study.bench.pieces import roles_alone
from conadv.study.bench.profile import PARTS, profile
from conadv.study.bench.ranks import run_ranks
from conadv.study.bench.reduction import Averaged, SummedAfter
from conadv.study.bench.together import LAYOUTS, contenders
from conadv.study.bench.workload import Workload, duties_of
from conadv.study.plan import compare_layouts
from study.plans import request

TINY = Workload("resnet8", width=4, chunk_size=6, image_size=8)
CPU = torch.device("cpu")
LOSSES = Losses(torch.tensor(1.0), torch.tensor(0.5))


# --- composition ---

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
    two = layout.compose(2, ROLES, BETWEEN[2])
    assert two["vanilla-1"] == [3.0, 6.0]
    assert two["vanilla-2"] == pytest.approx([3.2, 6.2])
    assert two["recycled"] == pytest.approx([3.1 + 0.6 + 0.4, 6.2 + 0.6 + 0.4])  # clean makes the twins
    assert two["disadv"] == pytest.approx([5.4, 10.4])  # nothing to hand over
    three = layout.compose(3, ROLES, BETWEEN[3])
    assert three["vanilla-3"] == pytest.approx([3.3, 6.3])
    assert three["conadv"] == pytest.approx([3.05 + 0.5, 7.0 + 0.6 + 0.5])  # hidden in the first round, not the second


@pytest.fixture
def measure(monkeypatch):
    """The benchmark on a machine with so many cores, with ranks that report the figures above."""
    started = []

    def with_cores(count: int):
        def ranks(names, size, workload, rounds):
            started.append((tuple(names), size))
            seconds = {contender.name: [2.0, 4.0] for contender in contenders(size)}
            row = {"name": "vanilla-1", "place": "rank 0", "seconds": dict.fromkeys(PARTS, 1.0)}
            return {"together": {"wall": seconds, "work": seconds, "profile": [row]}, "exchange": BETWEEN[size]}

        monkeypatch.setattr(layout, "cores", lambda: list(range(count)))
        monkeypatch.setattr(layout, "run_ranks", ranks)
        monkeypatch.setattr(layout, "roles_alone", lambda workload, rounds, tell: ROLES)
        return layout.measure(TINY, 2, lambda done, total: None), started

    return with_cores


@pytest.mark.parametrize(
    ("count", "measured"), [(1, {}), (2, {"recycled", "disadv"}), (3, {"recycled", "disadv", "conadv"})]
)
def test_what_has_no_core_of_its_own_is_composed_and_marked(measure, count: int, measured: set[str]) -> None:
    found, started = measure(count)
    for method, ranks in {"recycled": 2, "disadv": 2, "conadv": 3}.items():
        for base in (f"vanilla-{ranks}", "vanilla-1"):
            (ratio,) = [result for result in found.results if result.name == f"{method}/{base}"]
            assert ratio.to_json()["composed"] is (method not in measured)
    assert [size for names, size in started if "together" in names] == list(range(2, count + 1))
    checks = [result for result in found.results if result.name.endswith(" composed")]
    assert all(result.composed and result.goal is None for result in checks)
    assert bool(checks) == (count > 1)
    assert bool(found.profile) == (count > 1)


def test_goals_stand_beside_what_they_are_for(measure) -> None:
    goals = {result.name: str(result.goal) for result in measure(2)[0].results if result.goal is not None}
    assert goals == {"recycled/vanilla-2": "≤ 1.03", "recycled/vanilla-1": "≤ 1.06", "disadv/vanilla-2": "≥ 1.5"}


def test_the_planner_reads_the_names(measure) -> None:
    document = {"results": [result.to_json() for result in measure(2)[0].results]}
    compared = {row.name for row in compare_layouts(request(), document)}
    assert compared == {
        *("recycled/vanilla-2", "recycled/vanilla-1", "disadv/vanilla-2", "disadv/vanilla-1", "vanilla-2/vanilla-1"),
        *("conadv/vanilla-3", "conadv/vanilla-1", "vanilla-3/vanilla-1"),
    }


# --- ranks ---


@pytest.fixture(scope="module")
def reported():
    """What two ranks say of two rounds."""
    return run_ranks(["together", "exchange"], 2, TINY, 2)


def test_ranks_report_every_contender_round_by_round(reported) -> None:
    together = reported["together"]
    names = {"vanilla-1", "beside", "vanilla-2", "vanilla-2-after", "vanilla-2-ddp", "recycled", "disadv"}
    assert together["wall"].keys() == together["work"].keys() == names
    assert all(len(rounds) == 2 and min(rounds) > 0 for rounds in together["wall"].values())


def test_the_profile_shows_who_does_what(reported) -> None:
    rows = {(row["name"], row["place"]): row["seconds"] for row in reported["together"]["profile"]}
    assert ("vanilla-1", "rank 0") in rows and ("vanilla-1", "rank 1") not in rows
    assert len(rows) == 13
    for seconds in rows.values():
        assert tuple(seconds) == PARTS
        assert min(seconds["forward"], seconds["backward"], seconds["optimizer"], seconds["statistics"]) > 0
    packing = {place for place, seconds in rows.items() if seconds["packing"] > 0}
    assert packing == {("recycled", "rank 0 (lane 0, clean)"), ("recycled", "rank 1 (lane 0, adv)")}
    attacking = {place for place, seconds in rows.items() if seconds["attack"] > 0}
    assert attacking == {("disadv", "rank 1 (lane 0, adv+attack)")}
    without = {name for (name, _), seconds in rows.items() if not seconds["waiting for the exchange"]}
    assert without == {"vanilla-2-ddp"}  # its waiting is part of the backward pass


def test_the_exchange_is_reported_by_method(reported) -> None:
    exchange = reported["exchange"]
    assert exchange.keys() == {"vanilla", "recycled", "disadv"}
    assert all(len(rounds) == 2 and min(rounds) >= 0 for found in exchange.values() for rounds in found.values())
    assert min(exchange["recycled"]["hand-off"]) > 0


def test_a_rank_that_fails_is_told(capfd) -> None:
    with pytest.raises(ChildProcessError, match="failed"):
        run_ranks(["nonsense"], 1, TINY, 1)
    assert "KeyError: 'nonsense'" in capfd.readouterr().err


# --- parts ---


def test_a_rank_without_a_part_sleeps() -> None:
    assert build_share(Contender("vanilla-1", "vanilla", ranks="alone"), TINY, World(1, 2, CPU), 1) is None


@pytest.mark.parametrize("method", ["vanilla", *LAYOUTS])
def test_each_role_can_work_alone(method: str) -> None:
    lanes = Layout.fit(LAYOUTS.get(method), duties_of(method), LAYOUTS.get(method, "").count("|") + 1)
    for rank in range(lanes.world_size):
        step = role_alone(method, lanes, rank, TINY)
        step()
        step()


def test_roles_alone_are_reported_rank_by_rank() -> None:
    found = roles_alone(TINY, 1, lambda done, total: None)
    assert {method: len(ranks) for method, ranks in found.items()} == {
        "vanilla": 1,
        "recycled": 2,
        "disadv": 2,
        "conadv": 3,
    }
    assert all(len(rounds) == 1 and rounds[0] > 0 for ranks in found.values() for rounds in ranks)


def test_an_echo_gives_back_images_as_they_are() -> None:
    images, labels = TINY.pixels()
    echo = Echo(wire(TINY), TINY)
    echo.put(Twin(images, labels))
    twin = echo.take()
    assert torch.equal(twin.images, images) and torch.equal(twin.labels, labels)


class Doubling:
    """Stands in for a world of two ranks that have the same numbers."""

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.mul_(2)


def test_one_sum_after_the_backward_pass_reaches_gradients_and_statistics() -> None:
    model, reference = TINY.build("vanilla"), TINY.build("vanilla")
    reduction = SummedAfter(model, Doubling())
    images, labels = TINY.pixels()
    for network in (model, reference):
        pending_statistics(network)[0].fill_(1.5)
    reduction.zero_grad()
    F.cross_entropy(model(images), labels).backward()
    F.cross_entropy(reference(images), labels).backward()
    statistics = [part.clone() for part in pending_statistics(model)]
    assert reduction.finish(LOSSES)
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, 2 * theirs.grad)
    for mine, before in zip(pending_statistics(model), statistics, strict=True):
        torch.testing.assert_close(mine, 2 * before)
    reduction.zero_grad()
    assert all(not parameter.grad.any() for parameter in model.parameters())


def test_what_distributed_data_parallel_leaves_to_do() -> None:
    model = TINY.build()
    reduction = Averaged(model)
    reduction.zero_grad()
    model.get_parameter("conv1.weight").grad = torch.ones_like(model.get_parameter("conv1.weight"))
    reduction.zero_grad()
    assert not model.get_parameter("conv1.weight").grad.any()
    assert reduction.finish(LOSSES)
    assert not reduction.finish(Losses(torch.tensor(torch.nan), torch.tensor(0.0)))


def test_the_parts_of_a_profile_are_the_whole() -> None:
    lanes = Layout.fit(LAYOUTS["conadv"], duties_of("conadv"), 3)
    step = role_alone("conadv", lanes, 1, TINY)
    seconds = profile(step)
    assert tuple(seconds) == PARTS
    assert min(seconds["forward"], seconds["backward"], seconds["packing"], seconds["optimizer"]) > 0
    assert seconds["attack"] == 0
