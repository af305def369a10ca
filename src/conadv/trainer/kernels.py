"""How PyTorch computes a run: deterministic kernels, TF32, and cuDNN's benchmark mode."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.backends import cudnn


@contextmanager
def kernels(device: torch.device, deterministic: bool) -> Iterator[None]:
    """Use only deterministic kernels within the context, where others are a ValueError; or the fastest.

    Those are, on CUDA: cuDNN tries its kernels once for each shape (benchmark mode), and float32 numbers are multiplied
    on tensor cores, with 10 bits of their mantissa (TF32).
    """
    before = torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision()
    of_cudnn = cudnn.benchmark, cudnn.allow_tf32
    try:
        if deterministic:
            # cuBLAS reads this when it starts: a program that used it before must set it itself.
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
        if device.type == "cuda":
            cudnn.benchmark, cudnn.allow_tf32 = not deterministic, not deterministic
            torch.set_float32_matmul_precision("highest" if deterministic else "high")
        yield
    except RuntimeError as error:
        if not deterministic or "deterministic implementation" not in str(error):
            raise
        raise ValueError(f"{str(error).partition('.')[0]}: replace that layer, or drop --deterministic") from error
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.set_float32_matmul_precision(before[1])
        cudnn.benchmark, cudnn.allow_tf32 = of_cudnn
