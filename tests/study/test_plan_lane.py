"""The critical path, against the paper's table and against a lane played out event by event."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from conadv.core.catalog import METHODS
from conadv.core.roles import Role
from conadv.study.plan.lane import LEARNING, Lane, fit_lane

UNITS = {Role.CLEAN: 3.0, Role.ADV: 3.0, Role.ATTACK: 2.0}


def lane(method: str, layout: str, delay: int, chunks: int, duties=UNITS) -> Lane:
    return uneven(method, layout, delay, chunks, duties, (1, 1))


def uneven(method: str, layout: str, delay: int, chunks: int, duties=UNITS, twins=(1, 1)) -> Lane:
    counts = fit_lane(layout, METHODS[method].duties).counts
    return Lane(tuple(counts), METHODS[method].maker, delay, chunks, duties, tuple(counts.values()), twins)


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
    assert step_of(lane(method, layout, METHODS[method].default_delay, 1)) == length


def test_disadv_on_three_ranks_attacks_a_chunk_while_it_learns_the_one_before() -> None:
    assert step_of(lane("disadv", "clean | adv | attack", 0, 4)) == 2 + 4 * 3


def test_a_late_twin_holds_up_every_second_step_only() -> None:
    assert step_of(lane("recycled", "clean | adv", 1, 1), transfer=1.0) == 3.5


def play(lane: Lane, transfer: float, reduction: float, update: float, steps: int) -> float:
    """Mean seconds a step of a lane in which ranks, link and update are events, after it has settled."""
    start, starts, link_free = 0.0, [], 0.0
    arrivals: dict[tuple[int, int], float] = {}  # (batch, chunk) of twins, when they can be taken
    clean, adv, attack = Role.CLEAN, Role.ADV, Role.ATTACK
    for step in range(steps):
        starts.append(start)
        ends = {}
        # The rank that makes twins never waits for the one that takes them within a step: play it first.
        for role in sorted(lane.roles, key=lambda role: lane.maker is None or lane.maker not in role):
            clock = start
            for chunk in range(lane.chunks):
                if attack in role:
                    clock += lane.duties[attack]
                if lane.maker is attack and attack in role:
                    link_free = max(link_free, clock) + transfer
                    arrivals[step + lane.delay, chunk] = link_free if adv not in role else clock
                if adv in role:
                    clock = max(clock, arrivals.get((step, chunk), 0.0))
                clock += sum(lane.duties[duty] for duty in role & LEARNING)
                if lane.maker is clean and clean in role and adv not in role:
                    link_free = max(link_free, clock) + transfer
                    arrivals[step + 1, chunk] = link_free
            ends[role] = clock + (reduction if role & LEARNING else 0.0)
        start = max(ends.values()) + update
    settled = steps // 2
    return (start - starts[settled]) / (steps - settled)


def play_uneven(lane: Lane, transfer: float, reduction: float, update: float, steps: int) -> float:
    """Mean seconds a step of a lane of several ranks per role, each an actor with a clock of its own."""
    some, of = lane.twins
    ranks = [(role, count, place) for role, count in zip(lane.roles, lane.ranks, strict=True) for place in range(count)]
    # Ranks that make twins never wait for those that take them within a step: play them first.
    ranks.sort(key=lambda rank: lane.maker is None or lane.maker not in rank[0])
    links = dict.fromkeys(ranks, 0.0)
    arrivals: dict[tuple[int, int], float] = {}
    start, starts = 0.0, []
    for step in range(steps):
        starts.append(start)
        ends = [start]
        for rank in ranks:
            role, count, place = rank
            clock, share = start, lane.chunks // count
            for chunk in range(place * share, (place + 1) * share):
                has_twin = chunk % of >= of - some

                def send(when: int, chunk=chunk, rank=rank) -> None:
                    links[rank] = max(links[rank], clock) + transfer  # noqa: B023
                    arrivals[when, chunk] = links[rank]

                if Role.ATTACK in role and has_twin:
                    clock += lane.duties[Role.ATTACK]
                    send(step + lane.delay)
                if Role.ADV in role and has_twin:
                    clock = max(clock, arrivals.get((step, chunk), 0.0)) + lane.duties[Role.ADV]
                if Role.CLEAN in role:
                    clock += lane.duties[Role.CLEAN]
                if lane.maker is Role.CLEAN and Role.CLEAN in role and has_twin:
                    send(step + 1)
            ends.append(clock + (reduction if role & LEARNING else 0.0))
        start = max(ends) + update
    settled = steps // 2
    return (start - starts[settled]) / (steps - settled)


seconds = st.floats(0.05, 5.0)


@settings(max_examples=100, deadline=None)
@given(
    place=st.sampled_from(
        [
            ("conadv", "3 clean | 3 adv | 2 attack"),
            ("conadv", "2 clean | 2 adv | attack"),
            ("conadv", "2 clean+adv | attack"),
            ("conadv", "clean+adv | 3 attack"),
            ("conadv", "clean | 2 adv | 3 attack"),
            ("recycled", "4 clean | adv"),
            ("recycled", "2 clean | adv"),
            ("recycled", "2 clean | 3 adv"),
            ("recycled", "clean | adv"),
            ("recycled", "clean | 2 adv"),
            ("conadv", "clean | adv | attack"),
            ("disadv", "clean+adv | attack"),
        ]
    ),
    delay=st.integers(0, 3),
    each=st.integers(1, 2),
    twins=st.sampled_from([(1, 1), (1, 2), (1, 4), (2, 3)]),
    duties=st.fixed_dictionaries(dict.fromkeys(Role, seconds)),
    transfer=st.floats(0.0, 3.0),
    reduction=st.floats(0.0, 2.0),
    update=st.floats(0.0, 1.0),
)
@example(  # two of four ranks send, each in every step
    place=("recycled", "4 clean | adv"),
    delay=1,
    each=1,
    twins=(1, 2),
    duties={Role.CLEAN: 1.0, Role.ADV: 0.25, Role.ATTACK: 1.0},
    transfer=2.0,
    reduction=0.0,
    update=0.0,
)
def test_uneven_lanes_take_the_time_of_steps_played_out(
    place, delay, each, twins, duties, transfer, reduction, update
) -> None:
    method, layout = place
    delay = delay if METHODS[method].delay is None else METHODS[method].delay
    chunks = each * fit_lane(layout, METHODS[method].duties).smallest(twins[1])
    asked = uneven(method, layout, delay, chunks, duties, twins)
    played = play_uneven(asked, transfer, reduction, update, steps=120)
    assert step_of(asked, transfer, reduction, update) == pytest.approx(played, rel=0.02)


@pytest.mark.parametrize(
    ("method", "layout", "twins", "length"),
    [
        ("conadv", "3 clean | 3 adv | 2 attack", (1, 1), 6),  # 6 chunks: no rank is idle
        ("recycled", "4 clean | adv", (1, 4), 3),  # vanilla's time on 1.25 times its devices
        ("recycled", "2 clean | adv", (1, 2), 3),
        ("conadv", "2 clean+adv | attack", (1, 1), 6),
    ],
)
def test_length_of_the_path_of_uneven_lanes(method, layout, twins, length) -> None:
    chunks = fit_lane(layout, METHODS[method].duties).smallest(twins[1])
    asked = uneven(method, layout, METHODS[method].default_delay, chunks, UNITS, twins)
    assert step_of(asked) == pytest.approx(length)


def test_three_three_two_leaves_no_rank_idle() -> None:
    asked = uneven("conadv", "3 clean | 3 adv | 2 attack", 1, 6)
    assert asked.work / (asked.width * step_of(asked)) == pytest.approx(1)


@settings(max_examples=300, deadline=None)
@given(
    place=st.sampled_from(
        [(name, text) for name, method in METHODS.items() for text in method.layouts]
        + [("conadv", "clean+attack | adv")]
    ),
    delay=st.integers(1, 3),
    chunks=st.integers(1, 5),
    duties=st.fixed_dictionaries(dict.fromkeys(Role, seconds)),
    transfer=st.floats(0.0, 8.0),
    reduction=st.floats(0.0, 2.0),
    update=st.floats(0.0, 1.0),
)
def test_the_formula_is_the_mean_of_steps_played_out(place, delay, chunks, duties, transfer, reduction, update) -> None:
    method, layout = place
    delay = delay if METHODS[method].delay is None else METHODS[method].delay
    asked = lane(method, layout, delay, chunks, duties)
    # 5·4·3·2·… steps a period of any round trip: the mean over half of 240 is exact once the start has worn off.
    played = play(asked, transfer, reduction, update, steps=240)
    assert step_of(asked, transfer, reduction, update) == pytest.approx(played, rel=0.02)


@settings(deadline=None)
@given(
    delay=st.integers(0, 3),
    chunks=st.integers(1, 6),
    attack=seconds,
    reduction=st.floats(0.0, 2.0),
    layout=st.sampled_from(["clean | adv | attack", "clean+adv | attack"]),
)
def test_the_hidden_transfer_is_the_longest_that_costs_nothing(delay, chunks, attack, reduction, layout) -> None:
    asked = lane("conadv", layout, delay, chunks, UNITS | {Role.ATTACK: attack})
    free = step_of(asked, 0.0, reduction)
    hidden = asked.hidden_transfer(free, reduction, 0.0)
    assert step_of(asked, hidden, reduction) == pytest.approx(free, rel=1e-9)
    assert step_of(asked, hidden + 0.01, reduction) > free + 1e-4


def test_only_twins_that_change_ranks_are_handed_over() -> None:
    over = {
        (name, layout)
        for name, method in METHODS.items()
        for layout in method.layouts
        if lane(name, layout, method.default_delay, 1).route is not None
    }
    apart = {
        (method, layout) for method in ("disadv", "conadv") for layout in ("clean+adv | attack", "clean | adv | attack")
    }
    assert over == apart | {("recycled", "clean | adv")}


@pytest.mark.parametrize(
    "text", ["", "clean |", "adv", "attack", "clean | attack", "clean+clean", "clean | clean", "Clean", "a+b"]
)
def test_layouts_that_fit_no_method(text) -> None:
    assert not any(fit_lane(text, method.duties) for method in METHODS.values())


def test_layouts_are_read_with_any_spaces() -> None:
    assert fit_lane(" clean+adv|attack ", METHODS["conadv"].duties) == fit_lane(
        "clean + adv | attack", METHODS["conadv"].duties
    )
