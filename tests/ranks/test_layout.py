"""Layouts are arithmetic: tested without processes."""

from __future__ import annotations

import math
import re
from fractions import Fraction
from itertools import combinations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from conadv.core.algorithm import ConAdv, Recycled, Vanilla
from conadv.ranks.layout import Layout
from conadv.roles import Role

METHODS = {Vanilla: ["clean"], Recycled: ["clean", "adv"], ConAdv: ["clean", "adv", "attack"]}


@st.composite
def lanes_of(draw: st.DrawFn) -> tuple[Role, str, int]:
    """The duties of a method, spread over the ranks of a lane in any order; several ranks may share a role."""
    method = draw(st.sampled_from(sorted(METHODS, key=lambda method: method.__name__)))
    words = draw(st.permutations(METHODS[method]))
    cuts = draw(st.sampled_from([cut for n in range(len(words)) for cut in combinations(range(1, len(words)), n)]))
    roles = [list(words[a:b]) for a, b in zip((0, *cuts), (*cuts, len(words)), strict=True)]
    assume(all(sorted(role) != ["attack", "clean"] for role in roles))
    counts = [draw(st.integers(1, 4)) for _ in roles]
    plus, bar = draw(st.sampled_from([("+", "|"), (" + ", " | "), ("+", "  |  ")]))
    texts = [f"{count} " * (count > 1) + plus.join(role) for count, role in zip(counts, roles, strict=True)]
    return method.duties, bar.join(texts), sum(counts)


@given(lanes_of(), st.integers(1, 3), st.integers(1, 3))
def test_the_ranks_of_a_role_share_the_chunks_of_their_lane_evenly_and_in_order(lane, lanes, each):
    duties, text, width = lane
    layout = Layout.fit(text, duties, lanes * width)
    assert (layout.lanes, layout.world_size) == (lanes, lanes * width)
    assert Layout.fit(str(layout), duties, layout.world_size) == layout
    chunks = lanes * each * math.lcm(*layout.counts.values())
    for duty in duties:
        seen: list[int] = []
        for rank in range(layout.world_size):
            place = layout.place(rank, chunks)
            own = range(place.first_chunk, place.first_chunk + place.chunks)
            assert (place.role, place.total, layout.lane(rank)) == (layout.role(rank), chunks, rank // width)
            if duty in place.role:
                seen += own
                assert all(layout.owner(duty, number, chunks) == rank for number in own)
        assert seen == list(range(chunks))


@given(lanes_of(), st.integers(1, 3))
def test_twins_go_from_who_makes_them_to_who_learns_from_them_within_a_lane(lane, lanes):
    duties, text, width = lane
    layout = Layout.fit(text, duties, lanes * width)
    maker = Role.ATTACK if Role.ATTACK in duties else Role.CLEAN
    together = Role.ADV not in duties or any(maker in role and Role.ADV in role for role in layout.roles)
    assert layout.hands_over == (not together)
    each = math.lcm(*layout.counts.values())
    for chunk in range(each * lanes if layout.hands_over else 0):
        source, target = (layout.owner(duty, chunk, each * lanes) for duty in (layout.maker(), Role.ADV))
        assert maker in layout.role(source)
        assert Role.ADV in layout.role(target)
        assert layout.lane(source) == layout.lane(target) == chunk // each


@given(lanes_of(), st.integers(1, 3), st.integers(1, 48))
def test_chunks_that_cannot_be_shared_are_refused_on_every_rank_with_a_number_that_fits(lane, lanes, chunks):
    duties, text, width = lane
    layout = Layout.fit(text, duties, lanes * width)
    unit = lanes * math.lcm(*layout.counts.values())
    for rank in range(layout.world_size):
        if chunks % unit == 0:
            assert layout.place(rank, chunks).chunks
            continue
        with pytest.raises(ValueError, match=f"needs a multiple of {unit} chunks per batch, and there are {chunks}:"):
            layout.place(rank, chunks)


@given(lanes_of(), st.integers(1, 12), st.integers(1, 4))
def test_twins_of_some_chunks_are_shared_evenly_or_refused(lane, chunks, of):
    duties, text, width = lane
    layout = Layout.fit(text, duties, width)
    try:
        layout.check(chunks, Fraction(1, of))
    except ValueError as error:
        layout.check(int(re.findall(r"multiple of (\d+)", str(error))[0]), Fraction(1, of))
        return
    for place in (layout.place(rank, chunks) for rank in range(width)):
        assert place.role == Role.CLEAN or (place.chunks % of == 0 and place.first_chunk % of == 0)


@given(lanes_of(), st.integers(1, 3))
def test_a_rank_that_only_attacks_gets_weights_from_a_learning_rank_of_its_lane(lane, lanes):
    duties, text, width = lane
    layout = Layout.fit(text, duties, lanes * width)
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
    assert layout.describe(3) == "rank 3 (lane 0, adv)"


@given(lanes_of(), st.integers(1, 30))
def test_a_world_that_lanes_do_not_fill_is_refused_with_sizes_that_fit(lane, size):
    duties, text, width = lane
    if size % width == 0:
        assert Layout.fit(text, duties, size).world_size == size
        return
    with pytest.raises(ValueError, match=f"needs a multiple of {width} ranks") as refusal:
        Layout.fit(text, duties, size)
    named = re.findall(r"\d+", str(refusal.value).partition("start")[2])
    assert [int(number) for number in named] == [width, 2 * width, 3 * width]


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
        ("clean | adv", ConAdv.duties, "has clean, adv, and needs each of clean+adv+attack once"),
        (
            "clean | adv | attack",
            Recycled.duties,
            "has clean, adv, attack, and needs each of clean+adv once, and no other",
        ),
        ("clean | adv", Vanilla.duties, "has clean, adv, and needs each of clean once, and no other"),
        ("clean | clean | adv", Recycled.duties, "has clean, clean, adv, and needs each of clean+adv once"),
        ("0 clean | adv", Recycled.duties, "'0 clean' is not a role"),
        ("-1 clean | adv", Recycled.duties, "'-1 clean' is not a role"),
        ("2clean | adv", Recycled.duties, "'2clean' is not a role"),
        ("9999999 clean | adv", Recycled.duties, "is not a role"),
        ("clean+clean | adv", Recycled.duties, "has clean, clean, adv, and needs each of clean+adv once"),
        ("clean+attack | adv", ConAdv.duties, "let the ranks that learn from twins attack"),
        ("clean | advers", Recycled.duties, "'advers' is not a role"),
        ("clean || adv", Recycled.duties, "'' is not a role"),
        ("", Vanilla.duties, "'' is not a role"),
        ("0 attack\n2adv", ConAdv.duties, "'0 attack\\n2adv' is not a role"),
    ],
)
def test_what_is_wrong_with_a_layout_is_named(text, duties, wrong):
    with pytest.raises(ValueError, match=re.escape(wrong)):
        Layout.fit(text, duties, 6)
