"""A run on 4,608 ranks, rehearsed: what a rank does at its start and in each step is what it does on 6.

Each rank takes all of `conadv train`, with PyTorch's `fake` backend and a store that counts (fake_ranks.py).
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from conadv import PGD, split_batchnorm
from conadv.catalog import METHODS
from conadv.core.algorithm import ConAdv
from conadv.ranks import faults
from conadv.ranks.layout import Layout
from conadv.ranks.mail import Wire
from conadv.ranks.member import Member
from conadv.ranks.world import World
from conadv.roles import Role
from support import tiny
from support.fake_ranks import Call, Calls, CountingStore, Rehearsal, rehearse

ROLES = "clean | adv | attack"
CHUNK = 64  # images; one chunk per lane
LARGE = 4608  # ranks, of a batch of 98,304
LOOK = "check"  # into the store, as many as the run takes time

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
    assert {"allreduce_", "broadcast_", "message"} <= {call.kind for call in expected}
    for rank in (role, LARGE - 3 + role):
        assert without_lengths(rehearsals[LARGE, rank].calls) == without_lengths(expected)
        assert rehearsals[LARGE, rank].groups == rehearsals[6, role].groups


def without_lengths(calls: list[Call]) -> list[tuple[str, int, int | None]]:
    """Kind, number of the group, and size; texts that are broadcast at the start have more digits in the large run."""
    groups = list(dict.fromkeys(call.group for call in calls))
    return [(call.kind, groups.index(call.group), None if call.kind == "broadcast_" else call.size) for call in calls]


def test_what_is_broadcast_at_the_start_does_not_grow_with_the_ranks(rehearsals: Rehearsals) -> None:
    small, large = ([len(text) for text in rehearsals[size, 0].payloads] for size in (6, LARGE))
    assert len(small) == len(large)
    assert all(abs(one - other) <= 16 for one, other in zip(small, large, strict=True)), (small, large)


def test_requests_to_the_store_do_not_grow_with_the_ranks(rehearsals: Rehearsals) -> None:
    for (_, rank), rehearsal in rehearsals.items():
        assert rank == 0 or asked(rehearsal) == {"get": 2, "set": 2}
    assert asked(rehearsals[LARGE, 0]) == asked(rehearsals[6, 0])
    assert asked(rehearsals[LARGE, 0]).total() <= 6
    assert faults.BEAT >= 5.0, "a rank looks into the store at most once in 5 seconds"


def asked(rehearsal: Rehearsal) -> Counter[str]:
    return Counter({kind: count for kind, count in rehearsal.requests.items() if kind != LOOK})


def build(rank: int, layout: Layout, model: torch.nn.Module) -> Member:
    """The place, groups and routes of a rank; nothing is computed."""
    world = World(rank, layout.world_size, torch.device("cpu"), timeout=60)
    wire = Wire((CHUNK, 1, 8, 8), torch.float32, as_bytes=True)
    method = ConAdv(model, F.cross_entropy, PGD(0.1), chunk_size=CHUNK)
    return Member(world, layout, model, method, chunks=layout.world_size // 3, wire=wire)


@pytest.mark.slow
def test_each_of_4608_ranks_builds_its_place_groups_and_routes() -> None:
    layout = Layout.fit(ROLES, METHODS["conadv"].duties, LARGE)
    model = split_batchnorm(tiny.net(10, 1))
    sent, received, chunks, groups = Counter(), Counter(), Counter(), set()
    for rank in range(LARGE):
        dist.init_process_group("fake", store=CountingStore(), rank=rank, world_size=LARGE)
        try:
            member, calls = build(rank, layout, model), Calls()
            with calls:
                member.post.send_weights(0)  # from a clean rank to the rank of its lane that attacks
                if Role.ADV in member.place.role:
                    member.post.expect(0, 0)
                if member.only_attacks:
                    member.post.send(0, 0, torch.zeros(CHUNK, 1, 8, 8))
            for call in calls.made:
                (sent if call.members[0] == rank else received)[call.members] += 1
            chunks.update((duty, chunk) for duty in member.place.role for chunk in layout.chunks(rank, LARGE // 3))
            groups.add((member.place.role, len(dist.distributed_c10d._world.pg_map)))
        finally:
            dist.destroy_process_group()
    lanes = range(0, LARGE, 3)
    assert sent == {**{(lane, lane + 2): 1 for lane in lanes}, **{(lane + 2, lane + 1): 1 for lane in lanes}}
    assert received == {(lane + 2, lane + 1): 1 for lane in lanes}  # weights are received when they are needed
    assert chunks == {(duty, chunk): 1 for duty in (Role.CLEAN, Role.ADV, Role.ATTACK) for chunk in range(LARGE // 3)}
    # All ranks, twins, and weights; those that learn also have the group of their gradients.
    assert groups == {(Role.CLEAN, 4), (Role.ADV, 4), (Role.ATTACK, 3)}
