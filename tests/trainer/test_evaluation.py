"""What an evaluation takes: a fixed sample of the training images, shared by all ranks, in training's precision."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from conadv.ranks.world import World
from conadv.task.augment import augmentation
from conadv.task.data import Arrays, DataSet, Source
from conadv.task.evaluate import RobustTest, robust_attack
from conadv.trainer import evaluation
from conadv.trainer.build import Task, build_task, twins_of
from conadv.trainer.evaluation import evaluate_source, evaluate_task
from support import tiny

CPU = torch.device("cpu")


def task_of(**changes: Any) -> Task:
    """1,400 of the digits are for training, 397 for the test."""
    return build_task(tiny.recipe(method="vanilla", data__train_size=1400, **changes), CPU)


@pytest.fixture
def looked_at(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The images that each evaluation takes."""
    taken: list[list[int]] = []
    batches = evaluation.evaluation_batches

    def noted(source: Any, size: int, fit: Any, workers: int, part: list[int], *more: Any) -> Any:
        taken.append(part)
        return batches(source, size, fit, workers, part, *more)

    monkeypatch.setattr(evaluation, "evaluation_batches", noted)
    return taken


def test_a_sample_is_as_large_as_the_test_set_always_the_same_and_its_accuracy_that_of_its_images(looked_at):
    task = task_of()
    assert len(task.data.test) < len(task.data.train)
    for _ in range(2):
        found = evaluate_source(task, World(0, 1, CPU), task.data.train, sample=len(task.data.test))
    first, second = looked_at
    assert first == second == sorted(set(first))
    assert len(first) == len(task.data.test)
    # Spread over the data, which is ordered by class in many data sets.
    assert len({index * 10 // len(task.data.train) for index in first}) == 10
    fit = augmentation("none", None).fit
    chosen = evaluation.evaluation_batches(task.data.train, 64, fit, 0, first)
    with torch.no_grad():
        task.model.eval()
        right = [task.model(images.to(torch.float64) / 255).argmax(1) == labels for images, labels in chosen]
    assert found.top1 == pytest.approx(100 * torch.cat(right).double().mean().item(), abs=1e-9)


def test_ranks_share_the_sample(looked_at, monkeypatch):
    task = task_of()
    monkeypatch.setattr(World, "all_reduce", lambda _, tensor: tensor.clamp(min=1))
    for rank in range(3):
        evaluate_source(task, World(rank, 3, CPU), task.data.train, sample=len(task.data.test))
    monkeypatch.undo()
    whole = evaluation.sampled(len(task.data.train), len(task.data.test)).tolist()
    assert [index for part in looked_at for index in part] == whole


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float64"])
def test_it_computes_in_the_precision_of_training(precision):
    task = task_of(precision=precision)
    seen: set[torch.dtype] = set()
    task.model[0].register_forward_hook(lambda _, images, outputs: seen.add(outputs.dtype))
    evaluate_source(task, World(0, 1, CPU), task.data.test)
    assert seen == {getattr(torch, precision)}


@pytest.mark.parametrize(("steps", "path"), [(1, 1.0), (2, 2.5), (10, 2.5)])
def test_the_steps_of_an_attack_cross_the_ball_or_reach_its_edge(steps, path):
    attack = robust_attack(8 / 255, steps, "adv")
    assert attack.steps * attack.step_size == pytest.approx(path * attack.epsilon)
    assert (attack.random_start, attack.branch, attack.statistics) == (1.0, "adv", "running")


@pytest.mark.parametrize(
    ("method", "twins"), [("vanilla", False), ("sam", False), ("conadv", True), ("recycled", True)]
)
@pytest.mark.parametrize("robust", [None, RobustTest(8 / 255, steps=1)], ids=["plain", "robust"])
def test_accuracy_under_attack_is_told_where_it_was_measured(method, twins, robust):
    task = build_task(tiny.recipe(method=method), CPU)
    metrics = evaluate_task(task, World(0, 1, CPU), robust)
    assert ("adv_top1" in metrics, "robust_top1" in metrics) == (twins, robust is not None)


def test_twins_are_attacked_in_mixed_chunks_where_images_are_sorted_by_class(looked_at):
    task = build_task(tiny.recipe(method="conadv"), CPU)
    order = np.argsort(task.data.train.labels, kind="stable")
    task = replace(task, data=replace(task.data, train=task.data.train.take(order.tolist())))
    evaluation.twin_top1(task, World(0, 1, CPU), task.twins)
    (taken,) = looked_at
    chunk = task.data.train.labels[taken[: task.twins.chunk_size]]
    assert len(set(chunk)) > 3  # sorted: all of one class, or two
    assert len(set(taken)) == len(taken)


def test_twins_of_recycled_are_attacked_as_its_clean_pass_does():
    found = twins_of(tiny.recipe(method="recycled", attack__random_start=0.8))
    assert (found.attack.branch, found.attack.random_start, found.branch) == ("main", 0.0, "adv")
    found = twins_of(tiny.recipe(method="conadv", attack__random_start=0.8, attack__statistics="running"))
    assert (found.attack.branch, found.attack.random_start, found.attack.statistics) == ("adv", 0.8, "running")


def test_robust_accuracy_does_not_depend_on_the_number_of_ranks(monkeypatch):
    task = task_of(data__held_out=600)
    counts = []
    monkeypatch.setattr(World, "all_reduce", lambda _, tensor: counts.append(tensor) or tensor.clamp(min=1))
    # A radius and a weak attack for which an image falls or not by its random start.
    test = RobustTest(24 / 255, steps=1, restarts=1)
    for world in [World(0, 1, CPU), *(World(rank, 2, CPU) for rank in range(2))]:
        evaluation.robust_top1(task, world, task.held_out, test)
    assert (counts[1] + counts[2]).tolist() == counts[0].tolist()
    assert counts[0][1] == 600
    assert 0 < counts[1][1] < 600


def test_ranks_share_the_chunks_of_twins_and_their_counts_add_up(looked_at, monkeypatch):
    task = build_task(tiny.recipe(method="conadv", data__train_size=1400, batch_size=40, chunk_size=40), CPU)
    sums = []
    monkeypatch.setattr(World, "all_reduce", lambda _, tensor: sums.append(tensor) or tensor.clamp(min=1))
    for world in [World(0, 1, CPU), *(World(rank, 3, CPU) for rank in range(3))]:
        evaluation.twin_top1(task, world, task.twins)
    whole, *parts = looked_at
    assert [index for part in parts for index in part] == whole
    assert len(set(whole)) == 1000
    assert sum(part[1] for part in sums[1:]) == sums[0][1] == 1000
    assert all(len(part) % 40 == 0 for part in parts)


@pytest.mark.parametrize(("classes", "expected"), [(5, False), (6, True)])
def test_top5_is_measured_with_more_than_5_classes(classes, expected):
    few = [Source(Arrays(np.zeros((60, 8, 8, 1), np.uint8)), np.arange(60) % classes, tuple("abcdef"[:classes]))] * 2
    data = DataSet(*few, "few classes")
    task = build_task(tiny.recipe(), torch.device("cpu"), data=data)
    metrics = evaluate_task(task, World(0, 1, torch.device("cpu")))
    assert ("test_top5" in metrics) == expected
