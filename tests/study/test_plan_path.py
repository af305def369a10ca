"""The critical path, against the paper's table and against a lane played out event by event."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conadv.study.plan.path import DUTIES, LAYOUTS, METHODS, Lane, fits, parse_layout

UNITS = {"clean": 3.0, "adv": 3.0, "attack": 2.0}
DELAYS = {"vanilla": 0, "disadv": 0, "conadv": 1, "recycled": 1}


def step_of(lane: Lane, transfer: float = 0.0, reduction: float = 0.0, update: float = 0.0) -> float:
    return max(chain.seconds for chain in lane.chains(transfer, reduction, update))


@pytest.mark.parametrize(
    ("method", "layout", "length"),
    [
        ("vanilla", "clean", 3),
        ("disadv", "clean+adv+attack", 8),
        ("disadv", "clean | adv+attack", 5),
        ("disadv", "clean | adv | attack", 5),
        ("disadv", "clean+adv | attack", 8),
        ("conadv", "clean+adv+attack", 8),
        ("conadv", "clean | adv+attack", 5),
        ("conadv", "clean+adv | attack", 6),
        ("conadv", "clean | adv | attack", 3),
        ("recycled", "clean+adv", 6),
        ("recycled", "clean | adv", 3),
    ],
)
def test_length_of_the_path_with_one_chunk(method, layout, length) -> None:
    assert step_of(Lane(method, parse_layout(layout), DELAYS[method], 1, UNITS)) == length


def test_disadv_on_three_ranks_attacks_a_chunk_while_it_learns_the_one_before() -> None:
    assert step_of(Lane("disadv", parse_layout("clean | adv | attack"), 0, 4, UNITS)) == 2 + 4 * 3


def test_a_late_twin_holds_up_every_second_step_only() -> None:
    lane = Lane("recycled", parse_layout("clean | adv"), 1, 1, UNITS)
    assert step_of(lane, transfer=1.0) == 3.5


def play(lane: Lane, transfer: float, reduction: float, update: float, steps: int) -> float:
    """Mean seconds a step of a lane in which ranks, link and update are events, after it has settled."""
    start, starts, link_free = 0.0, [], 0.0
    arrivals: dict[tuple[int, int], float] = {}  # (batch, chunk) of twins, when they can be taken
    maker_duty = "clean" if lane.method == "recycled" else "attack"
    for step in range(steps):
        starts.append(start)
        ends = {}
        # The rank that makes twins never waits for the one that takes them within a step: play it first.
        for role in sorted(lane.roles, key=lambda role: maker_duty not in role):
            clock = start
            for chunk in range(lane.chunks):
                if "attack" in role:
                    clock += lane.duties["attack"]
                if maker_duty == "attack" and "attack" in role:
                    link_free = max(link_free, clock) + transfer
                    arrivals[step + lane.delay, chunk] = link_free if "adv" not in role else clock
                if "adv" in role:
                    clock = max(clock, arrivals.get((step, chunk), 0.0))
                clock += sum(lane.duties[duty] for duty in role & {"clean", "adv"})
                if maker_duty == "clean" and "clean" in role and "adv" not in role:
                    link_free = max(link_free, clock) + transfer
                    arrivals[step + 1, chunk] = link_free
            ends[role] = clock + (reduction if role & {"clean", "adv"} else 0.0)
        start = max(ends.values()) + update
    settled = steps // 2
    return (start - starts[settled]) / (steps - settled)


seconds = st.floats(0.05, 5.0)


@settings(max_examples=300, deadline=None)
@given(
    place=st.sampled_from(
        [(m, text) for m in METHODS for text in (*LAYOUTS, "clean+attack | adv") if fits(m, parse_layout(text))]
    ),
    delay=st.integers(1, 3),
    chunks=st.integers(1, 5),
    duties=st.fixed_dictionaries({"clean": seconds, "adv": seconds, "attack": seconds}),
    transfer=st.floats(0.0, 8.0),
    reduction=st.floats(0.0, 2.0),
    update=st.floats(0.0, 1.0),
)
def test_the_formula_is_the_mean_of_steps_played_out(place, delay, chunks, duties, transfer, reduction, update) -> None:
    method, layout = place
    delay = {"conadv": delay, "recycled": 1}.get(method, 0)
    lane = Lane(method, parse_layout(layout), delay, chunks, {duty: duties[duty] for duty in DUTIES[method]})
    # 5·4·3·2·… steps a period of any round trip: the mean over half of 240 is exact once the start has worn off.
    played = play(lane, transfer, reduction, update, steps=240)
    assert step_of(lane, transfer, reduction, update) == pytest.approx(played, rel=0.02)


@settings(deadline=None)
@given(
    delay=st.integers(0, 3),
    chunks=st.integers(1, 6),
    attack=seconds,
    reduction=st.floats(0.0, 2.0),
    layout=st.sampled_from(["clean | adv | attack", "clean+adv | attack"]),
)
def test_the_hidden_transfer_is_the_longest_that_costs_nothing(delay, chunks, attack, reduction, layout) -> None:
    lane = Lane("conadv", parse_layout(layout), delay, chunks, UNITS | {"attack": attack})
    free = step_of(lane, 0.0, reduction)
    hidden = lane.hidden_transfer(free, reduction, 0.0)
    assert step_of(lane, hidden, reduction) == pytest.approx(free, rel=1e-9)
    assert step_of(lane, hidden + 0.01, reduction) > free + 1e-4


def test_only_twins_that_change_ranks_are_handed_over() -> None:
    over = {
        (method, layout)
        for method in METHODS
        for layout in LAYOUTS
        if fits(method, parse_layout(layout))
        and Lane(method, parse_layout(layout), DELAYS[method], 1, UNITS).hands_over
    }
    apart = {
        (method, layout) for method in ("disadv", "conadv") for layout in ("clean+adv | attack", "clean | adv | attack")
    }
    assert over == apart | {("recycled", "clean | adv")}


@pytest.mark.parametrize(
    "text", ["", "clean |", "adv", "attack", "clean | attack", "clean+clean", "clean | clean", "Clean", "a+b"]
)
def test_layouts_that_are_none(text) -> None:
    with pytest.raises(ValueError, match="each once") as error:
        parse_layout(text)
    assert "\n" not in str(error.value)


def test_layouts_are_read_with_any_spaces() -> None:
    assert parse_layout(" clean+adv|attack ") == parse_layout("clean + adv | attack")
