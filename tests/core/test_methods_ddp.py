"""The methods on a DistributedDataParallel model: two processes take the step that one takes with both chunks.

Compiled models are in tests/integrations/test_combinations.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from conadv import PGD, plain_state_dict, split_batchnorm
from conadv.roles import Place
from support import loops
from support.ranks import Pool
from support.settings import SETTINGS, Setting, small_batches, small_cnn, train

ATTACK = PGD(8 / 255, 5 / 255, random_start=0.5)
RANKS, IMAGES = 2, 8


class Activated(nn.BatchNorm2d):
    """A kind of BatchNorm with a forward pass of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu()


class Checkpointed(nn.Sequential):
    """All but the first and the last layer run again in the backward pass."""

    def forward(self, x: Tensor) -> Tensor:
        first, *middle, last = self
        outputs: Tensor = last(checkpoint(nn.Sequential(*middle), first(x), use_reentrant=False))
        return outputs


@dataclass(frozen=True)
class Scenario:
    name: str
    chunks: int = 1
    """Of a rank."""
    frozen: bool = False
    broadcast_buffers: bool = True
    kind: type[nn.Sequential] = nn.Sequential
    norm: type[nn.BatchNorm2d] = nn.BatchNorm2d

    def model(self, setting: Setting) -> nn.Sequential:
        # A parameter that no step uses would stop DistributedDataParallel: vanilla needs no adv branch.
        model = self.kind(*small_cnn(norm=self.norm))
        split_batchnorm(model, ("main", "adv") if setting.adversarial else ("main",))
        if self.frozen:
            model[1].eval()
        return model


CHUNKS = Scenario("chunks", chunks=2)
OWN_BUFFERS = Scenario("own buffers", chunks=2, broadcast_buffers=False)
SCENARIOS = (
    Scenario("default"),
    CHUNKS,
    Scenario("frozen", chunks=2, frozen=True),
    OWN_BUFFERS,
    Scenario("own forward pass", chunks=2, norm=Activated),
    Scenario("checkpointing", chunks=2, kind=Checkpointed),
)
# Longer delays differ in which weights attack, which is not the wrapper's business: two scenarios each.
DISTINCT = [setting for setting in SETTINGS if setting.name in ("vanilla", "disadv", "conadv", "recycled", "sam")]
CASES = [
    (setting, scenario) for setting in SETTINGS for scenario in (SCENARIOS if setting in DISTINCT else SCENARIOS[:2])
]

Trained = Callable[[Setting, Scenario], list[dict[str, Tensor]]]


def steps(setting: Setting) -> int:
    """Until twins of stale weights are learnt from; after the first of them the wrapper orders its buckets anew."""
    return max(3, setting.delay + 2)


def learn(model: nn.Module, setting: Setting, chunk_size: int, place: Place, part: slice) -> None:
    method = setting.make(model, ATTACK, adv_weight=0.4, chunk_size=chunk_size, seed=3, place=place)
    batches = [(images[part], labels[part]) for images, labels in small_batches(steps(setting))]
    train(method, model, batches, lr=0.2, momentum=0.9)


# What the ranks do


def in_group(work: Callable[..., Any], *arguments: Any) -> Any:
    """What some work returns on this rank."""
    with loops.process_group():
        return work(*arguments)


def train_as_rank(setting: Setting, scenario: Scenario) -> bytes:
    rank, size = dist.get_rank(), IMAGES // RANKS
    model = scenario.model(setting)
    wrapped = DistributedDataParallel(model, broadcast_buffers=scenario.broadcast_buffers)
    exchanges: list[None] = []
    wrapped.register_comm_hook(exchanges, counted_sum)
    # What is random differs from rank to rank.
    place = Place(first_chunk=rank * scenario.chunks, chunks=scenario.chunks)
    learn(wrapped, setting, size // scenario.chunks, place, slice(rank * size, (rank + 1) * size))
    assert list(plain_state_dict(wrapped)) == list(small_cnn().state_dict())
    assert len(exchanges) == steps(setting), "gradients are exchanged once a step, however many chunks it has"
    return safetensors.torch.save(model.state_dict())


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
    own, plain = (attack(one, F.cross_entropy, images, labels) for one in (wrapped, model))
    untouched = all(torch.equal(one, other) for one, other in zip(before, model.buffers(), strict=True))
    F.cross_entropy(wrapped(images), labels).backward()
    return {"equal": torch.equal(own, plain), "untouched": untouched, "learns": model[0].weight.grad is not None}


def first_twin_as_rank() -> list[float]:
    """Made without a word on which rank this is, of images that both have, with the seed that both have."""
    method = SETTINGS[2].make(DistributedDataParallel(split_batchnorm(small_cnn())), ATTACK, seed=3)
    seen: list[Tensor] = []
    take = method.twins.take
    method.twins.take = lambda *asked: seen.append((twin := take(*asked)).images) or twin
    method(small_batches(1)[0])
    return seen[0].flatten().tolist()


def second_method_as_rank() -> int:
    """The ranks have statistics of their own by then, as after loading a checkpoint of each rank."""
    rank = dist.get_rank()
    wrapped = DistributedDataParallel(split_batchnorm(small_cnn()))
    for images, labels in small_batches(2):
        method = SETTINGS[1].make(wrapped, ATTACK, seed=3)
        method.loss((images[rank::RANKS], labels[rank::RANKS])).backward()
    return method.step


@pytest.fixture(scope="module")
def trained(pool: Pool) -> Trained:
    """The state of each of the two ranks after training, computed once for each case."""

    @cache
    def states(setting: Setting, scenario: Scenario) -> list[dict[str, Tensor]]:
        return [*map(safetensors.torch.load, pool.run(RANKS, in_group, train_as_rank, setting, scenario))]

    return states


@pytest.mark.parametrize(("setting", "scenario"), CASES, ids=lambda value: value.name)
def test_two_ranks_take_the_step_of_one(trained: Trained, setting: Setting, scenario: Scenario) -> None:
    states = trained(setting, scenario)
    alone = scenario.model(setting)
    learn(alone, setting, IMAGES // RANKS // scenario.chunks, Place(chunks=RANKS * scenario.chunks), slice(None))
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
def test_with_broadcast_buffers_the_statistics_are_those_of_rank_0(trained: Trained, setting: Setting) -> None:
    """As with BatchNorm itself: rank 0 overwrites the others, also between the two passes of a step."""
    shared, own = (trained(setting, scenario)[0] for scenario in (CHUNKS, OWN_BUFFERS))
    torch.testing.assert_close(shared, own, rtol=0, atol=1e-12)


def test_an_attack_does_not_meet_the_wrapper(pool: Pool) -> None:
    assert pool.run(RANKS, in_group, attack_as_rank) == [{"equal": True, "untouched": True, "learns": True}] * RANKS


def test_ranks_that_share_a_seed_start_their_attacks_elsewhere(pool: Pool) -> None:
    first, second = pool.run(RANKS, in_group, first_twin_as_rank)
    assert first != second


def test_a_second_method_takes_statistics_that_are_broadcast_for_the_models_own(pool: Pool) -> None:
    """Not for those of a model that writes them by itself, which is refused."""
    assert pool.run(RANKS, in_group, second_method_as_rank) == [1] * RANKS
