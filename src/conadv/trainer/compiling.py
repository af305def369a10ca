"""`--compile`: the passes of a run as compiled graphs, one for each way through the branches of a model.

attack ──► adv, no statistics        clean pass ──► main, statistics        adversarial pass ──► adv, statistics
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


def compile_model(model: nn.Module, backend: str = "inductor") -> None:
    """Compile the forward and backward passes of a model, in place: its names, and those of a checkpoint, stay.

    A run has chunks of one size, so each graph is made for that size. What a model draws (dropout) is drawn as without
    a compiler.

    Args:
        model: the network, after `split_batchnorm`.
        backend: of torch.compile.
    """
    options: dict[str, Any] | None = {"fallback_random": True} if backend == "inductor" else None
    # `model.compile()` would leave out a forward method of torch.nn itself, such as that of nn.Sequential.
    compiled: Any = torch.compile(model.forward, backend=backend, dynamic=False, options=options)
    model.forward = compiled


@contextmanager
def not_compiled(model: nn.Module) -> Iterator[None]:
    """Within, the passes of a model are those of before it was compiled."""
    compiled = vars(model).pop("forward", None)
    try:
        yield
    finally:
        if compiled is not None:
            model.forward = compiled


@contextmanager
def compiler_errors() -> Iterator[None]:
    """Within, a graph that cannot be compiled is a ValueError of one line."""
    try:
        yield
    except RuntimeError as error:
        if not type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
            raise
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise ValueError(f"--compile: {' '.join(lines[:2])}: drop --compile, or mend what it names") from error
