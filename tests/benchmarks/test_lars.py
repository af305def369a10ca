"""LARS is compared with others on the same gradients. No time is asserted."""

from __future__ import annotations

import sys

import pytest
import torch

import lars
import libraries
from conadv.study.bench.alternate import silent
from conadv.study.bench.workload import Workload

TINY = Workload("resnet8", width=4, chunk_size=6, image_size=8)


def gradients(model: torch.nn.Module) -> list[torch.Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def test_lars_is_compared_with_sgd_and_the_other_library() -> None:
    found = lars.measure(TINY, 2, silent)
    assert [result.name for result in found.results] == ["lars/sgd", "lars/pytorch_optimizer"]
    tensors = len(list(TINY.build().parameters()))
    assert f"{tensors} tensors" in found.notes[0]


def test_resnet50_has_the_tensors_that_the_goal_speaks_of() -> None:
    assert len(list(Workload("resnet50", classes=1000).build().parameters())) == 161


def test_gradients_are_the_same_before_every_update() -> None:
    model = TINY.build()
    restore = lars.restore_gradients(model)
    before = [gradient.clone() for gradient in gradients(model)]
    for gradient in gradients(model):
        gradient.zero_()
    restore()
    assert all(torch.equal(old, new) for old, new in zip(before, gradients(model), strict=True))


def test_rows_that_need_an_absent_library_are_left_out_with_a_note(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "pytorch_optimizer", None)  # as Python marks what cannot be imported
    found = lars.measure(TINY, 1, silent)
    assert [result.name for result in found.results] == ["lars/sgd"]
    assert "pip install pytorch_optimizer" in found.notes[-1]


def test_a_library_that_is_there_but_broken_is_not_absent(tmp_path, monkeypatch) -> None:
    (tmp_path / "half_there.py").write_text("import what_it_needs")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="what_it_needs"):
        libraries.load("half_there")
    assert libraries.load("not_there_at_all") is None
