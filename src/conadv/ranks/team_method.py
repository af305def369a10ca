"""The method of a `conadv.Team`: all ranks take its steps together."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from conadv.core.splitbn import update_running_stats
from conadv.core.state import State, pack, unpack
from conadv.core.step import Losses

from .agreement import check_agreement
from .member import Member
from .outcome import NotFiniteError, Outcome, Unread
from .team_epochs import TeamEpochs


class TeamMethod:
    """The method that `conadv.Team.method` returns; every rank calls it once per step.

    Args:
        member: this rank.
        model: the network.
        epochs: the epochs of this rank.
        settings: what must be the same when a state is loaded.
    """

    def __init__(self, member: Member, model: nn.Module, epochs: TeamEpochs, settings: dict[str, Any]) -> None:
        self._member, self._model, self._epochs, self._settings = member, model, epochs, settings
        self._is_late = member.world.device.type != "cpu"  # read outcomes one step late, so that the host does not wait
        self._unread: tuple[int, Unread] | None = None  # the last step and its outcome, if not read yet
        self._seen: list[tuple[int, float]] = []  # fingerprints of the weights before each of the first two steps
        self._is_open = False  # `loss` was called, and `all_reduce` was not yet
        self._factors: list[Tensor] = []  # the gradient of that loss in each backward pass: how the caller scaled it
        self._scaled_alike = False  # whether all ranks have been found to scale it by the same number

    @property
    def step(self) -> int:
        """The number of steps taken."""
        return self._member.method.step

    def feed(self, loader: Iterable[Any]) -> TeamFeed:
        """Return an iterable of the arguments of each step of an epoch; every rank must iterate to the same step.

        Args:
            loader: yields the images of this rank, as with `team.sampler`. Its length is the same on every rank. A rank
                that only learns from twins does not read from it.
        """
        return TeamFeed(self, loader)

    def __call__(self, now: Any, ahead: Any = None) -> Losses:
        """Take a step up to the update: afterwards gradients and running statistics are those of all ranks.

        Args:
            now: the batch to learn from, as `feed` yields it.
            ahead: the batch to attack.

        Returns:
            The mean losses over the whole batch, the same on all ranks.
        """
        self._check_step()
        return self._take(self._member.step(now, ahead))

    def loss(self, now: Any, ahead: Any = None) -> Tensor:
        """Return this rank's part of the loss of a step, for a loop that scales it or calls backward itself.

        Backpropagate it once on every rank, then call `Team.all_reduce`. It keeps the graph of all chunks in memory. On
        a rank that only attacks it is 0.

        Args:
            now: the batch to learn from, as `feed` yields it.
            ahead: the batch to attack.
        """
        self._check_step()
        self._factors = []
        total = self._member.loss(now, ahead)
        total.register_hook(lambda factor: self._factors.append(factor.detach()))
        self._is_open = True
        return total

    def all_reduce(self) -> Losses:
        """End the step of `loss`; see `Team.all_reduce`."""
        if not self._is_open:
            raise ValueError(
                "no loss to end a step with: call it after method.loss(now, ahead) and its backward pass; "
                "method(now, ahead) sums the gradients itself"
            )
        if len(self._factors) != 1:
            times = len(self._factors)
            raise ValueError(
                f"the loss of this step was backpropagated {times} times: do it once, then team.all_reduce()"
            )
        if not self._scaled_alike:
            check_agreement(self._member.world, {"loss": {"the loss by": float(self._factors[0])}})
            self._scaled_alike = True
        self._is_open = False
        return self._take(self._member.end_loss(), scaled=True)

    def state_dict(self) -> State:
        """Return what the next step needs besides the weights, as tensors by name. Every rank must call it.

        Rank 0 saves it. It resumes in any layout. With `ConAdv` it contains the weights of the last `delay` steps, with
        `Recycled` the twins in flight.
        """
        self._check_ended()
        self._settle()
        about, tensors = self._epochs.save()
        return pack({**self._identity(), **about}, tensors, own=False, all_ranks=False)

    def load_state_dict(self, state: dict[str, Any]) -> int:
        """Restore what `state_dict` returned on rank 0. Every rank must call it, after loading the model's weights.

        Returns:
            How many steps of the epoch were taken, so that its loader can start there
            (`sampler.set_epoch(epoch, start)`); 0 at the end of an epoch.
        """
        about, tensors = unpack(state, self._identity(), own=False)
        return self._epochs.load(about, tensors)

    def close(self) -> None:
        """End the last epoch and wait for messages in flight; all ranks must have taken the same number of steps."""
        self._check_ended()
        self._settle()
        self._member.drain()

    def begin_epoch(self, loader: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
        """Begin an epoch on all ranks, and yield the arguments of each step."""
        self._check_ended()
        self._settle()
        yield from self._member.feed(self._epochs.begin(loader))

    def _take(self, unread: Unread, scaled: bool = False) -> Losses:
        """Check the outcome of a step and update the running statistics; the caller updates the weights.

        On a GPU the outcome is read in the next step. If the step is not finite, its gradients and statistics are set
        to zero on the device, so that the caller's update keeps the weights finite.

        Args:
            unread: the outcome of the step.
            scaled: whether gradients may overflow because the caller scales the loss, and then skips the update.
        """
        self._settle()
        self._unread = self.step - 1, unread
        if self._is_late and not scaled:
            self._member.exchange.clear_unless(unread.finite)
        else:
            self._settle(scaled)
        self._member.stale.keep()
        update_running_stats(self._model)
        return Losses(*unread.losses)

    def _settle(self, scaled: bool = False) -> None:
        """Read the outcome of the last step, unless that was done; raise an error if training cannot continue."""
        if self._unread is None:
            return
        (step, unread), self._unread = self._unread, None
        member, outcome = self._member, unread.read()
        member.check_weights(step, outcome)
        if outcome.culprits is None:
            return
        if not scaled or not self._is_overflow(outcome):
            member.exchange.discard()
            member.drain()
            raise NotFiniteError(f"step {step}: {member.not_finite(outcome)} is not finite: lower the learning rate")
        self._seen.clear()

    def _is_overflow(self, outcome: Outcome) -> bool:
        """Whether only gradients are not finite, as when the scaled loss overflows; the same on all ranks."""
        assert outcome.culprits is not None
        has_losses = "loss" not in outcome.culprits.values()
        return has_losses and self._member.exchange.has_finite_statistics()

    def _check_step(self) -> None:
        """Check that a step may begin."""
        self._check_ended()
        self._epochs.check_begun()
        self._check_updated()

    def _check_ended(self) -> None:
        if self._is_open:
            raise ValueError("the last step is not over: call team.all_reduce() after the backward pass of its loss")

    def _check_updated(self) -> None:
        """Warn before the second step if the weights were not updated, since it clears the gradients of the first."""
        if len(self._seen) == 2:
            return
        weights = [weight for weight in self._model.parameters() if weight.requires_grad]
        # PyTorch's count of in-place changes does not notice an optimizer that writes to `.data`; the sum does.
        self._seen.append((sum(weight._version for weight in weights), float(weights[-1].detach().double().sum())))
        if self._seen[0] == self._seen[-1] and len(self._seen) == 2:
            warnings.warn(
                "the weights were not updated since the last step, and a Team clears the gradients in each: update "
                "after each call, and accumulate with a larger batch_size of the Team, in chunks of chunk_size images",
                stacklevel=4,
            )

    def _identity(self) -> dict[str, Any]:
        method = self._member.method
        return {"method": f"Team {type(method).__name__}", "delay": method.delay, **self._settings}


class TeamFeed:
    """An iterable of the arguments (now, ahead) of each step of an epoch.

    Args:
        method: the method of this rank.
        loader: yields the images of this rank.
    """

    def __init__(self, method: TeamMethod, loader: Iterable[Any]) -> None:
        self._method = method
        self._loader = loader

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]  # a TypeError, as for any iterable without a length

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        yield from self._method.begin_epoch(self._loader)
