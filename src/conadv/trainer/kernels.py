"""How PyTorch computes a run: deterministic kernels, TF32, cuDNN's benchmark mode, and `--compile`.

A compiled run has one graph for each way through the BatchNorm branches:

attack ──► adv, no statistics        clean pass ──► main, statistics        adversarial pass ──► adv, statistics
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.backends import cudnn

# The module has its setting as a property, which type checkers do not see.
_FILL: Any = torch.utils.deterministic


@contextmanager
def kernels(device: torch.device, deterministic: bool) -> Iterator[None]:
    """Apply the settings of a run within the context.

    Args:
        device: Where the run computes. TF32 and cuDNN's settings are changed on CUDA only.
        deterministic: Use only deterministic kernels; an operation without one raises a ValueError. Otherwise cuDNN
            tries its kernels once for each shape and takes the fastest (benchmark mode), and float32 numbers are
            multiplied on tensor cores, with 10 bits of their mantissa (TF32).
    """
    on_cuda = device.type == "cuda"
    before = torch.get_deterministic_debug_mode(), _FILL.fill_uninitialized_memory
    of_cuda = cudnn.deterministic, cudnn.benchmark, cudnn.allow_tf32, torch.get_float32_matmul_precision()
    try:
        if deterministic:
            # cuBLAS reads this when it starts: a program that used it before must set it itself.
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.set_deterministic_debug_mode("error")
            _FILL.fill_uninitialized_memory = False  # only needed by programs that read uninitialized memory
        if on_cuda:
            cudnn.deterministic, cudnn.benchmark, cudnn.allow_tf32 = deterministic, not deterministic, not deterministic
            torch.set_float32_matmul_precision("highest" if deterministic else "high")
        yield
    except RuntimeError as error:
        if not deterministic or "deterministic implementation" not in str(error):
            raise
        raise ValueError(f"--deterministic: {str(error).partition('.')[0]}: replace that layer, or drop it") from error
    finally:
        torch.set_deterministic_debug_mode(before[0])
        _FILL.fill_uninitialized_memory = before[1]
        if on_cuda:
            *of_cudnn, precision = of_cuda
            cudnn.deterministic, cudnn.benchmark, cudnn.allow_tf32 = of_cudnn
            torch.set_float32_matmul_precision(precision)


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
