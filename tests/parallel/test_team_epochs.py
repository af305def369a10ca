"""What a rank of a team takes from its loader, and what it saves."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from conadv.core.batch import Batch
from conadv.parallel.team_epochs import TeamEpochs


@pytest.mark.parametrize("size", [1, 2, 3])
def test_several_ranks_save_what_all_of_them_have(size: int) -> None:
    asked: list[bool] = []
    method = SimpleNamespace(state_dict=lambda all_ranks: asked.append(all_ranks) or {})
    member = SimpleNamespace(method=method, world=SimpleNamespace(size=size))
    state = {"_step": 1, "_begin": 0, "_end": 2, "_is_attacked": False, "_is_recycled": False}
    epochs: Any = SimpleNamespace(_member=member, **state)
    assert TeamEpochs.save(epochs) == ({"step": 1, "done": 1, "open": True}, {})
    assert asked == [size > 1]


def test_extra_inputs_are_refused_where_twins_travel() -> None:
    batch = Batch(torch.zeros(2, 1, 4, 4), torch.zeros(2), extra={"mask": torch.ones(2)})
    member = SimpleNamespace(place=SimpleNamespace(chunks=1), handoff=None)
    epochs: Any = SimpleNamespace(_as_batch=None, _chunk_size=2, _member=member)
    assert TeamEpochs._checked(epochs, batch) is batch
    member.handoff = object()
    with pytest.raises(ValueError, match="extra inputs do not travel with twins"):
        TeamEpochs._checked(epochs, batch)
