"""Layouts are arithmetic: tested without processes."""

from __future__ import annotations

import math
import re
from functools import reduce
from itertools import combinations
from operator import or_

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from conadv.core.algorithm import ConAdv, Recycled, Vanilla
from conadv.core.roles import Role
from conadv.ranks.layout import Layout

DUTIES = {"clean": Role.CLEAN, "adv": Role.ADV, "attack": Role.ATTACK}
METHODS = {Vanilla: ["clean"], Recycled: ["clean", "adv"], ConAdv: ["clean", "adv", "attack"]}


@st.composite
def partitions(draw: st.DrawFn) -> tuple[Role, list[list[str]]]:
    """The duties of a method, spread over the ranks of a lane in any order."""
    method = draw(st.sampled_from(sorted(METHODS, key=lambda method: method.__name__)))
    words = draw(st.permutations(METHODS[method]))
    cuts = draw(st.sampled_from([cut for n in range(len(words)) for cut in combinations(range(1, len(words)), n)]))
    lane = [list(words[a:b]) for a, b in zip((0, *cuts), (*cuts, len(words)), strict=True)]
    assume(all(sorted(role) != ["attack", "clean"] for role in lane))
    return method.duties, lane


def written(lane: list[list[str]], spaces: tuple[str, str] = ("", " ")) -> str:
    plus, bar = (f"{space}{sign}{space}" for sign, space in zip("+|", spaces, strict=True))
    return bar.join(plus.join(words) for words in lane)


@given(partitions(), st.integers(1, 5), st.sampled_from([("", ""), (" ", " "), ("", "  ")]))
def test_every_partition_of_the_duties_is_a_layout_whose_lanes_have_each_duty_once(partition, lanes, spaces):
    duties, lane = partition
    layout = Layout.fit(written(lane, spaces), duties, lanes * len(lane))
    assert layout.lanes == lanes
    assert layout.world_size == lanes * len(lane)
    for rank in range(layout.world_size):
        assert layout.lane(rank) == rank // len(lane)
        assert layout.role(rank) == reduce(or_, (DUTIES[word] for word in lane[rank % len(lane)]))
    assert Layout.fit(str(layout), duties, layout.world_size) == layout
    for number in range(lanes):
        for duty in duties:
            assert sum(duty in layout.role(rank) for rank in layout.ranks(number)) == 1


@given(partitions(), st.integers(1, 5), st.integers(1, 7))
def test_lanes_share_the_chunks_of_a_batch_evenly_and_in_order(partition, lanes, each):
    duties, lane = partition
    layout = Layout.fit(written(lane), duties, lanes * len(lane))
    places = [layout.place(layout.ranks(number)[0], lanes * each) for number in range(lanes)]
    seen = [number for place in places for number in range(place.first_chunk, place.first_chunk + place.chunks)]
    assert seen == list(range(lanes * each))
    for rank in range(layout.world_size):  # whoever works in a lane works on its chunks
        leader = places[layout.lane(rank)]
        place = layout.place(rank, lanes * each)
        assert (place.first_chunk, place.chunks, place.total) == (leader.first_chunk, leader.chunks, lanes * each)
        assert place.role == layout.role(rank)


@given(partitions(), st.integers(1, 5))
def test_twins_go_from_who_makes_them_to_who_learns_from_them_within_a_lane(partition, lanes):
    duties, lane = partition
    layout = Layout.fit(written(lane), duties, lanes * len(lane))
    maker = Role.ATTACK if Role.ATTACK in duties else Role.CLEAN
    together = Role.ADV not in duties or any(maker in role and Role.ADV in role for role in layout.roles)
    assert layout.hands_over == (not together)
    for chunk in range(2 * lanes if layout.hands_over else 0):
        source, target = (layout.owner(duty, chunk, 2 * lanes) for duty in (layout.maker(), Role.ADV))
        assert maker in layout.role(source)
        assert Role.ADV in layout.role(target)
        assert layout.lane(source) == layout.lane(target) == chunk // 2


@st.composite
def counted(draw: st.DrawFn) -> tuple[Role, list[tuple[int, list[str]]]]:
    """The duties of a method, spread over roles that several ranks of a lane share."""
    duties, lane = draw(partitions())
    return duties, [(draw(st.integers(1, 4)), words) for words in lane]


def written_counts(lane: list[tuple[int, list[str]]]) -> str:
    return " | ".join(f"{count} {'+'.join(words)}" if count > 1 else "+".join(words) for count, words in lane)


@given(counted(), st.integers(1, 3), st.integers(1, 3))
def test_each_role_shares_the_chunks_of_its_lane_evenly_and_in_order(lane, lanes, each):
    duties, groups = lane
    width = sum(count for count, _ in groups)
    layout = Layout.fit(written_counts(groups), duties, lanes * width)
    assert Layout.fit(str(layout), duties, layout.world_size) == layout
    in_lane = each * math.lcm(*(count for count, _ in groups))
    chunks = lanes * in_lane
    for duty in duties:
        seen: list[int] = []
        for rank in range(layout.world_size):
            place = layout.place(rank, chunks)
            if duty in place.role:
                seen += range(place.first_chunk, place.first_chunk + place.chunks)
                assert place.total == chunks
                assert all(
                    layout.owner(duty, place.first_chunk + number, chunks) == rank for number in range(place.chunks)
                )
        assert seen == list(range(chunks))


