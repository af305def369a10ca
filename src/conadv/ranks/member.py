"""One rank of a layout: its method and its communication. `conadv train` and `conadv.Team` are built on it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from conadv.core.batch import Feed
from conadv.core.roles import Place, Role
from conadv.core.step import Losses, Method, span
from conadv.core.twins import StaleWeights

from .checksum import TURNS
from .collectives import World
from .gradients import Exchange
from .handoff import SAVE, RankHandoff, between_ranks
from .layout import Layout
from .outcome import DriftError, Outcome, OwnDriftError, Unread
from .recipients import recipients
from .source import Attacked, LeftOnRanks, Source, listed, source_of
from .traffic import HasTwins, Traffic
from .wire import Wire


@dataclass(frozen=True)
class Member:
    """One rank of a layout."""

    world: World
    layout: Layout
    place: Place
    method: Method
    handoff: RankHandoff | None
    """None if no twins are sent between ranks."""
    exchange: Exchange
    stale: StaleWeights
    """Weights of the last `delay` steps, on ranks that attack with them and on rank 0, which saves them."""
    twins: Source | None
    """Where its twins come from; None: the method has none."""

    def feed(self, batches: Iterable[Any]) -> Feed:
        """A loader of the pairs that `step` and `loss` take."""
        if isinstance(self.twins, Attacked) and self.twins.reads_ahead:
            return self.twins.feed(batches)
        return self.method.feed(batches)

    def step(self, now: Any, ahead: Any, stop: int = 0, save: bool = False) -> Unread:
        """Take a step up to the update: afterwards gradients and pending statistics are sums over all ranks.

        The caller must call `stale.keep` before the update.

        Args:
            now: the batch to learn from, as `method.feed` yields it.
            ahead: the batch to attack.
            stop: the number of the signal that asked this rank to stop; 0: none.
            save: whether this rank requests a checkpoint.
        """
        self._begin(stop, save, one_pass=False)
        return self._end(self.method(*self._own(now, ahead)), stop, save)

    def loss(self, now: Any, ahead: Any) -> Tensor:
        """Return this rank's part of the loss; the caller backpropagates it once, then calls `end_loss`."""
        self._begin(0, False, one_pass=True)
        return self.method.loss(*self._own(now, ahead))

    def end_loss(self) -> Unread:
        """End the step of `loss` after its backward pass, up to the update."""
        self.exchange.reclaim()
        return self._end(self.method.losses, 0, False)

    def resume(self, step: int, in_flight: bool = False) -> None:
        """Continue at `step`; unless the twins of `Recycled` are in flight already, the caller primes the batches."""
        if isinstance(self.twins, LeftOnRanks):
            self.twins.resume(step, in_flight)
        elif self.twins is not None:
            self.twins.resume(step)
        else:
            self.method.resume(step)

    def _own(self, now: Any, ahead: Any) -> tuple[Any, Any]:
        """The batches that this rank learns from and attacks."""
        if isinstance(self.twins, LeftOnRanks):
            return self.twins.first(now), ahead
        if self.handoff is None or Role.ATTACK not in self.place.role:
            return now, ahead
        attacked = ahead if self.layout.ahead(self.method.delay) else listed(now)
        return attacked if Role.CLEAN in self.place.role else None, attacked

    def _begin(self, stop: int, save: bool, one_pass: bool) -> None:
        self.exchange.zero_grad(one_pass)
        if self.handoff is not None:
            note = stop + SAVE * (save and self.exchange.may_lag)
            self.handoff.begin_step(note, all_late=one_pass and self.layout.maker() == Role.CLEAN)

    def _end(self, losses: Losses, stop: int, save: bool) -> Unread:
        note = None
        with span("gradient sum"):
            self.exchange.start()
            if isinstance(self.twins, LeftOnRanks):
                self.twins.hand_over()
            if self.handoff is not None:
                self.handoff.end_step()
                note = self.handoff.received_note
            return self.exchange.end(losses, stop, note, save)

    def check_weights(self, step: int, outcome: Outcome) -> None:
        """Raise a DriftError if the weights of some rank differ from those of the others."""
        if not outcome.drifted:
            return
        names = ", ".join(map(self.layout.describe, outcome.drifted))
        # All weights are compared once in `TURNS` steps, and they were equal the last time.
        text = (
            f"step {step}: the weights of {names} are not those of the other ranks (faulty memory, or machines that "
            f"compute differently): remove checkpoints newer than step {max(0, step - TURNS)}, then resume on other "
            "machines"
        )
        if not outcome.known_to_all:
            raise OwnDriftError(text)
        self.drain()
        raise DriftError(text)

    def not_finite(self, outcome: Outcome) -> str:
        """Describe what is not finite, and on which ranks."""
        assert outcome.culprits is not None
        parts = [f"the {what} on {self.layout.describe(rank)}" for rank, what in outcome.culprits.items()]
        return ", ".join(parts) or "the sum of the gradients over the ranks"

    def drain(self) -> None:
        """Wait for every message in flight; all ranks must have taken the same number of steps."""
        if self.handoff is not None:
            self.handoff.drain()
        self.exchange.drain()


def check_statistics(model: nn.Module, layout: Layout) -> None:
    """Refuse SyncBatchNorm in a layout with several roles, whose statistics it would mix."""
    if len(layout.counts) > 1 and any(isinstance(module, nn.SyncBatchNorm) for module in model.modules()):
        raise ValueError(
            f"SyncBatchNorm would mix the statistics of ranks with different roles in layout {str(layout)!r}: "
            "drop the layout, or use BatchNorm"
        )


def build_member(
    world: World,
    layout: Layout,
    model: nn.Module,
    make_method: Callable[[], Method],
    *,
    chunks: int,
    delay: int,
    has_twins: HasTwins,
    wire: Wire | None,
    keeps_stale: bool,
) -> Member:
    """Build this rank's part of a layout. Every rank must call it, since it creates process groups.

    Args:
        world: the ranks.
        layout: which rank does what.
        model: the network.
        make_method: builds the method.
        chunks: how many chunks a global batch has.
        delay: age, in steps, of the weights that twins are generated with.
        has_twins: which chunks have twins.
        wire: the message format of twins; None: not known yet.
        keeps_stale: whether to keep stale weights even if this rank does not attack with them.
    """
    check_statistics(model, layout)
    place = layout.place(world.rank, chunks)
    ahead = layout.ahead(delay)

    handoff = between_ranks(Traffic(layout, world.rank, chunks, ahead, has_twins), world, wire)
    attacks_stale = ahead < delay and Role.ATTACK in place.role  # it attacks with the weights of earlier steps
    stale = StaleWeights(model, delay if attacks_stale or keeps_stale else 0)
    method = make_method()
    step = method.join(place)
    return Member(
        world=world,
        layout=layout,
        place=place,
        method=method,
        handoff=handoff,
        exchange=Exchange(model, world, place.share, recipients(layout, world, ahead)),
        stale=stale,
        twins=source_of(method, step, handoff, stale if attacks_stale else None, ahead),
    )
