"""Promise: stop anywhere, resume, and everything is bitwise that of a run that never stopped."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import safetensors.torch
from torch import Tensor

from conadv import catalog
from conadv.optim import OPTIMIZERS
from support import tasks, tiny
from support.promises import few
from support.ranks import Pool

# 3 epochs of 2 steps.
STEPS = 6
SETTINGS: dict[str, dict[str, Any]] = {
    "vanilla": {"method": "vanilla"},
    "disadv": {"method": "disadv"},
    "conadv": {"method": "conadv", "delay": 1},
    "conadv-2": {"method": "conadv", "delay": 2},
    "recycled": {"method": "recycled"},
    "conadv-share": {"method": "conadv", "twin_share": 0.5, "chunk_size": 2},
    "recycled-share": {"method": "recycled", "twin_share": 0.5, "chunk_size": 2},
    "conadv-main": {"method": "conadv", "twin_branch": "main"},
    "recycled-main": {"method": "recycled", "twin_branch": "main"},
    "recycled-shuffled": {"method": "recycled", "shuffle_twins": 2, "chunk_size": 2},
    "recycled-until": {"method": "recycled", "adv_until": 0.5, "adv_weight": 0.3, "attack__norm": "l2"},
    "sam": {"method": "sam"},
}
# Each optimizer with a learning rate at which the tiny net learns.
OPTIMIZER_SETTINGS = {
    name: {"optimizer__name": name, "optimizer__lr": lr}
    for name, lr in {"lars": 10, "sgd": 0.1, "adamw": 0.01, "lamb": 0.05, "muon": 0.02}.items()
}
LAYOUTS = {
    "vanilla": [(2, "clean")],
    "conadv-main": [(3, "clean | adv | attack")],
    "recycled-main": [(2, "clean | adv")],
    "recycled-share": [(2, "clean | adv"), (4, "clean | adv"), (5, "4 clean | adv")],
    "recycled-shuffled": [(2, "clean | adv")],
    "recycled-until": [(2, "clean | adv")],
    "sam": [(2, "clean")],
    "recycled": [(2, "clean+adv"), (2, "clean | adv"), (4, "adv | clean")],
}
SPLIT = [
    (2, "clean+adv | attack"),
    (2, "clean | adv+attack"),
    (3, "clean | adv | attack"),
    (6, "attack | clean | adv"),
]
# Lanes with several ranks of a role, whose twins in flight are made again by several ranks.
UNEVEN = [
    ("conadv", 5, "2 clean | 2 adv | attack"),
    ("conadv-2", 3, "2 clean+adv | attack"),
    ("disadv", 3, "2 clean+adv | attack"),
    ("recycled", 3, "2 clean | adv"),
    ("conadv-share", 6, "4 clean | adv | attack"),
]
RANKED = [(name, *layout) for name in SETTINGS for layout in LAYOUTS.get(name, [(2, "clean+adv+attack"), *SPLIT])]
RANKED += UNEVEN
# One setting per method, and for each setting one layout, the one with the most roles. The rest: `make promises`.
METHODS = ("vanilla", "disadv", "conadv", "recycled", "sam")
SOME = few(((name,) for name in SETTINGS), lambda name: name in METHODS)
SPREAD = {
    name: max((one[1:] for one in RANKED if one[0] == name), key=lambda one: one[1].count("|")) for name in SETTINGS
}


class Trace(NamedTuple):
    """All that a run leaves: the state after each step that was saved, and the metrics without their times."""

    states: dict[int, dict[str, Tensor]]
    metrics: list[dict[str, Any]]


def trace(folder: Path) -> Trace:
    states = {int(path.stem[5:]): safetensors.torch.load_file(path) for path in (folder / "checkpoints").glob("step-*")}
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return Trace(states, [{key: value for key, value in line.items() if key != "seconds"} for line in lines])


@pytest.fixture(scope="module")
def undisturbed(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Trace]:
    """A run that never stopped, with a checkpoint after each step; computed once for each recipe and layout."""

    @cache
    def train(size: int, **changes: Any) -> Trace:
        folder = tmp_path_factory.mktemp("whole") / "run"
        every = {"checkpoint__every": 1, "checkpoint__keep": STEPS, **changes}
        assert pool.run(size, tasks.train, str(folder), False, every) == [0] * size
        whole = trace(folder)
        assert sorted(whole.states) == list(range(1, STEPS + 1))
        assert [line["step"] for line in whole.metrics] == list(range(STEPS))
        return whole

    return train


def train_in_parts(
    pool: Pool, folder: Path, stops: list[int], sizes: list[int], layouts: list[str], **changes: Any
) -> None:
    """Train, stopped after each of these steps and resumed; each part on so many ranks in some layout."""
    step = 0
    for part, (stop, size, layout) in enumerate(zip([*stops, 0], sizes, layouts, strict=True)):
        fields = {"layout": layout} if part else {**changes, "layout": layout}
        after = stop - step if stop else 0
        # Whichever learning rank is asked to stop, all ranks do.
        statuses = pool.run(size, tasks.train, str(folder), part > 0, fields, after, part)
        assert statuses == [143 if stop else 0] * size
        step = stop


def in_parts(pool: Pool, folder: Path, stops: list[int], size: int = 1, layout: str = "none", **changes: Any) -> Trace:
    parts = len(stops) + 1
    train_in_parts(pool, folder, stops, [size] * parts, [layout] * parts, **changes)
    return trace(folder)


def assert_same(parts: Trace, whole: Trace) -> None:
    assert parts.metrics == whole.metrics
    assert STEPS in parts.states
    for step, state in parts.states.items():
        assert tiny.equal(state, whole.states[step]), f"step {step}"


@pytest.mark.parametrize(
    ("name", "stop"), few(((name, stop) for name in SETTINGS for stop in range(1, STEPS)), lambda name, stop: stop == 3)
)
def test_stopped_at_any_step_a_run_ends_as_if_it_had_not(name, stop, undisturbed, pool, tmp_path):
    parts = in_parts(pool, tmp_path / "run", [stop], **SETTINGS[name])
    assert_same(parts, undisturbed(1, **SETTINGS[name]))


@pytest.mark.parametrize("name", SOME)
def test_stopped_at_every_step_a_run_ends_as_if_it_had_not(name, undisturbed, pool, tmp_path):
    parts = in_parts(pool, tmp_path / "run", list(range(1, STEPS)), **SETTINGS[name])
    assert_same(parts, undisturbed(1, **SETTINGS[name]))


@pytest.mark.parametrize(
    ("name", "size", "layout"), few(RANKED, lambda name, size, layout: SPREAD[name] == (size, layout))
)
def test_stopped_in_any_layout_a_run_ends_as_if_it_had_not(name, size, layout, undisturbed, pool, tmp_path):
    parts = in_parts(pool, tmp_path / "run", [1, 4], size, layout, **SETTINGS[name])
    assert_same(parts, undisturbed(size, layout=layout, **SETTINGS[name]))


@pytest.mark.promise
@pytest.mark.parametrize("stop", range(1, STEPS))
@pytest.mark.parametrize(("name", "size", "layout"), RANKED)
def test_stopped_at_any_step_in_any_layout(name, size, layout, stop, undisturbed, pool, tmp_path):
    parts = in_parts(pool, tmp_path / "run", [stop], size, layout, **SETTINGS[name])
    assert_same(parts, undisturbed(size, layout=layout, **SETTINGS[name]))


@pytest.mark.parametrize("name", SOME)
def test_a_checkpoint_resumes_in_another_layout(name, undisturbed, pool, tmp_path):
    others = LAYOUTS.get(name, SPLIT)
    sizes, layouts = zip((1, "none"), *others, strict=True)
    stops = [1, 2, 3, 4, 5][: len(others)]
    train_in_parts(pool, tmp_path / "run", stops, list(sizes), list(layouts), **SETTINGS[name])
    moved, whole = trace(tmp_path / "run"), undisturbed(1, **SETTINGS[name])
    assert tiny.distance(moved.states[STEPS], whole.states[STEPS]) <= 1e-12
    assert [line["step"] for line in moved.metrics] == list(range(STEPS))


def test_a_checkpoint_moves_between_uneven_lanes(undisturbed, pool, tmp_path):
    sizes, layouts = (
        [5, 8, 3, 1],
        ["2 clean | 2 adv | attack", "3 clean | 3 adv | 2 attack", "2 clean+adv | attack", "none"],
    )
    train_in_parts(pool, tmp_path / "run", [1, 3, 4], sizes, layouts, **SETTINGS["conadv-2"])
    moved, whole = trace(tmp_path / "run"), undisturbed(1, **SETTINGS["conadv-2"])
    assert tiny.distance(moved.states[STEPS], whole.states[STEPS]) <= 1e-12


@pytest.mark.parametrize(
    "changes",
    [
        {"eval_every": 1},
        {"data__augment": "autoaugment-cifar10", "data__views": "three"},
        {"optimizer__momentum": 0},
        {"attack__steps": 2, "attack__targeted": True},
        {"method": "recycled", "attack__direction": "noise"},
        {"data__workers": 2},
        {"precision": "float32", "model": "resnet8"},
        {"precision": "bfloat16"},
        {"checkpoint__every": 1000},
    ],
    ids=lambda changes: ",".join(changes),
)
def test_with_any_option_a_stopped_run_ends_as_if_it_had_not(changes, undisturbed, pool, tmp_path):
    parts = in_parts(pool, tmp_path / "run", [1, 4], **changes)
    assert_same(parts, undisturbed(1, **{**changes, "checkpoint__every": 1}))


def test_every_method_is_in_the_table():
    assert {str(setting["method"]) for setting in SETTINGS.values()} == catalog.METHODS.keys()


def test_every_optimizer_is_in_the_table():
    assert OPTIMIZER_SETTINGS.keys() == OPTIMIZERS.keys()


@pytest.mark.parametrize("changes", [*OPTIMIZER_SETTINGS.values(), {"optimizer__gsnr": 0.1}], ids=str)
def test_with_any_optimizer_a_run_stopped_at_every_step_ends_as_if_it_had_not(changes, undisturbed, pool, tmp_path):
    parts = in_parts(pool, tmp_path / "run", list(range(1, STEPS)), **changes)
    assert_same(parts, undisturbed(1, **changes))


@pytest.mark.parametrize("name", few(zip(OPTIMIZER_SETTINGS), lambda name: name in ("lars", "muon")))
def test_with_any_optimizer_a_checkpoint_resumes_in_another_layout(name, undisturbed, pool, tmp_path):
    changes = OPTIMIZER_SETTINGS[name]
    layouts = ["none", "clean | adv | attack", "clean+adv | attack"]
    train_in_parts(pool, tmp_path / "run", [2, 4], [1, 3, 2], layouts, **changes)
    moved, whole = trace(tmp_path / "run"), undisturbed(1, **changes)
    assert tiny.distance(moved.states[STEPS], whole.states[STEPS]) <= 1e-12


@pytest.mark.parametrize("name", SOME)
def test_a_run_that_ended_at_max_steps_goes_on_as_if_it_had_not(name, undisturbed, pool, tmp_path):
    folder = str(tmp_path / "run")
    assert pool.run(1, tasks.train, folder, False, {**SETTINGS[name], "max_steps": 3}) == [0]
    assert pool.run(1, tasks.train, folder, True, {"max_steps": "none"}) == [0]
    assert_same(trace(tmp_path / "run"), undisturbed(1, **SETTINGS[name]))


@pytest.mark.parametrize(("size", "layout"), [(1, "none"), (2, "clean | adv")])
@pytest.mark.parametrize("max_steps", ["none", "2"])
def test_a_run_that_has_ended_can_be_resumed_and_ends_again(max_steps, size, layout, pool, tmp_path):
    folder = tmp_path / "run"
    assert pool.run(size, tasks.train, str(folder), False, {"method": "recycled", "layout": layout}) == [0] * size
    before = trace(folder)
    assert pool.run(size, tasks.train, str(folder), True, {"max_steps": max_steps}) == [0] * size
    assert_same(trace(folder), before)
    assert json.loads((folder / "summary.json").read_text())["steps"] == STEPS


def test_states_differ_from_step_to_step(undisturbed):
    """Else the comparisons above would hold of runs that stand still."""
    for name in METHODS:
        states = undisturbed(1, **SETTINGS[name]).states
        assert not any(tiny.equal(states[step], states[step + 1]) for step in range(1, STEPS))
