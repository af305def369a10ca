"""`--compile`: torch.compile for the passes of a run, with one graph for each way through the BatchNorm branches.

attack ──► adv, no statistics        clean pass ──► main, statistics        adversarial pass ──► adv, statistics
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


def compile_model(model: nn.Module, backend: str = "inductor") -> None:
    """Compile the forward and backward passes of a model in place; the names of its parameters stay.

    All chunks of a run have the same size, so shapes are static. Random numbers, as of dropout, are the same as without
    compilation.

    Args:
        model: the network, after `split_batchnorm`.
        backend: the backend of torch.compile.
    """
    options: dict[str, Any] | None = {"fallback_random": True} if backend == "inductor" else None
    # `model.compile()` does not compile the forward method of a torch.nn class, such as nn.Sequential.
    compiled: Any = torch.compile(model.forward, backend=backend, dynamic=False, options=options)
    model.forward = compiled


@contextmanager
def not_compiled(model: nn.Module) -> Iterator[None]:
    """Use the original forward method of a compiled model within the context."""
    compiled = vars(model).pop("forward", None)
    try:
        yield
    finally:
        if compiled is not None:
            model.forward = compiled


@contextmanager
def compiler_errors() -> Iterator[None]:
    """Turn errors of the compiler within the context into a ValueError of one line."""
    try:
        yield
    except RuntimeError as error:
        if not type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
            raise
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise ValueError(f"--compile: {' '.join(lines[:2])}: drop --compile, or fix what it names") from error
