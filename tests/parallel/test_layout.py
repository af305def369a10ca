"""Layouts are arithmetic: tested without processes."""

from __future__ import annotations

import re
from functools import reduce
from itertools import combinations
from operator import or_

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conadv.core.methods import ConAdv, Vanilla
from conadv.core.recycled import Recycled
from conadv.core.roles import Role
from conadv.parallel.layout import Layout

DUTIES = {"clean": Role.CLEAN, "adv": Role.ADV, "attack": Role.ATTACK}
METHODS = {Vanilla: ["clean"], Recycled: ["clean", "adv"], ConAdv: ["clean", "adv", "attack"]}


@st.composite
def partitions(draw: st.DrawFn) -> tuple[Role, list[list[str]]]:
    """The duties of a method, spread over the ranks of a lane in any order."""
    method = draw(st.sampled_from(sorted(METHODS, key=lambda method: method.__name__)))
    words = draw(st.permutations(METHODS[method]))
    cuts = draw(st.sampled_from([cut for n in range(len(words)) for cut in combinations(range(1, len(words)), n)]))
    return method.duties, [list(words[a:b]) for a, b in zip((0, *cuts), (*cuts, len(words)), strict=True)]


def written(lane: list[list[str]], spaces: tuple[str, str] = ("", " ")) -> str:
    plus, bar = (f"{space}{sign}{space}" for sign, space in zip("+|", spaces, strict=True))
    return bar.join(plus.join(words) for words in lane)


@given(partitions(), st.integers(1, 5), st.sampled_from([("", ""), (" ", " "), ("", "  ")]))
def test_every_partition_of_the_duties_is_a_layout(partition, lanes, spaces):
    duties, lane = partition
    layout = Layout.fit(written(lane, spaces), duties, lanes * len(lane))
    assert layout.lanes == lanes
    assert layout.world_size == lanes * len(lane)
    for rank in range(layout.world_size):
        assert layout.lane(rank) == rank // len(lane)
        assert layout.role(rank) == reduce(or_, (DUTIES[word] for word in lane[rank % len(lane)]))


@given(partitions(), st.integers(1, 5))
def test_a_layout_reads_what_it_writes(partition, lanes):
    duties, lane = partition
    layout = Layout.fit(written(lane), duties, lanes * len(lane))
    assert Layout.fit(str(layout), duties, layout.world_size) == layout


@given(partitions(), st.integers(1, 5))
def test_each_lane_has_each_duty_once(partition, lanes):
    duties, lane = partition
    layout = Layout.fit(written(lane), duties, lanes * len(lane))
    for number in range(lanes):
        for duty in duties:
            rank = layout.rank(number, duty)
            assert layout.lane(rank) == number
            assert duty in layout.role(rank)
    assert sum(duty in layout.role(rank) for rank in range(layout.world_size) for duty in duties) == lanes * len(duties)


@given(partitions(), st.integers(1, 5), st.integers(1, 7))
def test_lanes_share_the_chunks_of_a_batch_evenly_and_in_order(partition, lanes, each):
    duties, lane = partition
    layout = Layout.fit(written(lane), duties, lanes * len(lane))
    places = [layout.place(layout.rank(number, Role.CLEAN), lanes * each) for number in range(lanes)]
    seen = [number for place in places for number in range(place.first_chunk, place.first_chunk + place.chunks)]
    assert seen == list(range(lanes * each))
    assert sum(place.share for place in places) == pytest.approx(1)
    for rank in range(layout.world_size):  # whoever works in a lane works on its chunks
        leader = places[layout.lane(rank)]
        place = layout.place(rank, lanes * each)
        assert (place.first_chunk, place.chunks, place.share) == (leader.first_chunk, leader.chunks, leader.share)
        assert place.role == layout.role(rank)
        assert not place.updates_stats


@given(partitions(), st.integers(0, 3))
def test_only_a_rank_that_does_nothing_else_attacks_ahead(partition, delay):
    duties, lane = partition
    layout = Layout.fit(written(lane), duties, len(lane))
    attackers = [role for role in layout.roles if Role.ATTACK in role]
    assert layout.ahead(delay) == (delay if attackers in ([], [Role.ATTACK]) else 0)


@given(partitions(), st.integers(1, 5))
def test_twins_go_from_who_makes_them_to_who_learns_from_them_within_a_lane(partition, lanes):
    duties, lane = partition
    layout = Layout.fit(written(lane), duties, lanes * len(lane))
    maker = Role.ATTACK if Role.ATTACK in duties else Role.CLEAN
    for rank in range(layout.world_size):
        route = layout.route(rank)
        together = Role.ADV not in duties or any(maker in role and Role.ADV in role for role in layout.roles)
        assert (route is None) == together
        if route is not None:
            source, target = route
            assert maker in layout.role(source)
            assert Role.ADV in layout.role(target)
            assert {layout.lane(source), layout.lane(target)} == {layout.lane(rank)}


@given(partitions(), st.integers(1, 30))
def test_a_world_that_lanes_do_not_fill_is_refused_with_sizes_that_fit(partition, size):
    duties, lane = partition
    if size % len(lane) == 0:
        assert Layout.fit(written(lane), duties, size).world_size == size
        return
    with pytest.raises(ValueError, match="ranks a lane") as refusal:
        Layout.fit(written(lane), duties, size)
    named = re.findall(r"\d+", str(refusal.value).partition("start")[2])
    assert len(named) == 3
    for fitting in named:
        assert Layout.fit(written(lane), duties, int(fitting)).world_size == int(fitting)


@given(st.integers(1, 40), st.integers(1, 12))
def test_chunks_that_lanes_cannot_share_are_refused_with_numbers_that_fit(chunks, lanes):
    layout = Layout.fit(None, Role.CLEAN, lanes)
    if chunks % lanes == 0:
        assert layout.place(0, chunks).chunks == chunks // lanes
        return
    with pytest.raises(ValueError, match="cannot be shared") as refusal:
        layout.place(0, chunks)
    for fitting in re.findall(r"\d+", str(refusal.value).partition("take")[2]):
        assert chunks % int(fitting) == 0


@given(st.text(alphabet="cleanadvtk+| 1", max_size=30))
def test_any_text_is_a_layout_or_refused_in_one_line(text):
    try:
        layout = Layout.fit(text, ConAdv.duties, 6)
    except ValueError as error:
        refusal = str(error)
    else:
        refusal = ""
        assert Layout.fit(str(layout), ConAdv.duties, 6) == layout
    assert "\n" not in refusal


@pytest.mark.parametrize(
    ("text", "duties", "wrong"),
    [
        ("clean | adv", ConAdv.duties, "no rank for attack"),
        ("clean | adv | attack", Recycled.duties, "attack, which the method does not need"),
        ("clean | adv", Vanilla.duties, "adv, which the method does not need"),
        ("clean | clean | adv", Recycled.duties, "clean twice"),
        ("clean+clean | adv", Recycled.duties, "clean twice"),
        ("clean | advers", Recycled.duties, "'advers' is not a duty"),
        ("clean || adv", Recycled.duties, "'' is not a duty"),
        ("", Vanilla.duties, "'' is not a duty"),
    ],
)
def test_what_is_wrong_with_a_layout_is_named(text, duties, wrong):
    with pytest.raises(ValueError, match=re.escape(wrong)):
        Layout.fit(text, duties, 6)


def test_a_rank_is_described_by_number_lane_and_role():
    layout = Layout.fit("clean | adv+attack", ConAdv.duties, 4)
    assert layout.describe(3) == "rank 3 (lane 1, adv+attack)"
