"""What a rank of a team takes from its loader, and what it saves."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from conadv.core.batch import Batch
from conadv.core.roles import Role
from conadv.ranks.team_epochs import TeamEpochs


def epochs_of(asked: list[bool], size: int = 1, handoff: object = None) -> TeamEpochs:
    """Those of a rank that learns from one chunk of 2 images; `asked`: whether for the state of all ranks."""
    method = SimpleNamespace(step=1, state_dict=lambda all_ranks: asked.append(all_ranks) or {})
    member: Any = SimpleNamespace(
        method=method,
        world=SimpleNamespace(size=size),
        layout=SimpleNamespace(duties=Role.CLEAN),
        place=SimpleNamespace(chunks=1),
        handoff=handoff,
    )
    return TeamEpochs(member, nn.Linear(1, 1), 2, None, lambda batch, first, number: False)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_several_ranks_save_what_all_of_them_have(size: int) -> None:
    asked: list[bool] = []
    position, tensors = epochs_of(asked, size).save()
    assert position["step"] == 1
    assert tensors == {}
    assert asked == [size > 1]


def test_extra_inputs_are_refused_where_twins_travel() -> None:
    batch = Batch(torch.zeros(2, 1, 4, 4), torch.zeros(2), extra={"mask": torch.ones(2)})
    assert epochs_of([])._checked(batch) is batch
    with pytest.raises(ValueError, match="extra inputs do not travel with twins"):
        epochs_of([], handoff=object())._checked(batch)
