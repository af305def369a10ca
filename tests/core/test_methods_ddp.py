"""The methods on a DistributedDataParallel model: two processes take the step that one takes with both chunks.

Run as a script this file is one of the two processes: it trains with every method and writes down what came of it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from conadv import PGD, Place, plain_state_dict, route, split_batchnorm
from settings import SETTINGS, Setting, small_batches, small_cnn

ATTACK = PGD(8 / 255, 5 / 255, random_start=0.5)
RANKS = 2


class Activated(nn.BatchNorm2d):
    """A kind of BatchNorm with a forward pass of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu()


class Checkpointed(nn.Sequential):
    """All but the first and the last layer run again in the backward pass."""

    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        first, *middle, last = self
        outputs: Tensor = last(checkpoint(nn.Sequential(*middle), first(x), use_reentrant=self.reentrant))
        return outputs


class Reentrant(Checkpointed):
    reentrant = True


@dataclass(frozen=True)
class Scenario:
    name: str
    chunks: int = 1
    """Of a rank."""
    frozen: bool = False
    broadcast_buffers: bool = True
    static_graph: bool = False
    kind: type[nn.Sequential] = nn.Sequential
    norm: type[nn.BatchNorm2d] = nn.BatchNorm2d
    compiled: Literal["inside", "outside"] | None = None
    together: bool = False
    """Whether the ranks learn from images and twins in one pass; the one process never does."""

    def model(self, setting: Setting) -> nn.Sequential:
        # A parameter that no step uses would stop DistributedDataParallel: vanilla needs no adv branch.
        model = self.kind(*small_cnn(norm=self.norm))
        split_batchnorm(model, ("main", "adv") if setting.adversarial else ("main",))
        if self.frozen:
            model[1].eval()
        return model

    def wrap(self, model: nn.Module) -> tuple[DistributedDataParallel, nn.Module]:
        """The wrapper that exchanges gradients, and the outermost one."""
        inner = torch.compile(model, backend="aot_eager") if self.compiled == "inside" else model
        wrapper = DistributedDataParallel(
            inner,
            broadcast_buffers=self.broadcast_buffers,
            static_graph=self.static_graph,  # type: ignore[arg-type]
        )
        outer = torch.compile(wrapper, backend="aot_eager") if self.compiled == "outside" else wrapper
        return wrapper, outer  # type: ignore[return-value]


SCENARIOS = (
    Scenario("default"),
    Scenario("chunks", chunks=2),
    Scenario("frozen", chunks=2, frozen=True),
    Scenario("own buffers", chunks=2, broadcast_buffers=False),
    Scenario("static graph", static_graph=True),
    Scenario("own forward pass", chunks=2, norm=Activated),
    Scenario("checkpointing", chunks=2, kind=Checkpointed),
    Scenario("reentrant", chunks=2, kind=Reentrant, norm=Activated),
)
TOGETHER = (
    Scenario("together", chunks=2, together=True),
    Scenario("together in a static graph", static_graph=True, together=True),
    Scenario("together with checkpointing", chunks=2, kind=Checkpointed, together=True),
)
COMPILED = (Scenario("compiled inside", compiled="inside"), Scenario("compiled outside", compiled="outside"))
# Longer delays and the queue differ in which weights attack, which is not the wrapper's business: two scenarios each.
DISTINCT = [setting for setting in SETTINGS if setting.name in ("vanilla", "disadv", "conadv", "recycled", "sam")]
CASES = [
    (setting, scenario)
    for setting in SETTINGS
    for scenario in (SCENARIOS if setting in DISTINCT else SCENARIOS[:2])
    if not (setting.method == "sam" and scenario.kind is Reentrant)  # which PyTorch refuses
]
CASES += [(setting, scenario) for setting in SETTINGS[1:2] for scenario in COMPILED]
CASES += [(setting, scenario) for setting in DISTINCT if setting.adversarial for scenario in TOGETHER]


