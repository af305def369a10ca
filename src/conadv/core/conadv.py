"""ConAdv: learn from images and from twins, generated with the weights of `delay` steps ago; delay 0 is DisAdv."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Unpack

from torch import Tensor, nn

from .aging import Aging
from .attack import Attack, Loss, check_attack
from .batch import Batch, count_chunks
from .checks.peers import described
from .feed import Feed
from .handoff import Handoff, Queue, Twin, empty, queue_of
from .learner import Learner
from .methods import Work, total_loss
from .parts import Common, Losses
from .roles import Role
from .share import TwinShare
from .spans import span
from .state import State, below, pack, unpack
from .wrappers import whole


class ConAdv:
    """Learn from the images and from their twins, generated with the weights of `delay` steps ago.

    The update at step t follows `(1 - adv_weight)·∇L(x_t) + adv_weight·∇L(x̂_t)`, where `x̂_t` was generated with the
    weights of step t - delay (the first ones: with the initial weights). delay 1 is the paper's ConAdv, delay 0 is
    DisAdv.

    In a single process it keeps a copy of the weights of the last `delay` steps, and generates the twins of a batch
    when it learns from them. A step is an update of the weights: with gradient accumulation, all calls between two
    updates take the same stale weights. With `handoff=Queue()`, twins wait in memory instead, and batches come from
    `feed`; `delay` then counts calls.

    Args:
        model: the network, after `split_batchnorm`.
        loss: from outputs and labels to the mean loss over the images.
        attack: what generates the twins, such as `PGD(4/255)`.
        delay: age, in updates of the weights, of those that twins are generated with.
        adv_weight: share of the twins in the loss; the clean images have the rest. 1, robust training: there is no
            clean pass, the running statistics are those of the twins, and `twin_branch` must be "main".
        twin_share: the part of a batch's chunks that gets twins, such as "1/4"; other chunks in each step. Without
            chunks: the part of its images. The loss takes the mean over the twins.
        twin_branch: the BatchNorm branch that twins go through. "adv", as in the paper: they have their own statistics
            and affine parameters. "main": the affine parameters are those of the images; twins are normalized with
            the statistics of their batch, and the running statistics remain those of the images. The attack then
            goes through main, too: `PGD(4/255, branch="main")`.
        handoff: where twins wait between generating and learning; None: no twin waits.
        stale_weights: a context in which the model has the weights of `delay` steps ago, kept by the caller.
            None: the method keeps them.
        common: what every method takes, see `conadv.Common`: chunk_size, seed, autocast, batch, input_name, together,
            place.
    """

    __slots__ = (
        "_adv_weight",
        "_ahead",
        "_attack_used",
        "_attacked",
        "_delay",
        "_learner",
        "_loaded",
        "_share",
        "_stale",
        "_weights",
        "handoff",
    )  # setting any other attribute is an error

    duties = Role.CLEAN | Role.ADV | Role.ATTACK

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        attack: Attack,
        *,
        delay: int = 1,
        adv_weight: float = 0.5,
        twin_share: float | str = 1,
        twin_branch: str = "adv",
        handoff: Handoff | None = None,
        stale_weights: Callable[[], AbstractContextManager[None]] | None = None,
        **common: Unpack[Common],
    ) -> None:
        if delay < 0:
            raise ValueError(f"delay {delay}: take 0 (DisAdv), 1 (ConAdv) or more")
        self._delay = delay
        self._share = TwinShare.from_number(twin_share)
        self._learner = Learner(model, loss, common, twin_branch)
        self.adv_weight = adv_weight
        self.attack = attack
        keeps = handoff is None and stale_weights is None
        self._stale = Aging(model, delay if keeps else 0)
        self._ahead = 0 if keeps or stale_weights is not None else delay  # batches in flight between steps
        self._weights = stale_weights or (self._stale.swapped_in if keeps and delay else nullcontext)
        self.handoff: Handoff = Queue() if handoff is None else handoff
        self._attacked = 0  # the number of the next batch to attack
        self._loaded = False

    @property
    def attack(self) -> Attack:
        """What generates the twins; it may be replaced between steps."""
        return self._attack_used

    @attack.setter
    def attack(self, attack: Attack) -> None:
        check_attack(attack)
        if self._learner.twin_branch == "main" and getattr(attack, "branch", "main") != "main":
            raise ValueError('twin_branch="main" needs an attack through that branch: PGD(..., branch="main")')
        self._attack_used = attack

    @property
    def adv_weight(self) -> float:
        """The share of the twins in the loss; it may be changed between steps."""
        return self._adv_weight

    @adv_weight.setter
    def adv_weight(self, adv_weight: float) -> None:
        if not 0 <= adv_weight <= 1:
            raise ValueError(f"adv_weight {adv_weight}: a part of the loss, from 0 to 1")
        if adv_weight == 1 and (self._learner.twin_branch != "main" or float(self._share) != 1):
            raise ValueError(
                "adv_weight 1 learns from twins only, so that all images need one, through the evaluated branch: "
                'twin_branch="main", twin_share=1'
            )
        if adv_weight == 1 and self._learner.place.role == Role.CLEAN:
            raise ValueError("adv_weight 1 has no clean pass, and this rank does nothing else: join clean and adv")
        self._adv_weight = adv_weight

    @property
    def delay(self) -> int:
        return self._delay

    @property
    def step(self) -> int:
        return self._learner.step

    def feed(self, loader: Iterable[Any]) -> Feed:
        """A loader of the pairs that the method is called with; see `Feed`."""
        ahead = self._ahead if self._does(Role.ATTACK) else 0
        return self._learner.feed(loader, ahead, self._begin_epoch, self._prime_first)

    def __call__(self, now: Any, ahead: Any = None) -> Losses:
        for parts, number, count in self._work(now, ahead):
            if parts:
                self._learner.learn(parts, number, count)
        self._stale.keep()
        return self._learner.end_step()

    def loss(self, now: Any, ahead: Any = None) -> Tensor:
        # All attacks first: while a graph is alive, the model must keep its weights.
        work = [item for item in self._work(now, ahead) if item[0]]
        self._stale.keep()
        return total_loss(self._learner, work)

    @property
    def losses(self) -> Losses:
        """The mean losses of the last step."""
        return self._learner.losses

    def hand_over(self) -> None:
        """Do nothing: these twins do not depend on a backward pass."""

    def in_flight(self, step: int) -> range:
        return range(step, step + self._ahead)

    def prime(self, batch: Any, number: int) -> None:
        for chunk_number, chunk in enumerate(self._learner.chunks(batch)):
            self._attack(chunk, number, chunk_number)
        self._attacked = number + 1

    def resume(self, step: int) -> None:
        empty(self.handoff)
        self._learner.step = self._attacked = step
        self._stale.reset()
        self._loaded = True

    def state_dict(self, all_ranks: bool = False) -> State:
        """The state besides the weights that the next step needs, as tensors for torch.save or safetensors.

        Stale weights that FSDP2 shards are gathered: every rank calls it then, and `load_state_dict` too.

        Args:
            all_ranks: with twins in flight on several ranks, gather those of all; every rank calls it.
        """
        twins = queue_of(self.handoff).state()
        tensors = {f"twins.{name}": tensor for name, tensor in twins.items()}
        stale, versions = self._stale.state()
        for number, version in enumerate(versions):
            tensors |= {f"stale.{number}.{name}": whole(tensor) for name, tensor in version.items()}
        about = {**self._identity(), "step": self.step, "attacked": self._attacked, **stale}
        return pack(about, tensors, own=self._ahead > 0, all_ranks=all_ranks)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        about, tensors = unpack(state, self._identity(), own=self._ahead > 0)
        self._learner.step, self._attacked = about["step"], about["attacked"]
        queue_of(self.handoff).restore(below("twins.", tensors), self._learner.device)
        versions = range(about.get("versions", self.delay - self._ahead))
        self._stale.load(about, [below(f"stale.{number}.", tensors) for number in versions])
        self._loaded = True

    def _identity(self) -> dict[str, Any]:
        own = {"method": "ConAdv", "delay": self.delay, "ahead": self._ahead, "twin_share": float(self._share)}
        own["twin_branch"] = self._learner.twin_branch
        return {**own, "chunk_size": self._learner.chunk_size, "seed": self._learner.seed}

    def _work(self, now: Any, ahead: Any) -> Iterator[Work]:
        """Yield the parts to learn from, chunk by chunk; before each, attack a chunk of the batch ahead."""
        now, ahead = self._seen(now, ahead)
        twins = {"twin_share": float(self._share), "twin_branch": self._learner.twin_branch}
        same = described("ConAdv", self.attack, delay=self.delay, adv_weight=self.adv_weight, **twins)
        if self._ahead and self._learner.unfinished:
            raise ValueError(
                "the step before failed, with twins in flight: take the batches from a new `method.feed(loader)`"
            )
        self._learner.begin_step(now, same, delayed=self.delay > 0, queued=self._ahead > 0)
        self._stale.begin()
        if self._ahead == 0:
            empty(self.handoff)  # a step that failed may have left twins
        clean = self._chunks(now)
        attacked = self._chunks(None if ahead is now else ahead)  # the same batch is cut into chunks once
        count = self._count(now, ahead)
        if self._learner.chunk_size is not None and self._learner.place.role != Role.CLEAN:
            self._share.count(count)  # raises an error if the share does not fit
        for number in range(count):
            chunk = next(clean, None)
            self._attack(chunk if ahead is now else next(attacked, None), self._attacked, number)
            learnt = chunk if self._does(Role.CLEAN) and self.adv_weight < 1 else None
            parts = [] if learnt is None else self._learner.clean_parts(learnt, 1 - self.adv_weight)
            if self._does(Role.ADV) and self._learner.has_twins(self._share, self.step, number):
                with span("hand-off"):
                    twin = self.handoff.take()
                parts.append(self._learner.adv_part(twin, self.adv_weight, float(self._share)))
            yield parts, number, count
        for number, chunk in enumerate(attacked, count):  # the batch ahead may be the larger one
            self._attack(chunk, self._attacked, number)
        self._attacked += ahead is not None

    def _seen(self, now: Any, ahead: Any) -> tuple[Any, Any]:
        """The batches that this role learns from and attacks: without twins in flight, the same one."""
        batch = None if now is None else self._learner.batch(now)
        if not self._does(Role.ATTACK):
            return batch, None
        if self._ahead == 0:
            other = batch if ahead is None or ahead is now else self._learner.batch(ahead)
            return batch if self._does(Role.CLEAN) else None, other
        self._check_ahead(ahead)
        return batch if self._does(Role.CLEAN) else None, None if ahead is None else self._learner.batch(ahead)

    def _chunks(self, batch: Any) -> Iterator[Batch]:
        return iter(()) if batch is None else self._learner.chunks(batch)

    def _attack(self, chunk: Batch | None, batch_number: int, chunk_number: int) -> None:
        """Generate the twins of a chunk, if it gets any, and put them in flight."""
        if chunk is not None and self._learner.has_twins(self._share, batch_number, chunk_number):
            with self._weights():
                twin = self._generate(chunk, batch_number, chunk_number)
            with span("hand-off"):
                self.handoff.put(twin)

    def _generate(self, chunk: Batch, batch_number: int, chunk_number: int) -> Twin:
        """Generate the twins of a chunk with the current weights."""
        return self._learner.attack(self.attack, chunk, batch_number, chunk_number, self._share)

    def _check_ahead(self, ahead: Any) -> None:
        if ahead is not None and self._attacked - self.step != self._ahead:
            raise ValueError(
                f"{self._attacked - self.step} batches are in flight where delay {self.delay} asks for {self._ahead}: "
                "take the batches from `method.feed(loader)`"
            )

    def _does(self, duty: Role) -> bool:
        return duty in self._learner.place.role

    def _count(self, now: Any, ahead: Any) -> int:
        batch = now if now is not None else ahead
        if batch is not None:
            return count_chunks(batch, self._learner.chunk_size)
        return self._learner.place.chunks or 0

    def _prime_first(self, batch: Any, place: int) -> None:
        """Attack one of the first batches of an epoch before its first step, unless it was attacked already."""
        if place > self._attacked - self.step:
            self.prime(batch, self._attacked)

    def _begin_epoch(self) -> None:
        """Drop the twins of an unfinished feed: their batches do not come again."""
        self._learner.drop_unfinished()
        if self._attacked > self.step and not self._loaded:
            self.handoff.clear()
            self._attacked = self.step
        elif not self._loaded:
            empty(self.handoff)  # generating the first twins may have failed in the middle
        self._loaded = False
