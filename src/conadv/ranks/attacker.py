"""An attacker of a pool: it evaluates twins with weights that it is sent, and computes as the learner does.

learner ──► (Work, version, weights), once per update; (t, k, chunk) ──► Attacker.twin ──► images
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from conadv.core.algorithm import ConAdv
from conadv.core.attack import Attack, Loss
from conadv.core.batch import Batch, Chunked
from conadv.core.step import Common, Step
from conadv.core.twins import tensors_of
from conadv.roles import Place
from conadv.wrappers import autocast_dtype, innermost, precision

from .world import unflatten

_numbers = count()  # of works, over all methods of this process


@dataclass(frozen=True)
class Work:
    """What a twin depends on besides the weights and the images; works that are equal have equal twins."""

    attack: Attack
    loss: Loss
    twin_branch: str
    common: Common
    place: Place
    forms: dict[str, tuple[torch.Size, tuple[int, ...], torch.dtype]]
    """Shape, strides and dtype of the weights and buffers, by name."""
    training: tuple[bool, ...]
    """The training flag of each module."""
    numerics: tuple[int, str, bool, bool]
    number: int = field(default_factory=lambda: next(_numbers), compare=False)

    @classmethod
    def of(cls, method: ConAdv) -> Work:
        """What the twins of a method depend on at the moment."""
        step = method._step
        with precision(step.model), step._autocasting():
            autocast = autocast_dtype(step.device)
        common = Common(chunk_size=step.chunk_size, seed=step.root_seed, autocast=autocast, input_name=step.input_name)
        assert step.twin_branch is not None
        return cls(
            attack=method.attack,
            loss=step.loss,
            twin_branch=step.twin_branch,
            common=common,
            place=step.place,
            forms={name: form_of(tensor) for name, tensor in tensors_of(step.model).items()},
            training=tuple(module.training for module in innermost(step.model).modules()),
            numerics=(
                torch.get_num_threads(),
                torch.get_float32_matmul_precision(),
                torch.are_deterministic_algorithms_enabled(),
                torch.backends.cudnn.deterministic,
            ),
        )


class Attacker:
    """Evaluates twins with weights that it is sent. It holds a model, and nothing that could not be sent again."""

    def __init__(self, make_model: Callable[[], nn.Module]) -> None:
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._model = make_model().to(self._device)
        self._loaded = -1, -1  # the numbers of the work and of the weights
        self._step: Step  # of that work

    def ready(self) -> int:
        """The id of its process; an answer says that the attacker has started."""
        return os.getpid()

    def twin(self, published: tuple[Work, int, Any], t: int, k: int, piece: Any) -> tuple[Tensor, float, float]:
        """Generate the twin of chunk k of the batch of step t; `piece` is its images, labels and extra inputs.

        Returns:
            The images, as bytes if that loses nothing, and when the work began and ended (Unix time).
        """
        began, (work, version, weights) = time.time(), published
        if self._loaded[0] != work.number:
            self._step = self._begin(work)
        if self._loaded != (work.number, version):
            unflatten(torch.from_numpy(weights.copy()).to(self._device), list(tensors_of(self._model).values()))
            self._loaded = work.number, version
        images, labels, extra = piece
        chunk = next(self._step.chunks(Chunked(1, [Batch(images, labels, extra=extra)])))
        twin = self._step.attack(work.attack, t, k, chunk).images
        if images.dtype == torch.uint8 and work.attack.exact_as_bytes(from_images=False):
            levels = twin.mul(255).round_().to(torch.uint8)
            if torch.equal(from_levels(levels, chunk.images, work.attack, self._step.attack_seed(t, k)), twin):
                twin = levels
        return copied(twin), began, time.time()

    def _begin(self, work: Work) -> Step:
        """Compute as the learner does."""
        threads, matmul, deterministic, torch.backends.cudnn.deterministic = work.numerics
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(matmul)
        torch.use_deterministic_algorithms(deterministic)
        shapes = [(name, tensor.shape) for name, tensor in tensors_of(self._model).items()]
        wanted = [(name, form[0]) for name, form in work.forms.items()]
        modules = list(innermost(self._model).modules())
        if shapes != wanted or len(modules) != len(work.training):
            other = min((name for name, _ in {*shapes} ^ {*wanted}), default="their layers")
            raise ValueError(
                f"make_model makes another model than the method has (they differ in {other}): make both with one "
                "function, which splits its BatchNorm too"
            )
        for module, training in zip(modules, work.training, strict=True):
            module.training = training
        for name, own in tensors_of(self._model).items():
            shape, strides, dtype = work.forms[name]
            own.data = torch.empty_strided(shape, strides, dtype=dtype, device=self._device)
        loss = work.loss.to(self._device) if isinstance(work.loss, nn.Module) else work.loss
        step = Step(self._model, loss, work.common, work.twin_branch)
        step.place = work.place
        return step


def form_of(tensor: Tensor) -> tuple[torch.Size, tuple[int, ...], torch.dtype]:
    """The shape, strides and dtype of a dense copy of a tensor, whose kernels round alike."""
    return tensor.shape, torch.empty_like(tensor, device="meta").stride(), tensor.dtype


def copied(values: Any) -> Any:
    """Copies of the tensors of a structure on the host: pickled, a part of a batch would bring the whole batch."""
    return tree_map_only(Tensor, lambda tensor: tensor.detach().clone().cpu(), values)


def from_levels(levels: Tensor, images: Tensor, attack: Attack, seed: int) -> Tensor:
    """The twins of 8-bit images from their 8-bit levels, to the bit that the attack gives them."""
    return attack.along(images, levels.to(images) - images.mul(255).round_(), seed)