def train(
    model: nn.Module, setting: Setting, chunk_size: int, place: Place, part: slice, together: bool = False
) -> None:
    common = {"chunk_size": chunk_size, "seed": 3, "place": place, "together": together}
    method = setting.make(model, ATTACK, adv_weight=0.4, **common)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    for now, ahead in method.feed([(images[part], labels[part]) for images, labels in small_batches(5)]):
        optimizer.zero_grad()
        method(now, ahead)
        optimizer.step()


def train_as_rank(rank: int, setting: Setting, scenario: Scenario) -> dict[str, Tensor]:
    model = scenario.model(setting)
    wrapper, wrapped = scenario.wrap(model)
    exchanges: list[None] = []
    wrapper.register_comm_hook(exchanges, counted_sum)
    size = 8 // RANKS
    place = Place(first_chunk=rank * scenario.chunks)  # what is random differs from rank to rank
    part = slice(rank * size, (rank + 1) * size)
    train(wrapped, setting, size // scenario.chunks, place, part, scenario.together)
    assert list(plain_state_dict(wrapped)) == list(small_cnn().state_dict())
    assert len(exchanges) == 5, "gradients are exchanged once a step, however many chunks it has"
    return model.state_dict()


def counted_sum(exchanges, bucket):  # type: ignore[no-untyped-def]  # PyTorch refuses annotations that are strings
    exchanges.append(None)
    return default_hooks.allreduce_hook(None, bucket)


def attack_as_rank() -> dict[str, bool]:
    """An attack on a wrapped model exchanges nothing, and does not disturb the exchange of the next step."""
    model = split_batchnorm(small_cnn(), ("main",))
    wrapped = DistributedDataParallel(model)
    images, labels = small_batches(1)[0]
    before = [buffer.clone() for buffer in model.buffers()]
    attack = PGD(8 / 255, random_start=0, branch="main")
    equal = torch.equal(
        attack(wrapped, F.cross_entropy, images, labels), attack(model, F.cross_entropy, images, labels)
    )
    untouched = all(torch.equal(one, other) for one, other in zip(before, model.buffers(), strict=True))
    F.cross_entropy(wrapped(images), labels).backward()
    return {"equal": equal, "untouched": untouched, "learns": model[0].weight.grad is not None}


def first_twin_as_rank() -> Tensor:
    """Made without a word on which rank this is, of images that both have, with the seed that both have."""
    method = replace(SETTINGS[2], queued=True).make(
        DistributedDataParallel(split_batchnorm(small_cnn())), ATTACK, seed=3
    )
    next(iter(method.feed(small_batches(3))))
    return method.handoff.take().images


def mistakes_as_rank() -> list[str]:
    """What is said to someone who wraps too early, with an option that cannot work, or evaluates the wrong branch."""
    messages = []
    evaluated = DistributedDataParallel(split_batchnorm(small_cnn()))
    evaluated.module.eval()
    try:
        with route(evaluated, "adv"):
            messages.append("evaluated")
    except ValueError as error:
        messages.append(str(error))
    for split_first in (False, True):
        try:
            model = split_batchnorm(small_cnn()) if split_first else small_cnn()
            wrapped = DistributedDataParallel(model, find_unused_parameters=True)
            SETTINGS[1].make(wrapped if split_first else split_batchnorm(wrapped))
        except ValueError as error:
            messages.append(str(error))
    return messages


def recompute_in_a_static_graph() -> str:
    """All parts are learnt from in one backward pass there, which cannot tell which branch to compute again."""
    scenario = Scenario("", kind=Checkpointed, static_graph=True)
    try:
        train(scenario.wrap(scenario.model(SETTINGS[1]))[1], SETTINGS[1], 4, Place(), slice(None))
    except RuntimeError as error:
        return str(error)
    return "trained"


def second_method_as_rank(rank: int) -> int:
    """The ranks have statistics of their own by then, as after loading a checkpoint of each rank."""
    wrapped = DistributedDataParallel(split_batchnorm(small_cnn()))
    for images, labels in small_batches(2):
        method = SETTINGS[1].make(wrapped, ATTACK, seed=3)
        method.loss((images[rank::RANKS], labels[rank::RANKS])).backward()
    return method.step


def run_as_rank(rank: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    try:
        results: dict[str, Any] = {f"{s.name}/{c.name}": train_as_rank(rank, s, c) for s, c in CASES}
        results |= {"attack": attack_as_rank(), "twin": first_twin_as_rank(), "mistakes": mistakes_as_rank()}
        results |= {"static": recompute_in_a_static_graph(), "second method": second_method_as_rank(rank)}
        torch.save(results, folder / f"{rank}.pt")
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of the two processes has to say, about every case."""
    folder = tmp_path_factory.mktemp("ranks")
    paths = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    logs = [folder / f"{rank}.log" for rank in range(RANKS)]
    processes = []
    for rank, log in enumerate(logs):
        with log.open("w") as file:
            command = [sys.executable, __file__, str(rank), str(folder)]
            processes.append(subprocess.Popen(command, env=environment, stderr=file))
    try:
        for process, log in zip(processes, logs, strict=True):
            assert process.wait(timeout=240) == 0, log.read_text()
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [torch.load(folder / f"{rank}.pt") for rank in range(RANKS)]


@pytest.mark.parametrize(("setting", "scenario"), CASES, ids=lambda value: value.name)
def test_two_ranks_take_the_step_of_one(ranks: list[dict[str, Any]], setting: Setting, scenario: Scenario) -> None:
    states = [rank[f"{setting.name}/{scenario.name}"] for rank in ranks]
    alone = scenario.model(setting)
    train(alone, setting, 8 // RANKS // scenario.chunks, Place(), slice(None))
    for key, expected in alone.state_dict().items():
        if "running" in key:
            if not scenario.broadcast_buffers:  # the mean of the moving averages is the moving average of the means
                mean = (states[0][key] + states[1][key]) / 2
                torch.testing.assert_close(mean, expected, rtol=0, atol=1e-12)
        elif "num_batches" in key:
            assert torch.equal(states[0][key], expected)
        else:
            torch.testing.assert_close(states[0][key], expected, rtol=0, atol=1e-12)
            assert torch.equal(states[0][key], states[1][key])


@pytest.mark.parametrize("setting", DISTINCT, ids=lambda setting: setting.name)
def test_with_broadcast_buffers_the_statistics_are_those_of_rank_0(
    ranks: list[dict[str, Any]], setting: Setting
) -> None:
    """As with BatchNorm itself: rank 0 overwrites the others, also between the two passes of a step."""
    shared, own = ranks[0][f"{setting.name}/chunks"], ranks[0][f"{setting.name}/own buffers"]
    for key, value in own.items():
        torch.testing.assert_close(shared[key], value, rtol=0, atol=1e-12)


def test_an_attack_does_not_meet_the_wrapper(ranks: list[dict[str, Any]]) -> None:
    assert [rank["attack"] for rank in ranks] == [{"equal": True, "untouched": True, "learns": True}] * RANKS


def test_ranks_that_share_a_seed_start_their_attacks_elsewhere(ranks: list[dict[str, Any]]) -> None:
    first, second = (rank["twin"] for rank in ranks)
    assert not torch.equal(first, second)


def test_mistakes_are_refused(ranks: list[dict[str, Any]]) -> None:
    untrained, early, unused = ranks[0]["mistakes"]
    assert "never trained" in untrained
    assert "split the model, then wrap it" in early
    assert "find_unused_parameters=False" in unused


def test_checkpointing_in_a_static_graph_is_refused(ranks: list[dict[str, Any]]) -> None:
    assert "needs DistributedDataParallel without static_graph" in ranks[0]["static"]


def test_a_second_method_takes_statistics_that_are_broadcast_for_the_models_own(ranks: list[dict[str, Any]]) -> None:
    """Not for those of a model that writes them by itself, which is refused."""
    assert [rank["second method"] for rank in ranks] == [1] * RANKS


if __name__ == "__main__":
    run_as_rank(int(sys.argv[1]), Path(sys.argv[2]))
