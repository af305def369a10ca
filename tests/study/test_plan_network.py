"""Links and all-reduce: closed forms, and more bytes, ranks or latency never faster."""

import math
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conadv.study.plan.network import (
    LINKS,
    Algorithm,
    Link,
    Machine,
    all_reduce_seconds,
    handoff_link,
    lanes_cross_nodes,
    parse_link,
    ring_seconds,
    tree_seconds,
)

links = st.builds(Link, st.floats(0, 1e-3), st.floats(1e6, 1e12))
machines = st.builds(Machine, st.integers(1, 16), st.just(64), links, links)


def test_a_message_takes_its_latency_and_its_bytes() -> None:
    assert Link(0.5, 100.0).transfer(200.0) == 2.5


@pytest.mark.parametrize("algorithm", get_args(Algorithm))
def test_one_rank_reduces_nothing(algorithm) -> None:
    assert all_reduce_seconds(1e9, 1, Machine(8, 2, Link(1.0, 1.0), Link(1.0, 1.0)), algorithm) == 0


def test_two_ranks_in_a_ring_swap_halves_twice() -> None:
    assert ring_seconds(100.0, 2, Link(3.0, 10.0)) == 2 * (3.0 + 50.0 / 10.0)


def test_a_ring_in_the_limit_of_many_ranks_sends_everything_twice() -> None:
    assert ring_seconds(100.0, 10**6, Link(0.0, 10.0)) == pytest.approx(20.0, rel=1e-5)


def test_a_tree_of_five_has_three_levels() -> None:
    assert tree_seconds(100.0, 5, Link(3.0, 10.0)) == 2 * 3 * 3.0 + 2 * 10.0


def test_a_free_network_costs_nothing() -> None:
    free = Link(0.0, math.inf)
    assert all_reduce_seconds(1e9, 48, Machine(8, 8, free, free)) == 0


def test_nodes_reduce_inside_then_between() -> None:
    # 12 ranks on nodes of 8: a ring of 8 over 1 s + 8 B/8 at 1 B/s, and a ring of 2 over 10 s + 8 B/2 at 2 B/s.
    machine = Machine(8, 2, Link(1.0, 1.0), Link(10.0, 2.0))
    assert all_reduce_seconds(8.0, 12, machine, "ring") == 14 * (1 + 1) + 2 * (10 + 2)


def test_auto_takes_the_faster_at_each_level() -> None:
    slow_to_start, narrow = Link(1.0, 1e9), Link(1e-9, 1.0)
    machine = Machine(16, 16, slow_to_start, narrow)
    expected = tree_seconds(10.0, 16, slow_to_start) + ring_seconds(10.0, 16, narrow)
    assert all_reduce_seconds(10.0, 256, machine) == expected


@pytest.mark.parametrize("algorithm", get_args(Algorithm))
@given(machine=machines, ranks=st.integers(1, 200), size=st.floats(1, 1e9), factor=st.floats(1, 100))
def test_more_never_takes_less_time(algorithm, machine, ranks, size, factor) -> None:
    def seconds(size: float, ranks: int, machine: Machine) -> float:
        return all_reduce_seconds(size, ranks, machine, algorithm) * (1 + 1e-12)

    before = all_reduce_seconds(size, ranks, machine, algorithm)
    assert seconds(size * factor, ranks, machine) >= before
    assert seconds(size, ranks + 1, machine) >= before
    slower = Link(machine.inside.latency * factor, machine.inside.bandwidth / factor)
    assert seconds(size, ranks, Machine(machine.devices_per_node, machine.nodes, slower, machine.between)) >= before
    slower = Link(machine.between.latency * factor, machine.between.bandwidth / factor)
    assert seconds(size, ranks, Machine(machine.devices_per_node, machine.nodes, machine.inside, slower)) >= before


@given(st.integers(1, 9), st.integers(1, 5), st.integers(1, 3), st.integers(1, 15))
def test_a_lane_crosses_nodes_when_its_neighbours_lie_on_two(per_node, nodes, width, lanes) -> None:
    if width * lanes > per_node * nodes:
        return
    machine = Machine(per_node, nodes, Link(0, 1), Link(0, 1))
    ranks = range(width * lanes)
    homes = [{rank // per_node for rank in ranks[lane * width : (lane + 1) * width]} for lane in range(lanes)]
    crosses = any(len(home) > 1 for home in homes)
    # The plan may expect a crossing that the last lanes happen to avoid, never miss one.
    assert lanes_cross_nodes(machine, width, lanes) >= crosses
    if per_node % width == 0:
        assert not crosses


def test_twins_take_the_slower_way_only_where_lanes_cross() -> None:
    fast, slow = Link(0.0, 100.0), Link(0.0, 1.0)
    assert handoff_link(Machine(8, 4, fast, slow), 2, 16, 10.0) == fast
    assert handoff_link(Machine(8, 4, fast, slow), 3, 2, 10.0) == fast, "six ranks stay on one node"
    assert handoff_link(Machine(8, 4, fast, slow), 3, 4, 10.0) == slow
    assert handoff_link(Machine(8, 4, slow, fast), 3, 4, 10.0) == slow, "the step waits for the lanes inside a node too"


@pytest.mark.parametrize(
    ("text", "link"),
    [
        ("2us 25GB/s", Link(2e-6, 25e9)),
        ("0.5 ms, 100 Mbit/s", Link(0.5e-3, 12.5e6)),
        ("1e-3s 1.5e2MB/s", Link(1e-3, 150e6)),
        ("3ns 8Gbit/s", Link(3e-9, 1e9)),
        ("nvlink3", LINKS["nvlink3"]),
    ],
)
def test_links_are_read_with_their_units(text, link) -> None:
    parsed = parse_link(text)
    assert (parsed.latency, parsed.bandwidth) == pytest.approx((link.latency, link.bandwidth))


@pytest.mark.parametrize(
    "text", ["", "fast", "25GB/s", "2us", "2us 25", "-2us 25GB/s", "2us 25GB/s x", "2 us 25 gb/s", "٢us 25GB/s"]
)
def test_a_link_that_is_none_says_how_to_write_one(text) -> None:
    with pytest.raises(ValueError, match="2us 25GB/s") as error:
        parse_link(text)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["2us 0GB/s", "2us 1e-9MB/s", "1e7s 1GB/s", "2us 1e13MB/s", "1e999s 1GB/s"])
def test_impossible_links_are_refused(text) -> None:
    with pytest.raises(ValueError, match="at most 1e6 s"):
        parse_link(text)


def test_the_page_lists_every_link() -> None:
    page = (Path(__file__).parents[2] / "docs" / "planning.md").read_text(encoding="utf-8")
    assert not [name for name in LINKS if f"`{name}`" not in page]
