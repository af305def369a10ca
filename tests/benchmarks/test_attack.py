"""Our attack and foolbox's do the same work. No time is asserted."""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F

import attack
import libraries
from conadv.study.bench.alternate import silent
from conadv.study.bench.workload import Workload

TINY = Workload("resnet8", width=4, chunk_size=6, image_size=8)


def gradients(model: torch.nn.Module) -> list[torch.Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def test_foolbox_and_ours_make_the_same_twins() -> None:
    foolbox = libraries.load("foolbox")
    images, _ = TINY.pixels()
    runs = attack.attacks(foolbox, TINY.build().eval(), TINY.pixels())
    ours = runs["pgd"]()
    assert (ours - images).abs().max() > 0
    torch.testing.assert_close(ours, runs["foolbox-unchecked"]())
    torch.testing.assert_close(ours, runs["foolbox"]()[1])


def test_the_naive_step_learns_from_both() -> None:
    model, (images, labels) = TINY.build(), TINY.pixels()
    attack.naive_step(libraries.load("foolbox"), model, (images, labels))()
    reference = TINY.build()
    twins = attack.attacks(libraries.load("foolbox"), TINY.build().eval(), (images, labels))["pgd"]()
    (0.5 * F.cross_entropy(reference(images), labels) + 0.5 * F.cross_entropy(reference(twins), labels)).backward()
    assert model.training
    for mine, theirs in zip(gradients(model), gradients(reference), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_attack_reports_both_ways_to_call_foolbox_and_the_naive_loop() -> None:
    found = attack.measure(TINY, 2, silent)
    assert [result.name for result in found.results] == ["foolbox-unchecked/pgd", "foolbox/pgd", "naive/disadv"]
    assert str(found.results[0].goal) == "≥ 1.3"


def test_without_foolbox_there_is_nothing_to_compare_with(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "foolbox", None)  # as Python marks what cannot be imported
    found = attack.measure(TINY, 1, silent)
    assert not found.results
    assert "pip install foolbox" in found.notes[-1]
