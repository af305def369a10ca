"""Promise: a team takes the steps of one process in anyone's loop, in every layout, and resumes in any of them."""

from __future__ import annotations

import re
import signal
from functools import cache
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import conadv
from conadv.ranks.sampler import TeamSampler
from support import teams, tiny
from support.settings import small_cnn

# method, its options, ranks, layout
CASES = [
    ("Vanilla", {}, 2, None),
    ("Vanilla", {}, 4, "2 clean"),
    ("Sam", {}, 2, None),
    ("ConAdv", {}, 2, None),
    ("ConAdv", {"delay": 0}, 2, "clean | adv+attack"),
    ("ConAdv", {}, 3, "clean | adv | attack"),
    ("ConAdv", {"delay": 2}, 6, "clean | adv | attack"),
    ("ConAdv", {"twin_share": "1/2"}, 6, "2 clean | 2 adv | 2 attack"),
    ("Recycled", {}, 2, "clean | adv"),
    ("Recycled", {"twin_share": "1/4"}, 3, "2 clean | adv"),
    ("Recycled", {}, 6, "2 clean | adv"),
]


@cache
def _alone(name: str, options: tuple[tuple[str, Any], ...]) -> dict[str, Tensor]:
    return teams.alone(name, dict(options))


def alone(name: str, options: dict[str, Any]) -> dict[str, Tensor]:
    return _alone(name, tuple(options.items()))


@pytest.mark.parametrize(("name", "options", "size", "layout"), CASES)
def test_a_team_takes_the_steps_of_one_process(name, options, size, layout, pool, tmp_path):
    digests = pool.run(size, teams.train, layout, name, options, str(tmp_path / "out"))
    assert len(set(digests) - {""}) == 1, "the ranks hold different weights"
    found = safetensors.torch.load_file(tmp_path / "out")
    assert tiny.distance(alone(name, options), found) <= 1e-12


def test_a_rank_with_another_attack_ends_all_before_the_first_step(start_team):
    run = start_team(TEAM_ATTACK="1")
    assert run.statuses() == [1, 1, 1]
    *_, line, last = run.said().splitlines()
    assert line == "ValueError: epsilon is 0.5, on rank 0 0.25: pass the same arguments on all ranks"
    assert last == "on rank 1 (lane 0, adv): the run ends on all 3 ranks"
    assert not run.folder.exists()


def test_a_state_with_twins_through_another_branch_is_refused():
    states = {}
    for branch in ("adv", "main"):
        with conadv.Team(batch_size=8, chunk_size=2, seed=2**33) as team:
            model = conadv.split_batchnorm(small_cnn())
            method = team.method(conadv.Recycled, model, F.cross_entropy, conadv.PGD(0.1), twin_branch=branch)
            list(team.sampler(range(16)))  # a seed of more than 32 bits is as good as another
            states[branch] = method.state_dict()
            if branch == "main":
                with pytest.raises(ValueError, match="twin_branch adv instead of main"):
                    method.load_state_dict(states["adv"])


def test_a_team_of_one_takes_the_same_steps(tmp_path):
    for name, options in (("ConAdv", {"delay": 2}), ("Recycled", {"twin_share": "1/4"})):
        teams.train(None, name, options, str(tmp_path / "out"))
        assert tiny.distance(alone(name, options), safetensors.torch.load_file(tmp_path / "out")) <= 1e-12


@pytest.mark.parametrize(
    ("name", "options", "size", "layout"),
    [("ConAdv", {"delay": 2}, 3, "clean | adv | attack"), ("Recycled", {}, 2, "clean | adv")],
)
def test_an_epoch_can_be_left_in_its_middle(name, options, size, layout, pool, tmp_path):
    pool.run(size, teams.train, layout, name, options, str(tmp_path / "out"), 0, "", False, 2)
    found = safetensors.torch.load_file(tmp_path / "out")
    assert tiny.distance(teams.alone(name, options, leave=2), found) <= 1e-12


@pytest.mark.parametrize("delay", [1, 2])
def test_a_loop_may_leave_an_update_out(delay, pool, tmp_path):
    """The twins that others sent are then of other weights than one process would take."""
    out, options = tmp_path / "out", {"delay": delay}
    pool.run(3, teams.train, "clean | adv | attack", "ConAdv", options, str(out), 0, "", False, 0, 2)
    found = safetensors.torch.load_file(out)
    assert tiny.distance(teams.alone("ConAdv", options, skip=2), found) <= 1e-12


# method, its options, and (ranks, layout) before and after a stop
MOVES = [
    ("ConAdv", {"delay": 2}, (3, "clean | adv | attack"), (3, "2 clean+adv | attack")),
    ("ConAdv", {}, (2, None), (3, "clean | adv | attack")),
]
TWINS_IN_FLIGHT = [
    ("Recycled", {"twin_share": "1/2"}, (3, "2 clean | adv")),
    ("Recycled", {}, (2, None)),
]


@pytest.mark.parametrize(
    ("name", "options", "before", "after", "stop"),
    [*((*MOVES[0], stop) for stop in (2, 3, 4)), (*MOVES[1], 2)],
)
def test_a_team_resumes_in_any_layout(name, options, before, after, stop, pool, tmp_path):
    saved, out = str(tmp_path / "saved"), str(tmp_path / "out")
    pool.run(before[0], teams.train, before[1], name, options, saved, stop)
    pool.run(after[0], teams.train, after[1], name, options, out, 0, saved)
    assert tiny.distance(alone(name, options), safetensors.torch.load_file(out)) <= 1e-12


