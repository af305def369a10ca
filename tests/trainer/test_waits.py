"""Nothing in a step waits for the device: shown on the meta device, where every value that is read is an error."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from itertools import chain
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from conadv import PGD, ConAdv, Recycled, Sam, Team, Vanilla, split_batchnorm
from conadv.catalog import METHODS
from conadv.core import step as core_step
from conadv.core.splitbn import update_running_stats
from conadv.core.twins import StaleWeights
from conadv.core.validate import Checks
from conadv.optim import OPTIMIZERS, build_optimizer
from conadv.ranks.member import Member, Outcome
from conadv.roles import Place
from conadv.trainer import loop
from support import fake_ranks
from support.settings import small_cnn

# What a recipe says of an optimizer, as far as any of them needs it.
FIELDS = {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-4}


class Waits(TorchDispatchMode):
    """Notes copies that the host waits for: from the device to the host, and blocking ones to the device."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        given = {value.device.type for value in args if isinstance(value, torch.Tensor)}
        made = {result.device.type} if isinstance(result, torch.Tensor) else set()
        if "meta" in given and made == {"cpu"}:
            self.found.append(str(function))
        if made == {"meta"} and "cpu" in given and function in _COPIES and not _is_async(args, kwargs or {}):
            self.found.append(f"blocking {function}")
        return result


_COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)


def _is_async(args: Any, kwargs: dict[str, Any]) -> bool:
    return bool(kwargs.get("non_blocking") or any(value is True for value in args))


@pytest.fixture(autouse=True)
def _without_first_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first steps look for misuse, and wait for it; here it is as in all later steps."""
    for name in ("look_at_images", "look_at_loss"):
        monkeypatch.setattr(Checks, name, lambda *_: None)
    monkeypatch.setattr(core_step, "no_mixed_statistics", nullcontext)


@pytest.mark.parametrize("optimizer_name", OPTIMIZERS)
@pytest.mark.parametrize("name", METHODS)
def test_a_step_waits_for_no_value(name, optimizer_name):
    info = METHODS[name]
    model = split_batchnorm(small_cnn().float(), info.branches).to("meta")
    options = {"attack": PGD(4 / 255), "delay": info.default_delay, "adv_weight": 0.5, "rho": 0.05}
    method = info.build(model, F.cross_entropy, options, seed=0, chunk_size=4)
    method._step.join(Place(chunks=1))
    optimizer = build_optimizer(model, {"name": optimizer_name, **FIELDS})
    images, labels = torch.rand(8, 2, 6, 6), torch.zeros(8, dtype=torch.int64)
    with Waits() as waits:
        for _ in range(2):
            optimizer.zero_grad()
            method((images, labels))
            update_running_stats(model)
            optimizer.step()
            # Within a dispatch mode, PyTorch does not count the changes of multi-tensor operations.
            torch.autograd.graph.increment_version(model.parameters())
    assert waits.found == []


def test_a_value_that_is_read_would_be_noticed():
    with Waits() as waits, pytest.raises(NotImplementedError, match="meta"):
        torch.zeros(2, device="meta").cpu()
    with pytest.raises(RuntimeError, match="meta"):
        torch.zeros((), device="meta").item()
    assert waits.found == []


STEPS = 4
# Two chunks per step and two steps per epoch: operators of the meta device are slow.
SMALL = {"precision": "float32", "epochs": 2, "batch_size": 8, "data__train_size": 16, "checkpoint__every": 1000}
LATE = ["update", *["read", "update"] * (STEPS - 1), "read"]
WAYS = [{"method": name} for name in METHODS] + [{"method": "conadv", "delay": 3}]
LAYOUTS = [
    ("conadv", "clean | adv | attack", 1),
    ("conadv", "clean | adv | attack", 3),
    ("disadv", "clean | adv+attack", 0),
    ("recycled", "clean | adv", 1),
]


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happens in a run, in order: updates, and the one value that is read."""
    happened: list[str] = []

    def read(outcome: Outcome) -> Outcome:
        assert outcome._numbers.device.type == "meta"
        happened.append("read")
        return outcome  # finite, nothing to stop

    # Within a dispatch mode, PyTorch does not count the changes of multi-tensor operations: weights are not compared.
    monkeypatch.setattr(StaleWeights, "is_newest", lambda _: False)
    update = loop._update
    monkeypatch.setattr(Outcome, "read", read)
    monkeypatch.setattr(loop, "_update", lambda *arguments: (happened.append("update"), update(*arguments)))
    return happened


def run_on_meta(rank: int, size: int, **changes: Any) -> list[str]:
    """Operators of all steps of a run that wait for the device, beside the value that `events` answers for."""
    waits = Waits()

    def watched_run(*arguments: Any) -> int:
        with waits:
            return loop.run(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fake_ranks, "run", watched_run)
        patch.setattr(Member, "check_weights", lambda *_: None)  # before a checkpoint, which waits anyway
        fake_ranks.record_rank(rank, size, {**SMALL, **changes}, "meta")
    return waits.found


@pytest.mark.parametrize("changes", WAYS, ids=str)
def test_a_run_reads_one_value_per_step_one_step_late(changes, events):
    assert run_on_meta(0, 1, **changes) == []
    assert events == LATE


@pytest.mark.parametrize(("method", "layout", "delay"), LAYOUTS)
def test_so_does_every_role(method, layout, delay, events):
    size = len(layout.split("|"))
    learning = [rank for rank, role in enumerate(layout.split("|")) if role.strip() != "attack"]
    for rank in learning:  # one that only attacks waits for weights, before it does anything
        events.clear()
        assert run_on_meta(rank, size, method=method, layout=layout, delay=delay) == []
        assert events == LATE


@pytest.mark.parametrize(
    ("factory", "words"), [(Vanilla, []), (Sam, []), (Recycled, [PGD(4 / 255)]), (ConAdv, [PGD(4 / 255)])]
)
def test_so_does_a_team(factory, words, events):
    batches = [(torch.rand(8, 2, 6, 6), torch.zeros(8, dtype=torch.int64))] * (STEPS // 2)
    model = split_batchnorm(small_cnn().float()).to("meta")
    waits = Waits()
    with Team(batch_size=8, chunk_size=4) as team:
        team.world = replace(team.world, device=torch.device("meta"))
        method = team.method(factory, model, F.cross_entropy, *words)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        with waits:
            for now, ahead in chain(method.feed(batches), method.feed(batches)):
                optimizer.zero_grad()
                method(now, ahead)
                optimizer.step()
                torch.autograd.graph.increment_version(model.parameters())
                events.append("update")
            method.close()
    assert waits.found == []
    assert events == LATE


def test_before_a_checkpoint_the_step_is_read(events):
    run_on_meta(0, 1, method="vanilla", checkpoint__every=2)
    assert events == ["update", "read", "update", "read"] * 2
