"""No pass and no update waits for the device: shown on the meta device, where every value that is read is an error."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from conadv import PGD, split_batchnorm
from conadv.core import learner
from conadv.core.catalog import METHODS
from conadv.core.checks import Checks
from conadv.core.roles import Place
from conadv.core.splitbn import update_running_stats
from conadv.optim.catalog import OPTIMIZERS
from conadv.trainer.ema import Ema
from settings import small_cnn

# What a recipe says of an optimizer, as far as any of them needs it.
FIELDS = {
    "lr": 0.1,
    "momentum": 0.9,
    "weight_decay": 1e-4,
    "trust_coefficient": 0.001,
    "beta1": 0.9,
    "beta2": 0.999,
    "eps": None,
}


class ToHost(TorchDispatchMode):
    """Notes operators that make a tensor on the host of one on the device."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        given = [value.device.type for value in args if isinstance(value, torch.Tensor)]
        if "meta" in given and isinstance(result, torch.Tensor) and result.device.type == "cpu":
            self.found.append(str(function))
        return result


@pytest.fixture(autouse=True)
def _without_first_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first steps look for misuse, and wait for it; here it is as in all later steps."""
    for name in ("look_at_images", "_compare"):
        monkeypatch.setattr(Checks, name, lambda *_: None)
    monkeypatch.setattr(learner, "no_mixed_statistics", nullcontext)


@pytest.mark.parametrize("optimizer_name", OPTIMIZERS)
@pytest.mark.parametrize("name", METHODS)
def test_a_step_waits_for_no_value(name, optimizer_name):
    info = METHODS[name]
    model = split_batchnorm(small_cnn().float(), info.branches).to("meta")
    options = {"attack": PGD(4 / 255), "delay": info.default_delay, "adv_weight": 0.5, "rho": 0.05}
    method = info.build(model, F.cross_entropy, options, seed=0, chunk_size=4, place=Place(updates_stats=False))
    optimizer = OPTIMIZERS[optimizer_name].build(model, FIELDS)
    average = Ema(model, 0.9)
    images, labels = torch.rand(8, 2, 6, 6), torch.zeros(8, dtype=torch.int64)
    with ToHost() as to_host:
        for _ in range(2):
            optimizer.zero_grad()
            method((images, labels))
            update_running_stats(model)
            optimizer.step()
            average.update()
    assert to_host.found == []


def test_a_value_that_is_read_would_be_noticed():
    with ToHost() as to_host, pytest.raises(NotImplementedError, match="meta"):
        torch.zeros(2, device="meta").cpu()
    with pytest.raises(RuntimeError, match="meta"):
        torch.zeros((), device="meta").item()
    assert to_host.found == []