@pytest.mark.parametrize(("name", "options", "ranks"), [MOVES[0][:3], *TWINS_IN_FLIGHT])
def test_in_the_same_layout_a_team_resumes_bitwise(name, options, ranks, pool, tmp_path):
    size, layout = ranks
    saved, out = str(tmp_path / "saved"), str(tmp_path / "out")
    whole = pool.run(size, teams.train, layout, name, options, out)
    pool.run(size, teams.train, layout, name, options, saved, 4)
    assert pool.run(size, teams.train, layout, name, options, out, 0, saved) == whole


def test_twins_in_flight_are_refused_in_another_layout(pool, tmp_path):
    saved, out = str(tmp_path / "saved"), str(tmp_path / "out")
    pool.run(2, teams.train, "clean | adv", "Recycled", {}, saved, 4)
    for size, layout in ((2, "clean+adv"), (3, "2 clean | adv")):
        with pytest.raises(AssertionError, match=re.escape(f"layout clean | adv instead of {layout}")):
            pool.run(size, teams.train, layout, "Recycled", {}, out, 0, saved)


def test_a_team_meets_in_a_process_group_that_exists(pool, tmp_path):
    out = str(tmp_path / "out")
    pool.run(2, teams.train, "clean | adv", "Recycled", {}, out, 0, "", True)
    assert tiny.distance(alone("Recycled", {}), safetensors.torch.load_file(out)) <= 1e-12


def test_batches_that_do_not_come_from_the_feed_are_refused(pool):
    for answer in pool.run(2, teams.train_without_feed):
        assert answer == "no epoch has begun: take the batches from `method.feed(loader)`, in each epoch"


def test_a_rank_of_a_team_that_dies_is_named_with_its_signal(start_team):
    run = start_team()
    run.wait_for_step(3)
    run.kill(2, signal.SIGILL)
    assert run.statuses() == [1, 1, -signal.SIGILL]
    (line,) = [line for line in run.said().splitlines() if " died of " in line]
    assert line.startswith("rank 2 (lane 0, attack) died of SIGILL")
    assert "ONEDNN_MAX_CPU_ISA" in line
    assert run.complaints() == ["error: rank 2 (lane 0, attack) stopped answering: the run ends on all 3 ranks"]


def test_an_error_in_the_users_code_ends_the_team_and_keeps_its_traceback(start_team):
    run = start_team(TEAM_FAULT="1")
    assert run.statuses() == [1, 1, 1]
    assert run.complaints() == []
    *_, line, last = run.said().splitlines()
    assert "in train_endlessly" in run.said()
    assert line == "ValueError: this image cannot be read"
    assert last == "on rank 1 (lane 0, adv): the run ends on all 3 ranks"


def test_every_image_of_an_epoch_is_seen_by_one_rank_of_each_role():
    data, seen = range(22), []
    for own in (slice(0, 2), slice(2, 4)):
        sampler = TeamSampler(data, 4, own, seed=1)
        sampler.set_epoch(3)
        seen += [number for batch in sampler for number in batch]
    assert len(seen) == len(set(seen)) == 20


def test_a_sampler_starts_where_it_is_told_to():
    sampler = TeamSampler(range(20), 4, slice(1, 3), seed=0)
    sampler.set_epoch(1)
    whole = list(sampler)
    sampler.set_epoch(1, 2)
    assert list(sampler) == whole[2:]
    assert len(sampler) == 3
    sampler.set_epoch(2)
    assert list(sampler) != whole


class FSDPModule(nn.Linear):
    """A model that exchanges its gradients itself, as a wrapper of this name does."""


def method_of(team: conadv.Team, **options: Any) -> Any:
    model = conadv.split_batchnorm(small_cnn())
    return team.method(conadv.ConAdv, model, F.cross_entropy, conadv.PGD(0.1), **options)


@pytest.mark.parametrize(
    ("misuse", "says"),
    [
        (lambda team: team.sampler(range(3)), "3 images do not fill a batch of 8"),
        (lambda team: list(method_of(team).feed(iter([]))), "a loader with a length"),
        (lambda team: list(method_of(team).feed([(torch.rand(2, 2, 6, 6), torch.zeros(2))])), "batches of 4 chunks"),
        (lambda team: method_of(team).loss((torch.rand(8, 2, 6, 6), torch.zeros(8))), r"call method\(now, ahead\)"),
        (lambda team: method_of(team, twin_share="1/3"), "needs a multiple of 3 chunks per batch, and there are 4"),
        (lambda team: team.method(conadv.Vanilla, FSDPModule(1, 1), F.mse_loss), "without DistributedDataParallel"),
    ],
)  # fmt: skip
def test_misuse_is_refused_in_one_line(misuse, says):
    with pytest.raises(ValueError, match=says) as refusal, conadv.Team(batch_size=8, chunk_size=2) as team:
        misuse(team)
    assert "\n" not in str(refusal.value)


def test_a_team_that_does_not_fit_is_refused_before_it_meets():
    with pytest.raises(ValueError, match="choose a chunk_size that divides"):
        conadv.Team(batch_size=8, chunk_size=3)
    with pytest.raises(ValueError, match=r"start 3, 6, 9, ... ranks"):
        conadv.Team("clean | adv | attack", batch_size=8, chunk_size=2).__enter__()


@pytest.mark.parametrize("steps", [1, 2])
def test_numbers_that_are_not_finite_end_the_team(steps):
    with pytest.raises(FloatingPointError, match=r"step 0: .*loss on .* is not finite"):
        train_from_nan(steps)


def train_from_nan(steps: int) -> None:
    with conadv.Team(batch_size=2, chunk_size=2) as team:
        model = conadv.split_batchnorm(small_cnn())
        nn.init.constant_(model[0].weight, float("nan"))
        method = team.method(conadv.Vanilla, model, F.cross_entropy)
        for now, ahead in method.feed([(torch.rand(2, 2, 6, 6).double(), torch.tensor([0, 1]))] * steps):
            method(now, ahead)
