"""Every method on a DistributedDataParallel model, for tests/core/test_methods_ddp.py: what its two ranks do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import safetensors.torch
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from conadv import PGD, plain_state_dict, route, split_batchnorm
from conadv.core.splitbn import update_running_stats
from conadv.roles import Place
from support import loops
from support.settings import SETTINGS, Setting, small_batches, small_cnn

ATTACK = PGD(8 / 255, 5 / 255, random_start=0.5)
RANKS = 2


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
    compiled: Literal["inside", "outside"] | None = None

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
        wrapper = DistributedDataParallel(inner, broadcast_buffers=self.broadcast_buffers)  # type: ignore[arg-type]
        outer = torch.compile(wrapper, backend="aot_eager") if self.compiled == "outside" else wrapper
        return wrapper, outer  # type: ignore[return-value]


def steps(setting: Setting) -> int:
    """Until twins of stale weights are learnt from; after the first of them the wrapper orders its buckets anew."""
    return max(3, setting.delay + 2)


def train(model: nn.Module, setting: Setting, chunk_size: int, place: Place, part: slice) -> None:
    method = setting.make(model, ATTACK, adv_weight=0.4, chunk_size=chunk_size, seed=3, place=place)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    for now, ahead in method.feed([(images[part], labels[part]) for images, labels in small_batches(steps(setting))]):
        optimizer.zero_grad()
        method(now, ahead)
        update_running_stats(model)
        optimizer.step()


def in_group(work: Callable[..., Any], *arguments: Any) -> Any:
    """What some work returns on this rank."""
    with loops.process_group():
        return work(*arguments)


def train_as_rank(setting: Setting, scenario: Scenario) -> bytes:
    rank = dist.get_rank()
    model = scenario.model(setting)
    wrapper, wrapped = scenario.wrap(model)
    exchanges: list[None] = []
    wrapper.register_comm_hook(exchanges, counted_sum)
    size = 8 // RANKS
    # What is random differs from rank to rank.
    place = Place(first_chunk=rank * scenario.chunks, chunks=scenario.chunks)
    part = slice(rank * size, (rank + 1) * size)
    train(wrapped, setting, size // scenario.chunks, place, part)
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
    equal = torch.equal(
        attack(wrapped, F.cross_entropy, images, labels), attack(model, F.cross_entropy, images, labels)
    )
    untouched = all(torch.equal(one, other) for one, other in zip(before, model.buffers(), strict=True))
    F.cross_entropy(wrapped(images), labels).backward()
    return {"equal": equal, "untouched": untouched, "learns": model[0].weight.grad is not None}


def first_twin_as_rank() -> list[float]:
    """Made without a word on which rank this is, of images that both have, with the seed that both have."""
    method = SETTINGS[2].make(DistributedDataParallel(split_batchnorm(small_cnn())), ATTACK, seed=3)
    seen: list[Tensor] = []
    take = method.twins.take  # type: ignore[union-attr]
    method.twins.take = lambda *asked: seen.append((twin := take(*asked)).images) or twin  # type: ignore
    method(small_batches(1)[0])
    return seen[0].flatten().tolist()


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
    try:
        SETTINGS[1].make(DistributedDataParallel(split_batchnorm(small_cnn()), static_graph=True))(small_batches(1)[0])
    except ValueError as error:
        messages.append(str(error))
    return messages


def second_method_as_rank() -> int:
    """The ranks have statistics of their own by then, as after loading a checkpoint of each rank."""
    rank = dist.get_rank()
    wrapped = DistributedDataParallel(split_batchnorm(small_cnn()))
    for images, labels in small_batches(2):
        method = SETTINGS[1].make(wrapped, ATTACK, seed=3)
        method.loss((images[rank::RANKS], labels[rank::RANKS])).backward()
    return method.step
