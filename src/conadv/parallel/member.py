"""One rank of a layout: what it computes in a step, and what it exchanges with the others. `conadv train` and
`conadv.Team` are both built on it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from conadv.core.handoff import Handoff
from conadv.core.methods import Method
from conadv.core.parts import Losses
from conadv.core.roles import Place, Role
from conadv.core.share import TwinShare
from conadv.core.spans import span
from conadv.core.stale import StaleWeights

from .checksum import TURNS
from .collectives import World
from .gradients import Exchange
from .handoff import SAVE, RankHandoff, between_ranks
from .layout import Layout
from .outcome import DriftError, Outcome, OwnDriftError, Unread
from .recipients import recipients
from .traffic import Traffic
from .wire import Wire

# From a rank's place, its hand-off and the stale weights that it attacks with, if any, to its method.
MakeMethod = Callable[[Place, Handoff | None, StaleWeights | None], Method]


@dataclass(frozen=True)
class Member:
    """The parts of a rank."""

    world: World
    layout: Layout
    place: Place
    method: Method
    handoff: RankHandoff | None
    """None where no twin is sent."""
    exchange: Exchange
    stale: StaleWeights
    """Those that this rank attacks with or, on rank 0, that a checkpoint holds."""

    def step(self, now: Any, ahead: Any, stop: int = 0, save: bool = False) -> Unread:
        """Take a step up to the update: gradients and pending statistics are those of all ranks then.

        Before the update, the caller lets `stale` keep the weights.

        Args:
            now: the batch to learn from, as `method.feed` yields it.
            ahead: the batch to attack.
            stop: the number of the signal that asked this rank to stop; 0: none did.
            save: whether this rank asks for a checkpoint.
        """
        self._begin(stop, save, one_pass=False)
        return self._end(self.method(now, ahead), stop, save)

    def loss(self, now: Any, ahead: Any) -> Tensor:
        """The part that this rank has in the loss of a step; the caller backpropagates it once, before `end_loss`."""
        self._begin(0, False, one_pass=True)
        return self.method.loss(now, ahead)

    def end_loss(self) -> Unread:
        """Take the step whose loss was backpropagated, up to the update."""
        self.exchange.reclaim()
        return self._end(self.method.losses, 0, False)

    def _begin(self, stop: int, save: bool, one_pass: bool) -> None:
        self.exchange.zero_grad(one_pass)
        if self.handoff is not None:
            self.handoff.note = stop + SAVE * (save and self.exchange.may_lag)
            self.handoff.asked = None
            self.handoff.all_late = one_pass and self.layout.maker() == Role.CLEAN

    def _end(self, losses: Losses, stop: int, save: bool) -> Unread:
        asked = None
        with span("gradient sum"):
            self.exchange.start()
            self.method.hand_over()
            if self.handoff is not None:
                self.handoff.end_step()
                asked = self.handoff.asked
            return self.exchange.end(losses, stop, asked, save)

    def check_weights(self, step: int, outcome: Outcome) -> None:
        """Raise if the weights of some rank are not those of the others."""
        if not outcome.drifted:
            return
        names = ", ".join(map(self.layout.describe, outcome.drifted))
        # All weights were equal when they last had their turn, and a checkpoint has those of rank 0.
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
        """What is not finite, and on which ranks."""
        assert outcome.culprits is not None
        parts = [f"the {what} on {self.layout.describe(rank)}" for rank, what in outcome.culprits.items()]
        return ", ".join(parts) or "the sum of the gradients over the ranks"

    def drain(self) -> None:
        """Wait for every message that is under way; all ranks have taken the same number of steps."""
        if self.handoff is not None:
            self.handoff.drain()
        self.exchange.drain()


def check_statistics(model: nn.Module, layout: Layout) -> None:
    """Refuse layers that would mix the statistics of ranks with different roles."""
    if len(layout.counts) > 1 and any(isinstance(module, nn.SyncBatchNorm) for module in model.modules()):
        raise ValueError(
            f"SyncBatchNorm would mix the statistics of ranks with different roles in layout {str(layout)!r}: "
            "drop the layout, or use BatchNorm"
        )


def build_member(
    world: World,
    layout: Layout,
    model: nn.Module,
    make_method: MakeMethod,
    *,
    chunks: int,
    delay: int,
    seed: int,
    twin_share: float | str,
    wire: Wire | None,
    keeps_stale: bool,
) -> Member:
    """The parts of this rank. Every rank must call it, since it makes process groups.

    Args:
        world: the processes.
        layout: who does what.
        model: the network.
        make_method: makes the method for the place of this rank.
        chunks: of a global batch.
        delay: age, in steps, of the weights that twins are generated with.
        seed: decides which chunks have twins.
        twin_share: the share of the chunks that do.
        wire: how the twins of a chunk cross; None: it is not known yet.
        keeps_stale: whether this rank keeps stale weights for checkpoints, too.
    """
    check_statistics(model, layout)
    place = layout.place(world.rank, chunks)
    ahead = layout.ahead(delay)
    has_twins = partial(TwinShare.from_number(twin_share).has, seed)
    handoff = between_ranks(Traffic(layout, world.rank, chunks, ahead, has_twins), world, wire)
    looks_back = ahead < delay and Role.ATTACK in place.role  # it attacks with the weights of earlier steps
    stale = StaleWeights(model, delay if looks_back or keeps_stale else 0)
    return Member(
        world=world,
        layout=layout,
        place=place,
        method=make_method(place, handoff, stale if looks_back else None),
        handoff=handoff,
        exchange=Exchange(model, world, place.share, recipients(layout, world, ahead)),
        stale=stale,
    )