@given(counted(), st.integers(1, 3), st.integers(1, 24))
def test_a_count_that_does_not_divide_the_chunks_is_refused_with_what_fits(lane, lanes, in_lane):
    duties, groups = lane
    width = sum(count for count, _ in groups)
    layout = Layout.fit(written_counts(groups), duties, lanes * width)
    whole = math.lcm(*(count for count, _ in groups))
    if in_lane % whole == 0:
        assert all(layout.place(rank, lanes * in_lane).chunks for rank in range(layout.world_size))
        return
    for rank in range(layout.world_size):  # every rank refuses it alike
        with pytest.raises(ValueError, match="ranks cannot share") as refusal:
            layout.place(rank, lanes * in_lane)
    counts, _, chunks = str(refusal.value).partition("take")[2].partition("or")
    assert all(in_lane % int(count) == 0 for count in re.findall(r"\d+", counts))
    for fitting in re.findall(r"\d+", chunks):
        assert layout.place(0, lanes * int(fitting)).chunks


@given(counted(), st.integers(1, 12), st.integers(1, 4))
def test_twins_of_some_chunks_are_shared_evenly_or_refused(lane, in_lane, of):
    duties, groups = lane
    layout = Layout.fit(written_counts(groups), duties, sum(count for count, _ in groups))
    try:
        layout.check_twins(in_lane, of)
    except ValueError as error:
        fitting = re.findall(r"\d+", str(error).rpartition("take")[2])
        if "multiple of" in str(error):
            layout.check_twins(int(fitting[0]), of)
        return
    for rank in range(layout.world_size):
        place = layout.place(rank, in_lane)
        assert place.role == Role.CLEAN or (place.chunks % of == 0 and place.first_chunk % of == 0)


@given(counted(), st.integers(1, 3))
def test_a_rank_that_only_attacks_gets_the_sums_from_a_learning_rank_of_its_lane(lane, lanes):
    duties, groups = lane
    layout = Layout.fit(written_counts(groups), duties, lanes * sum(count for count, _ in groups))
    followers = layout.followers()
    assert sorted(followers) == [rank for rank in range(layout.world_size) if layout.role(rank) == Role.ATTACK]
    assert sorted([*followers, *layout.learners()]) == list(range(layout.world_size))
    for attack, source in followers.items():
        assert layout.lane(attack) == layout.lane(source)
        assert source in layout.learners()
    if followers:  # none has more to send than needed
        loads = [list(followers.values()).count(rank) for rank in layout.learners()]
        assert max(loads) - min(loads) <= 1


def test_an_uneven_lane_as_the_documentation_draws_it():
    layout = Layout.fit("2 clean | 2 adv | attack", ConAdv.duties, 5)
    assert [list(layout.chunks(rank, 4)) for rank in range(5)] == [[0, 1], [2, 3], [0, 1], [2, 3], [0, 1, 2, 3]]
    assert [layout.owner(Role.ADV, chunk, 4) for chunk in range(4)] == [2, 2, 3, 3]
    assert str(layout) == "2 clean | 2 adv | attack"


@given(partitions(), st.integers(1, 30))
def test_a_world_that_lanes_do_not_fill_is_refused_with_sizes_that_fit(partition, size):
    duties, lane = partition
    if size % len(lane) == 0:
        assert Layout.fit(written(lane), duties, size).world_size == size
        return
    with pytest.raises(ValueError, match="needs a multiple of") as refusal:
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


@given(st.text(alphabet="cleanadvtk+| 12", max_size=30))
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
        ("clean | adv | attack", Recycled.duties, "attack, which the method does not do"),
        ("clean | adv", Vanilla.duties, "adv, which the method does not do"),
        ("clean | clean | adv", Recycled.duties, "clean twice"),
        ("0 clean | adv", Recycled.duties, "0 ranks for 'clean'"),
        ("-1 clean | adv", Recycled.duties, "'-1 clean' is not a role"),
        ("2clean | adv", Recycled.duties, "'2clean' is not a role"),
        ("9999999 clean | adv", Recycled.duties, "is not a role"),
        ("clean+clean | adv", Recycled.duties, "clean twice"),
        ("clean+attack | adv", ConAdv.duties, "let the ranks that learn from twins attack"),
        ("clean | advers", Recycled.duties, "'advers' is not a role"),
        ("clean || adv", Recycled.duties, "'' is not a role"),
        ("", Vanilla.duties, "'' is not a role"),
        ("0 attack\n2adv", ConAdv.duties, "has 0 ranks for 'attack\\n2adv'"),
    ],
)
def test_what_is_wrong_with_a_layout_is_named(text, duties, wrong):
    with pytest.raises(ValueError, match=re.escape(wrong)):
        Layout.fit(text, duties, 6)


def test_a_rank_is_described_by_number_lane_and_role():
    layout = Layout.fit("clean | adv+attack", ConAdv.duties, 4)
    assert layout.describe(3) == "rank 3 (lane 1, adv+attack)"
