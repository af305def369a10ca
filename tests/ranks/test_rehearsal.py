"""A run on 4,608 ranks, rehearsed: what a rank does at its start and in each step is what it does on 6.

Each rank takes all of `conadv train`, with PyTorch's `fake` backend and a store that counts (fake_ranks.py).
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist

from conadv.catalog import METHODS
from conadv.core.roles import Role
from conadv.ranks import watch
from conadv.ranks.attempt import agree_on_attempt
from conadv.ranks.collectives import World
from conadv.ranks.heartbeats import Heartbeats
from conadv.ranks.layout import Layout
from conadv.ranks.member import Member, build_member
from conadv.ranks.traffic import Message
from conadv.ranks.wire import Wire
from support import tiny
from support.fake_ranks import CountingStore, Rehearsal, rehearse

ROLES = "clean | adv | attack"
CHUNK = 64  # images; one chunk per lane
LARGE = 4608  # ranks, of a batch of 98,304
HEARTBEAT = "compare_set"  # as many as the run takes time

Rehearsals = dict[tuple[int, int], Rehearsal]


def fields(size: int) -> dict[str, Any]:
    batch = size // 3 * CHUNK
    return {
        "method": "conadv",
        "layout": ROLES,
        "batch_size": batch,
        "chunk_size": CHUNK,
        "data__name": "synthetic",
        "data__train_size": batch,
        "data__image_size": 8,
        "epochs": 3,
        "schedule__warmup_epochs": "0%",
        "checkpoint__every": 1,
    }


@pytest.fixture(scope="module")
def rehearsals(tmp_path_factory: pytest.TempPathFactory) -> Rehearsals:
    """By size and rank: of the small run a lane, of the large one its first and its last."""
    folder, found = tmp_path_factory.mktemp("rehearsals"), {}
    for size, ranks in ((6, range(3)), (LARGE, (*range(3), *range(LARGE - 3, LARGE)))):
        payloads = None
        for rank in ranks:
            found[size, rank] = rehearse(rank, size, folder / f"{size}-{rank}", fields(size), payloads)
            payloads = payloads or found[size, rank].payloads
    return found


@pytest.mark.parametrize("role", range(3), ids=ROLES.split(" | "))
def test_messages_and_sums_do_not_grow_with_the_ranks(role: int, rehearsals: Rehearsals) -> None:
    """From the agreement at the start to the sums of the evaluation: kind, group and size of each call."""
    expected = rehearsals[6, role].calls
    assert {"allreduce_", "broadcast_"} <= {kind for kind, _, _ in expected}
    assert {"send"} <= {kind for kind, _, _ in expected} or role == 1
    for rank in (role, LARGE - 3 + role):
        assert without_lengths(rehearsals[LARGE, rank].calls) == without_lengths(expected)
        assert rehearsals[LARGE, rank].groups == rehearsals[6, role].groups


def without_lengths(calls: list[tuple[str, int, int]]) -> list[tuple[str, int, int | None]]:
    """Texts that are broadcast at the start name numbers, which have more digits in the large run."""
    return [(kind, group, None if kind == "broadcast_" else size) for kind, group, size in calls]


def test_what_is_broadcast_at_the_start_does_not_grow_with_the_ranks(rehearsals: Rehearsals) -> None:
    small, large = ([len(text) for text in rehearsals[size, 0].payloads] for size in (6, LARGE))
    assert len(small) == len(large)
    assert all(abs(one - other) <= 16 for one, other in zip(small, large, strict=True)), (small, large)


def test_requests_to_the_store_do_not_grow_with_the_ranks(rehearsals: Rehearsals) -> None:
    for (_, rank), rehearsal in rehearsals.items():
        assert rank == 0 or asked(rehearsal) == {"append": 2, "get": 1, "add": 1}
    assert asked(rehearsals[LARGE, 0]) == asked(rehearsals[6, 0])
    assert asked(rehearsals[LARGE, 0]).total() <= 6


def asked(rehearsal: Rehearsal) -> Counter[str]:
    return Counter({kind: count for kind, count in rehearsal.requests.items() if kind != HEARTBEAT})


def build(rank: int, layout: Layout, model: torch.nn.Module) -> Member:
    """The place, groups and routes of a rank; nothing is computed."""
    world = World(rank, layout.world_size, torch.device("cpu"), timeout=60)
    wire = Wire(CHUNK, (1, 8, 8), torch.float32, as_bytes=True)
    options = {"delay": 1, "has_twins": lambda *_: True, "keeps_stale": rank == 0}
    chunks = layout.world_size // 3
    return build_member(world, layout, model, lambda *_: None, chunks=chunks, wire=wire, **options)  # type: ignore


def routes(member: Member) -> tuple[list[Message], list[Message]]:
    assert member.handoff is not None
    traffic = member.handoff._traffic
    return traffic.sent(0, 0, False), traffic.received(0, 0, False)


@pytest.mark.slow
def test_each_of_4608_ranks_builds_its_place_groups_and_routes() -> None:
    layout = Layout.fit(ROLES, METHODS["conadv"].duties, LARGE)
    model = tiny.net(10, 1)
    sent, received, chunks, passed_on, groups = set(), set(), Counter(), Counter(), set()
    for rank in range(LARGE):
        dist.init_process_group("fake", store=CountingStore(), rank=rank, world_size=LARGE)
        try:
            member = build(rank, layout, model)
            for found, messages in zip((sent, received), routes(member), strict=True):
                found.update(messages)
            chunks.update((duty, chunk) for duty in member.place.role for chunk in layout.chunks(rank, LARGE // 3))
            passed_on.update(member.exchange._recipients.targets)
            groups.add((member.place.role, len(dist.distributed_c10d._world.pg_map)))
        finally:
            dist.destroy_process_group()
    assert sent == received
    assert len(sent) == LARGE // 3
    assert chunks == {(duty, chunk): 1 for duty in (Role.CLEAN, Role.ADV, Role.ATTACK) for chunk in range(LARGE // 3)}
    assert passed_on == dict.fromkeys(range(2, LARGE, 3), 1)
    # All ranks, twins, and passing sums on; those that learn also have the group of their sums.
    assert groups == {(Role.CLEAN, 4), (Role.ADV, 4), (Role.ATTACK, 3)}


@pytest.mark.parametrize("size", [6, LARGE])
def test_a_rank_asks_the_store_four_times_to_start_and_once_per_heartbeat(size: int) -> None:
    store = CountingStore()
    agree_on_attempt(store, 1, size, timeout=1)
    assert store.requests == {"append": 2, "get": 1, "add": 1}
    for rank in range(2, size):
        agree_on_attempt(store, rank, size, timeout=1)
    store.requests.clear()
    agree_on_attempt(store, 0, size, timeout=1)
    heartbeats = [Heartbeats(store, rank, size) for rank in range(size)]
    heartbeats[0].open()
    assert store.requests.total() <= 6, "rank 0 answers all ranks at once"
    store.requests.clear()
    for heartbeat in heartbeats:
        assert heartbeat.beat(awaits=False) is None
    assert store.requests == {HEARTBEAT: size}
    assert watch._BEAT >= 5.0, "at most one request of a rank in 5 seconds"
    store.requests.clear()
    assert len(heartbeats[0].look()) == size
    assert store.requests.total() == 1
