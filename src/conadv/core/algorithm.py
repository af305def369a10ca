"""Concurrent adversarial learning on one page: Algorithm 1 of the paper (ICLR 2022), its baseline and its cheap form.

    Vanilla     x_t ──► main ──► gradients
    ConAdv      x_t ──► main ─┬► gradients        twin(t, k) = attack(θ_{t-τ}, x_t[k], y_t[k], seed(t, k))
                twin ─► adv  ─┘                   k: chunk of the batch; τ = delay: 1 is ConAdv, 0 is DisAdv
    Recycled    x_t ──► main ─┬► gradients        the same backward pass, one layer further, gives the twin of x_t[k],
                twin ─► adv  ─┘                   which the next step learns from

A method says which passes a chunk takes: branch of BatchNorm, images, weight in the loss. `step.py` runs them,
`twins.py` says where twins come from, `pgd.py` is the attack. The loop over t and the update are the caller's, and
DistributedDataParallel aggregates. θ_{t-τ} is in `twins.StaleWeights`. A state holds these weights (`ConAdv`) or the
twins themselves (`Recycled`); `conadv train` saves weights for both, and evaluates twins again (`ranks/member.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Unpack, final

from torch import Tensor, nn

from conadv.roles import Role

from .attack import Attack, Loss
from .batch import Batch
from .step import Common, Method, Pass, Step, WithTwins
from .twins import LeftTwins, Local, Twins


@final
class Vanilla(Method):
    """Learn from the images as they are: the baseline, with the same interface.

    Args:
        model: the network; with `chunk_size`, call `split_batchnorm(model, ("main",))` first.
        loss: from outputs and labels to the mean loss over the images.
        common: what every method takes, see `conadv.Common`.
    """

    __slots__ = ()

    duties = Role.CLEAN

    def __init__(self, model: nn.Module, loss: Loss, **common: Unpack[Common]) -> None:
        super().__init__(Step(model, loss, common), delay=0)

    def passes(self, k: int, chunk: Batch) -> list[Pass]:
        return self._step.clean(chunk, 1.0)


@final
class ConAdv(WithTwins):
    """Learn from the images and from their twins, generated with the weights of `delay` updates ago.

    The update at step t follows `(1 - adv_weight)·∇L(x_t) + adv_weight·∇L(x̂_t)`, where `x̂_t` was generated with the
    weights of step t - delay (the first ones: with the initial weights). delay 1 is the paper's ConAdv, delay 0 is
    DisAdv. `delay` counts updates: with gradient accumulation, calls between two updates take the same stale weights.
    (Where that, or a skipped update, first happens in the middle of a run, these weights are one update younger once.)

    Args:
        model: the network, after `split_batchnorm`.
        loss: from outputs and labels to the mean loss over the images.
        attack: what generates the twins, such as `PGD(4/255)`.
        delay: age, in updates of the weights, of those that twins are generated with.
        adv_weight: share of the twins in the loss; the clean images have the rest. 1, robust training: there is no
            clean pass, the running statistics are those of the twins; it needs `twin_branch="main"` and `twin_share=1`.
        twin_share: the part of a batch's chunks that gets twins, such as "1/4"; other chunks in each step. The loss
            takes the mean over the twins.
        twin_branch: the BatchNorm branch that twins go through. "adv", as in the paper: they have their own statistics
            and affine parameters. "main": the affine parameters are those of the images; twins are normalized with
            the statistics of their batch, and the running statistics remain those of the images. The attack then goes
            through main, too: `PGD(4/255, branch="main")`.
        shuffle_twins: the twins of so many chunks in a row are shuffled among each other before they are learnt, so
            that the statistics of a chunk that was attacked as a whole cannot give its labels away; 1: they are not.
        twins: who generates twins ahead, such as `conadv.ray.Pool`; None: this process, when it needs them.
        common: what every method takes, see `conadv.Common`.
    """

    __slots__ = ()

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
        shuffle_twins: int = 1,
        twins: Twins | None = None,
        **common: Unpack[Common],
    ) -> None:
        if delay < 0:
            raise ValueError(f"delay {delay}: take 0 (DisAdv), 1 (ConAdv) or more")
        step = Step(model, loss, common, twin_branch, twin_share, shuffle_twins)
        super().__init__(step, delay, attack, adv_weight)
        local = Local(model, delay, self.twin)
        self.twins: Twins = local if twins is None else twins.over(self, local)

    def passes(self, k: int, chunk: Batch) -> Iterator[Pass]:
        """The first loop of Algorithm 1, for one chunk; `Step` adds the gradients up ("minimize L_B, obtain g_t")."""
        t, role, weight = self._step.t, self._step.place.role, self.adv_weight
        if Role.CLEAN in role and weight < 1:
            yield from self._step.clean(chunk, 1 - weight)  # "L(θ_t; x_i, y_i) using main BN"
        if Role.ADV in role and self._step.has_twin(t, k):
            twin = self.twins.take(t, k, chunk)  # x̂(θ_{t-τ})
            yield from self._step.adversarial(twin, k, weight)  # "L(θ_t; x̂_i(θ_{t-τ}), y_i) using adv BN"

    def twin(self, t: int, k: int, chunk: Batch) -> Batch:
        """The second loop ("obtain adv examples"), with θ_{t-τ} in the model. `twins` decides when and where.

        `Local` calls it in step t, when the twin is needed; attack ranks (`Member._attack`) in step t - τ, beside the
        update, as the paper does. The attackers of a pool have no method, and call `Step.attack` themselves.
        """
        return self._step.attack(self.attack, t, k, chunk)

    def _check(self) -> None:
        if self._step.twin_branch == "main" and getattr(self.attack, "branch", "main") != "main":
            raise ValueError('twin_branch="main" needs an attack through that branch: PGD(..., branch="main")')
        if not 0 <= self.adv_weight <= 1:
            raise ValueError(f"adv_weight {self.adv_weight}: a part of the loss, from 0 to 1")
        if self.adv_weight == 1 and (self._step.twin_branch != "main" or self._step.share < 1):
            raise ValueError('adv_weight 1 learns from twins only, all of them: twin_branch="main", twin_share=1')


@final
class Recycled(WithTwins):
    """Learn from the images and from the twins of the last batch, which its own backward pass gave almost for free.

    The update at step t follows `(1 - adv_weight)·∇L(x_t) + adv_weight·∇L(x̂_{t-1})`, where `x̂_{t-1}` was generated with
    the weights of step t - 1; a step with none before it takes the twins of its own batch. The attack is one step from
    the image through the main branch, with the statistics of the batch (its `random_start` and `branch` do not apply).
    Each call counts as a step, and every batch needs as many chunks with twins as the one before.

    Args:
        model: the network, after `split_batchnorm`.
        loss: from outputs and labels to the mean loss over the images.
        attack: its step is taken along the gradient of the clean loss.
        adv_weight: share of the twins in the loss, below 1; the clean images have the rest.
        twin_share: as for `ConAdv`.
        twin_branch: as for `ConAdv`.
        shuffle_twins: as for `ConAdv`.
        common: what every method takes, see `conadv.Common`.
    """

    __slots__ = ()

    duties = Role.CLEAN | Role.ADV

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        attack: Attack,
        *,
        adv_weight: float = 0.5,
        twin_share: float | str = 1,
        twin_branch: str = "adv",
        shuffle_twins: int = 1,
        **common: Unpack[Common],
    ) -> None:
        step = Step(model, loss, common, twin_branch, twin_share, shuffle_twins)
        super().__init__(step, 1, attack, adv_weight)
        self.twins: LeftTwins = LeftTwins(model, self.twin)

    def passes(self, k: int, chunk: Batch) -> Iterator[Pass]:
        """L(θ_t; x_t) through main, whose backward pass leaves the twin of x_t[k] behind, and L(θ_t; x̂_{t-1})."""
        t, role = self._step.t, self._step.place.role
        if k == 0:
            self.twins.check(self._step.twin_count)
        if Role.CLEAN in role:
            clean, *views = self._step.clean(chunk, 1 - self.adv_weight)
            if self._step.has_twin(t, k):
                clean = self._leaving_a_twin(clean, t, k)
            yield from (clean, *views)
        elif self._step.has_twin(t, k):
            self.twins.remember(k, chunk)  # another rank takes the clean pass, and sends the twin
        source = t - 1 if self.twins.waited else t  # the step whose batch the twins are of
        if Role.ADV in role and self._step.has_twin(source, k):
            twin = self.twins.take(t, k, chunk)
            yield from self._step.adversarial(twin, k, self.adv_weight)

    def twin(self, t: int, k: int, chunk: Batch) -> Batch:
        """The twin of x_t[k] from a backward pass of its own, with the weights that the model has now."""
        self._step.checks.look_at_images(self.attack, chunk.images)
        clean = self._step.clean(chunk, 1 - self.adv_weight)[0]
        leaf = chunk.images.detach().requires_grad_()
        of_leaf = clean._replace(batch=replace(clean.batch, images=leaf), tracking="off")
        (gradient,) = self._step.gradient([of_leaf], t, k, [leaf])
        return self._along(clean.batch, self._step.scale(clean), t, k, gradient)

    def _leaving_a_twin(self, clean: Pass, t: int, k: int) -> Pass:
        """The same pass; its backward pass also reaches the images, and takes one step of the attack from there."""
        leaf = clean.batch.images.detach().requires_grad_()
        along = partial(self._along, clean.batch, self._step.scale(clean), t, k)
        return clean._replace(batch=replace(clean.batch, images=leaf), receive=self.twins.expect(k, along))

    def _along(self, batch: Batch, scale: float, t: int, k: int, gradient: Tensor) -> Batch:
        """The twins of a chunk from the gradient of its loss, which was a scaled mean; that of an attack is a sum."""
        gradient = gradient / (scale / len(batch.images))
        images = self.attack.along(batch.images, gradient, self._step.attack_seed(t, k))
        return Batch(images, batch.labels, extra=batch.extra)

    def _check(self) -> None:
        self.attack.check_reusable()
        if not 0 <= self.adv_weight < 1:
            raise ValueError(
                f"adv_weight {self.adv_weight}: from 0 to below 1, since the clean loss brings the gradient"
            )
