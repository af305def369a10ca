"""Promise: numbers do not depend on the layout or the number of ranks, and all ranks hold the same ones."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from conadv.catalog import METHODS
from conadv.ranks.layout import Layout
from conadv.trainer.build import _wire, attack_of, build_task
from support import tasks, tiny
from support.promises import few
from support.ranks import Pool

# (ranks, layout); the 6 chunks of a batch are shared by 1, 2, 3 or 6 lanes.
TOGETHER = [(size, None) for size in (2, 3, 6)]
ATTACKED = [
    *TOGETHER,
    *((size, layout) for layout in ("clean+adv | attack", "clean | adv+attack") for size in (2, 4, 6)),
    (3, "clean | adv | attack"),
    (6, "clean | adv | attack"),
    (6, "attack | clean | adv"),
]
RECYCLED = [*TOGETHER, *((size, "clean | adv") for size in (2, 4, 6)), (2, "adv | clean")]
CASES = [
    *(("vanilla", 0, *case) for case in TOGETHER),
    *(("conadv", delay, *case) for delay in (0, 1, 2) for case in ATTACKED),
    *(("recycled", 1, *case) for case in RECYCLED),
    *(("sam", 0, *case) for case in TOGETHER),
]
# Of each method and delay: two lanes, and one rank per role.
USUAL = {None: 2, "clean | adv | attack": 3, "clean | adv": 2}

State = dict[str, Tensor]


def trained(pool: Pool, folder: Path, size: int, **changes: Any) -> State:
    """The state after training on `size` ranks, which is the same on all of them."""
    out = folder / "state.safetensors"
    digests = pool.run(size, tasks.take_steps, {"epochs": 2, **changes}, str(out))
    assert len(set(digests)) == 1, "the ranks hold different weights"
    return safetensors.torch.load_file(out)


@pytest.fixture(scope="module")
def alone(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., State]:
    """The state after training in one process, computed once for each recipe."""

    @cache
    def train(**changes: Any) -> State:
        return trained(pool, tmp_path_factory.mktemp("alone"), 1, **changes)

    return train


def fields(method: str, delay: int) -> dict[str, Any]:
    return {"method": method, "delay": delay} if method == "conadv" else {"method": method}


@pytest.mark.parametrize(
    ("method", "delay", "size", "layout"),
    few(CASES, lambda method, delay, size, layout: size == USUAL.get(layout) or (delay == 1 and size == 2)),
)
def test_every_layout_takes_the_steps_of_one_process(method, delay, size, layout, alone, pool, tmp_path):
    one = alone(**fields(method, delay))
    several = trained(pool, tmp_path, size, layout=layout or "none", **fields(method, delay))
    assert tiny.distance(one, several) <= 1e-12


@pytest.mark.parametrize("layout", ["clean | adv | attack", "clean+adv | attack"])
def test_twins_that_cross_as_bytes_take_the_steps_of_one_process(layout, alone, pool, tmp_path):
    changes = {"attack__random_start": 1, "attack__grid": True}
    recipe = tiny.recipe(**changes)
    task = build_task(recipe, torch.device("cpu"))
    assert [_wire(own, task, attack_of(own)).as_bytes for own in (recipe, tiny.recipe())] == [True, False]
    one = alone(**changes)
    assert tiny.distance(one, alone(attack__random_start=1)) > 1e-6  # the starts are others
    assert tiny.distance(one, trained(pool, tmp_path, len(layout.split("|")), layout=layout, **changes)) <= 1e-12


@pytest.mark.parametrize(
    ("method", "layout"),
    [
        ("conadv", "none"),
        ("conadv", "clean | adv | attack"),
        ("disadv", "clean | adv+attack"),
        ("recycled", "clean | adv"),
    ],
)
def test_twins_through_main_take_the_steps_of_one_process(method, layout, alone, pool, tmp_path):
    changes = {"method": method, "twin_branch": "main"}
    one = alone(**changes)
    assert not any(".adv." in name for name in one)
    several = trained(pool, tmp_path, max(2, len(layout.split("|"))), layout=layout, **changes)
    assert tiny.distance(one, several) <= 1e-12


@pytest.mark.parametrize("chunk", [2, 12, 24])
@pytest.mark.parametrize(("method", "layout"), [("conadv", "clean | adv | attack"), ("recycled", "clean | adv")])
def test_chunks_of_any_size_take_the_steps_of_one_process(method, layout, chunk, alone, pool, tmp_path):
    one = alone(method=method, chunk_size=chunk)
    several = trained(pool, tmp_path, len(layout.split("|")), method=method, layout=layout, chunk_size=chunk)
    assert tiny.distance(one, several) <= 1e-12


@pytest.mark.parametrize(
    ("method", "size", "layout"),
    [
        ("conadv", 2, "clean+adv+attack"),
        ("conadv", 3, "clean | adv | attack"),
        ("disadv", 2, "clean+adv | attack"),
        ("recycled", 2, "clean | adv"),
        ("recycled", 4, "clean | adv"),
    ],
)
def test_twins_of_half_of_the_chunks_take_the_steps_of_one_process(method, size, layout, alone, pool, tmp_path):
    half = {"method": method, "twin_share": 0.5, "batch_size": 16, "chunk_size": 2}
    one = alone(**half)
    several = trained(pool, tmp_path, size, layout=layout, **half)
    assert tiny.distance(one, several) <= 1e-12


@pytest.mark.parametrize(
    ("method", "size", "layout"),
    [("conadv", 2, "clean+adv+attack"), ("conadv", 3, "clean | adv | attack"), ("recycled", 4, "clean | adv")],
)
def test_shuffled_twins_take_the_steps_of_one_process(method, size, layout, alone, pool, tmp_path):
    shuffled = {"method": method, "twin_share": 0.5, "batch_size": 16, "chunk_size": 2, "shuffle_twins": 2}
    one = alone(**shuffled)
    assert tiny.distance(one, alone(**{**shuffled, "shuffle_twins": 1})) > 1e-6
    assert tiny.distance(one, trained(pool, tmp_path, size, layout=layout, **shuffled)) <= 1e-12


def chunked(in_lane: int, lanes: int, share: float = 1) -> dict[str, Any]:
    """A batch of so many chunks of 2 images."""
    return {"twin_share": share, "chunk_size": 2, "batch_size": 2 * in_lane * lanes, "data__train_size": 96}


# Several ranks of a lane share a role: method, delay, layout, ranks, chunks per lane, share of the chunks with twins.
UNEVEN = [
    ("conadv", 1, "3 clean | 3 adv | 2 attack", 8, 6, 1),
    ("conadv", 2, "2 clean | 2 adv | attack", 5, 4, 1),
    ("conadv", 0, "2 clean+adv | attack", 6, 4, 1),
    ("recycled", 1, "4 clean | adv", 5, 4, 0.25),
    ("recycled", 1, "2 clean | adv", 6, 4, 0.5),
]
UNEVEN_ALL = [
    *UNEVEN,
    *(("conadv", delay, "3 clean | 3 adv | 2 attack", 8, 6, 1) for delay in (0, 2, 3)),
    *(("conadv", delay, "3 clean | 3 adv | 2 attack", 8, 12, 1) for delay in (0, 1, 2, 3)),
    *(("conadv", delay, "2 clean | 2 adv | attack", 5, in_lane, 1) for delay in (0, 1, 2, 3) for in_lane in (2, 8)),
    *(("conadv", delay, "2 clean+adv | attack", size, 2, 1) for delay in (0, 1, 2, 3) for size in (3, 6)),
    *(("conadv", delay, "2 clean+adv | attack", 6, 8, 0.5) for delay in (0, 3)),
    ("conadv", 1, "4 clean | adv | attack", 6, 8, 0.25),
    ("conadv", 2, "clean+adv | 2 attack", 3, 4, 0.5),
    ("recycled", 1, "4 clean | adv", 5, 8, 0.25),
    *(("recycled", 1, "2 clean | adv", size, 2, 0.5) for size in (3, 6)),
    ("recycled", 1, "2 clean | adv", 3, 12, 0.5),
    ("recycled", 1, "3 clean | 2 adv", 5, 6, 1),
    ("recycled", 1, "clean | 2 adv", 6, 2, 1),
    ("vanilla", 0, "2 clean", 4, 4, 1),
]


@pytest.mark.parametrize(
    ("method", "delay", "layout", "size", "in_lane", "share"), few(UNEVEN_ALL, lambda *case: case in UNEVEN)
)
def test_several_ranks_of_a_role_take_the_steps_of_one_process(
    method, delay, layout, size, in_lane, share, alone, pool, tmp_path
):
    lanes = size // Layout.fit(layout, METHODS[method].duties).world_size
    changes = {**fields(method, delay), **chunked(in_lane, lanes, share)}
    several = trained(pool, tmp_path, size, layout=layout, **changes)
    assert tiny.distance(alone(**changes), several) <= 1e-12


@pytest.mark.promise
def test_three_uneven_lanes_take_the_steps_of_one_process(alone, tmp_path):
    changes = {**fields("conadv", 2), **chunked(2, 3)}
    nine = Pool(9)
    try:
        several = trained(nine, tmp_path, 9, layout="2 clean+adv | attack", **changes)
    finally:
        nine.close()
    assert tiny.distance(alone(**changes), several) <= 1e-12


@pytest.mark.parametrize("method", ["vanilla", "disadv", "conadv", "recycled"])
def test_four_lanes_take_the_steps_of_one_process(method, alone, pool, tmp_path):
    one = alone(method=method, batch_size=16)
    several = trained(pool, tmp_path, 4, method=method, batch_size=16)
    assert tiny.distance(one, several) <= 1e-12


@pytest.mark.parametrize(
    "changes",
    [
        {"data__augment": "autoaugment-cifar10", "data__views": "three"},
        {"attack__random_start": 0.0},  # twins cross as bytes
        {"attack__steps": 3, "attack__norm": "l2"},
        {"attack__targeted": True},
        {"attack__direction": "noise"},
        {"optimizer__name": "sgd", "optimizer__lr": 0.1},
        {"optimizer__name": "adamw", "optimizer__lr": 0.01},
        {"optimizer__name": "lamb", "optimizer__lr": 0.05},
        {"data__workers": 2},
        {"eval_every": 1},
        {"adv_weight": 0.25, "label_smoothing": 0.0},
    ],
    ids=lambda changes: ",".join(f"{key}={value}" for key, value in changes.items()),
)
def test_every_option_takes_the_steps_of_one_process(changes, alone, pool, tmp_path):
    one = alone(**changes)
    several = trained(pool, tmp_path, 3, layout="clean | adv | attack", **changes)
    assert tiny.distance(one, several) <= 1e-12


@pytest.mark.parametrize(("size", "layout"), [(2, "clean+adv"), (3, "clean+adv"), (4, "clean | adv")])
def test_recycled_takes_raw_steps_of_one_length_on_any_number_of_lanes(size, layout, alone, pool, tmp_path):
    raw = {"method": "recycled", "attack__direction": "raw", "attack__step_size": 0.5}
    one = alone(**raw)
    several = trained(pool, tmp_path, size, layout=layout, **raw)
    assert tiny.distance(one, several) <= 1e-12


def test_training_moved_every_tensor(alone):
    """Else the comparisons above would hold of runs that learn nothing."""
    start, end = alone(max_steps=1, method="conadv"), alone(method="conadv")
    still = [name for name in start if name.startswith("model.") and start[name].equal(end[name])]
    assert still == []
