"""One rank of a layout: its method and its communication. `conadv train` and `conadv.Team` are built on it."""

from __future__ import annotations

import math
import signal
import warnings
from collections.abc import Callable, Generator, Iterable
from itertools import chain, islice, repeat
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from conadv.core.algorithm import ConAdv, Recycled
from conadv.core.batch import Chunked
from conadv.core.splitbn import pending_statistics
from conadv.core.step import Losses, Method
from conadv.core.twins import Local, StaleWeights, Twins
from conadv.roles import Role
from conadv.wrappers import innermost, span, touched

from .layout import Layout
from .mail import Mail, Passed, Post, Wire
from .pool import Pool
from .world import World

# The signals that ask a rank to stop, in the order of the numbers that count them.
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
# Before the statistics: requests to stop by signal, losses, on how many ranks something is not finite, and the sum of
# their numbers, counted from 1.
_STOPS, _LOSSES, _BAD, _HEAD = slice(0, 2), slice(2, 4), slice(4, 6), 6
_COMPARED = 100  # steps between two comparisons of the weights of the ranks; the trainer also compares before it saves


class StepError(FloatingPointError):
    """After a step a number is not finite, or ranks have different weights; all learning ranks raise it together."""


class Outcome:
    """The outcome of a step, the same on all ranks that learn; a rank that only attacks knows no losses.

    Args:
        numbers: the head of the short all_reduce, which may still be on the device.
        step: its number, for messages.
        layout: the roles of the ranks, for messages.
    """

    clean_loss = adv_loss = 0.0
    """The mean losses over the whole batch, after `read`."""
    signal = 0
    """The signal that asked some rank to stop, after `read`; 0: none."""

    def __init__(self, numbers: Tensor, step: int, layout: Layout) -> None:
        self.losses = Losses(*numbers[_LOSSES])
        """The mean losses over the whole batch, on the device."""
        self._step, self._layout = step, layout
        self._copied: torch.cuda.Event | None = None
        if numbers.is_cuda:
            numbers = torch.empty_like(numbers, device="cpu", pin_memory=True).copy_(numbers, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()
        self._numbers = numbers

    def read(self) -> Self:
        """Wait for the numbers; raise a StepError if something is not finite."""
        if self._copied is not None:
            self._copied.synchronize()
        numbers = self._numbers.tolist()
        self.clean_loss, self.adv_loss = numbers[_LOSSES]
        count, ranks = map(int, numbers[_BAD])
        if count:
            culprit = "loss" if not math.isfinite(sum(numbers[_LOSSES])) else "gradient, or a statistic of BatchNorm,"
            raise StepError(f"step {self._step}: the {culprit} on {_name(self._layout, count, ranks)} is not finite")
        self.signal = max(number * bool(count) for number, count in zip(_SIGNALS, numbers[_STOPS], strict=True))
        return self


class _Objective(nn.Module):
    """What DistributedDataParallel wraps: the weights, with any computation of a loss as the forward pass.

    So the loss is the output whose graph it searches for weights that were not used, and only the last pass of a step
    goes through it.

    Args:
        model: the network.
        idle: weights that this rank never reaches. They get gradients of zero, since DistributedDataParallel would
            wait for the device to learn whether another rank has used a weight.
    """

    def __init__(self, model: nn.Module, idle: list[nn.Parameter]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(model.parameters())
        self._idle = idle

    def forward(self, compute: Callable[[], Tensor]) -> Tensor:
        return touched(compute(), self._idle, zeros=True)


class Member:
    """One rank of a layout. Every rank must make one, since it creates process groups.

    Args:
        method: of this rank; it learns what its place says.
        chunks: how many chunks a global batch has.
        wire: the message format of twins; None: `post.wire` is set before the first step.
    """

    def __init__(
        self,
        world: World,
        layout: Layout,
        model: nn.Module,
        method: Method,
        *,
        chunks: int,
        wire: Wire | None = None,
    ) -> None:
        check_statistics(model, layout)
        self.world, self.layout, self.method = world, layout, method
        self.place = layout.place(world.rank, chunks)
        self._model = innermost(model)
        self._step = method._step
        self._step.join(self.place)
        self.post = Post(layout, world, self.place, self._model, method.delay, wire)
        self._statistics = pending_statistics(model)
        self._own_totals: list[Tensor] = []  # of the gradients of this rank, by bucket
        self._learners: dist.ProcessGroup | None = None
        if world.size > 1:
            self._average_gradients()
        self._route_twins()
        twins = method.twins.local if isinstance(method.twins, Pool) else method.twins
        self._local = twins if isinstance(twins, Local) else None
        self.stale: StaleWeights
        """The weights of the last `delay` steps; on ranks that do not need them perhaps none."""
        if self._local is not None:
            self.stale = self._local.stale
        else:
            self.stale = StaleWeights(self._model, method.delay if world.is_main else 0)

    @property
    def only_attacks(self) -> bool:
        return self.place.role == Role.ATTACK

    def feed(self, batches: Iterable[Any], end: int) -> Generator[tuple[Any, Any]]:
        """The arguments of `step`, for the batches of this rank from now on to the one before `end`."""
        twins = self.method.twins
        if self.only_attacks:
            self.post.twins.drain()
            ahead = chain(islice(batches, self.method.delay, None), repeat(None))
            yield from ((None, batch) for batch in islice(ahead, end - self.method.step))
        elif isinstance(twins, Pool):  # reads the chunks of a batch before its step, too
            yield from self.method.feed(Chunked(batch.count, list(batch.chunks)) for batch in batches)
        else:
            if isinstance(twins, Mail):
                twins.open(end)
            yield from ((batch, None) for batch in batches)

    def step(self, now: Any, ahead: Any, stop: int = 0) -> Outcome:
        """Take a step up to the update: afterwards gradients and pending statistics are those of all ranks.

        Args:
            now: the batch to learn from, as `feed` yields it.
            ahead: the batch to attack, on a rank that only attacks.
            stop: the number of the signal that asked this rank to stop; 0: none. Learning ranks decide: a launcher
                sends signals to all of them.
        """
        if self.only_attacks:
            return self._attack(ahead)
        step = self._step.t
        if step and step % _COMPARED == 0:
            self.check_weights(step)
        self.post.send_weights(step)
        losses = self.method(now, ahead)
        with span("gradient sum"):
            outcome = self._agree(losses, stop)
        if self._local is None:  # which keeps them itself
            self.stale.keep()
        return outcome

    def resume(self, step: int, versions: list[dict[str, Tensor]]) -> None:
        """Continue at `step`, with the weights of the last steps."""
        self._step.t = step
        if self._local is not None:
            self._local.resume(versions, updated=True)
        elif self.stale.versions:
            self.stale.load(versions)

    def prime(self, batch: Any, t: int) -> None:
        """Evaluate again the twins that step t left behind, with the weights that the model has now."""
        method, step = self.method, self._step
        if not isinstance(method, Recycled):
            raise TypeError(f"{type(method).__name__} cannot be resumed: say here what its steps leave behind")
        if Role.ADV in self.place.role:
            chunks = enumerate(step.chunks(step.batch(batch)))
            twins = [method.twin(t, k, chunk) for k, chunk in chunks if step.has_twin(t, k)]
            method.twins.adopt(map(self.post.format.received, twins) if self.layout.hands_over else twins)

    def check_weights(self, step: int) -> None:
        """Raise a StepError on all learning ranks if their weights differ in any bit."""
        if self.world.size == 1 or self.only_attacks:
            return
        own = checksum(list(self._model.parameters()))
        of_main = own.clone()
        dist.broadcast(of_main, self.world.main, self._learners)
        differs = (own != of_main).long()
        count, ranks = self.world.all_reduce(differs * differs.new_tensor([1, self.world.rank + 1]), self._learners)
        if count:
            raise StepError(
                f"step {step}: the weights on {_name(self.layout, int(count), int(ranks))} differ from those on "
                f"{self.layout.describe(self.world.main)} (faulty memory, or machines that compute differently): "
                "resume on other machines"
            )

    def share_weights(self) -> None:
        """Give ranks that only attack the current weights; every rank must call it."""
        if Role.ATTACK in self.layout.roles:
            self.world.broadcast_tensors([*self._model.parameters(), *self._model.buffers()])

    def drain(self, signal_number: int = 0) -> None:
        """Wait for every message in flight; all ranks must have taken the same number of steps.

        Args:
            signal_number: why the run stops before its last step; ranks that only attack are told. 0: it does not.
        """
        if signal_number:
            self.post.send_weights(self._step.t, signal_number)
        self.post.drain()

    def _average_gradients(self) -> None:
        """Let DistributedDataParallel average the gradients of the learning ranks."""
        learners = self.layout.learners()
        self._learners = self.world.new_group(learners)
        if self.only_attacks or len(learners) == 1:
            return
        # It finds weights that this rank does not reach, and keeps the order of its buckets, so that a resumed run adds
        # up in the same order. It warns in a step that reaches all of them, and of weights that sam has moved.
        for warning in ("find_unused_parameters=True was specified", "Grad strides do not match"):
            warnings.filterwarnings("ignore", warning)
        role, twins = self.place.role, self._step.twin_branch
        reached = ["main", "aug"] * (Role.CLEAN in role) + [twins or "main"] * (Role.ADV in role)
        parallel = DistributedDataParallel(
            _Objective(self._model, self._step._unreached(reached)),
            process_group=self._learners,
            find_unused_parameters=True,
            init_sync=False,  # all ranks have the weights of one already
        )
        parallel.register_comm_hook((self._own_totals, self._learners), _average)
        self._step.averaging = parallel

    def _route_twins(self) -> None:
        """Take twins from other ranks, or send them there; ranks without twins keep no stale weights for them."""
        method, hands_over, role = self.method, self.layout.hands_over, self.place.role
        if isinstance(method, ConAdv) and Role.ADV not in role:
            if not self.world.is_main:  # whose state has stale weights
                method.twins = Twins()
        elif isinstance(method, ConAdv) and hands_over:
            method.twins = Mail(self._model, method, self.post)
        elif isinstance(method, Recycled) and hands_over:
            method.twins = Passed(self._model, method, self.post)

    def _attack(self, ahead: Any) -> Outcome:
        """The step of a rank that only attacks: weights come, and the twins of the batch ahead go."""
        method, step = self.method, self._step
        assert isinstance(method, ConAdv)
        note = self.post.receive_weights()
        if not note:
            t = step.t + method.delay
            for k, chunk in enumerate([] if ahead is None else step.chunks(step.batch(ahead))):
                if step.has_twin(t, k):
                    self.post.send(t, k, method.twin(t, k, chunk).images)
            step.t += 1
        stops = torch.tensor([float(note == number) for number in _SIGNALS])
        return Outcome(torch.cat([stops, torch.zeros(_HEAD - len(stops))]), step.t, self.layout)

    def _agree(self, losses: Losses, stop: int) -> Outcome:
        """The short all_reduce of a step: requests to stop, losses, what is not finite, and statistics."""
        like = self._statistics[0] if self._statistics else losses.clean
        values = torch.stack([*losses]).to(like.device, torch.promote_types(like.dtype, torch.float32))
        own = torch.cat([values, self._gradient_total(), *self._statistics])
        bad = own.isfinite().all().logical_not().to(values)[None]
        stops = torch.cat([torch.full_like(values[:1], stop == number) for number in _SIGNALS])
        tail = torch.cat([stops, values, bad, bad * (self.world.rank + 1), *self._statistics])
        self.world.all_reduce(tail, self._learners)
        if self._statistics:
            sizes = [len(part) for part in self._statistics]
            torch._foreach_copy_(self._statistics, list(tail[_HEAD:].split(sizes)))
        return Outcome(tail[:_HEAD], self.method.step - 1, self.layout)

    def _gradient_total(self) -> Tensor:
        """A number that is not finite if a gradient of this rank is not; averages of finite numbers are finite."""
        totals, self._own_totals[:] = list(self._own_totals), []
        gradients = [weight.grad for weight in self._model.parameters() if weight.grad is not None]
        return torch.stack(totals or list(torch._foreach_norm(gradients, 1))).sum()[None]


def _name(layout: Layout, count: int, ranks: int) -> str:
    """So many ranks, the sum of whose numbers, counted from 1, is `ranks`."""
    return layout.describe(ranks - 1) if count == 1 else f"{count} ranks"


def check_statistics(model: nn.Module, layout: Layout) -> None:
    """Refuse SyncBatchNorm in a layout with several roles, whose statistics it would mix."""
    if len(layout.counts) > 1 and any(isinstance(module, nn.SyncBatchNorm) for module in model.modules()):
        raise ValueError(
            f"SyncBatchNorm would mix the statistics of ranks with different roles in layout {str(layout)!r}: "
            "drop the layout, or use BatchNorm"
        )


def checksum(weights: list[Tensor]) -> Tensor:
    """The sum of the bit patterns of weights as integers, modulo 2 to the 64; any single bit changes it."""
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    patterns = [weight.detach().flatten().view(kinds[min(8, weight.element_size())]) for weight in weights]
    return torch.stack([pattern.to(torch.int64).sum() for pattern in patterns]).sum()


def _average(state, bucket):  # type: ignore[no-untyped-def]  # PyTorch refuses annotations that are strings
    """Average a bucket of gradients over the learning ranks, as DistributedDataParallel does; note the own sum."""
    totals, group = state
    gradients = bucket.buffer()
    totals.append(gradients.norm(1))
    work = dist.all_reduce(gradients.div_(dist.get_world_size(group)), group=group, async_op=True)
    return work.get_future().then(lambda _: gradients)
