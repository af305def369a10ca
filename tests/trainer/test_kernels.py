"""Switches of PyTorch are set for a run, and put back after it."""

from __future__ import annotations

import os

import pytest
import torch
from torch.backends import cudnn

from conadv.trainer.kernels import kernels

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def _switches() -> tuple[object, ...]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        (cudnn.benchmark, cudnn.allow_tf32),
        torch.get_float32_matmul_precision(),
    )


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")


def test_on_a_gpu_the_fastest_kernels_are_chosen_and_afterwards_all_is_as_before():
    before = _switches()
    with kernels(CUDA, deterministic=False):
        assert (cudnn.benchmark, cudnn.allow_tf32) == (True, True)
        assert torch.get_float32_matmul_precision() == "high"
    assert _switches() == before
    with kernels(CPU, deterministic=False):
        assert _switches() == before


@pytest.mark.parametrize("device", [CPU, CUDA], ids=str)
def test_deterministic_kernels(device, monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    before = _switches()
    with kernels(device, deterministic=True):
        assert torch.are_deterministic_algorithms_enabled()
        assert not cudnn.benchmark
        assert device == CPU or (cudnn.allow_tf32, torch.get_float32_matmul_precision()) == (False, "highest")
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert _switches() == before


def test_an_operation_without_such_a_kernel_is_named():
    expected = pytest.raises(ValueError, match=r"^put_ .*: replace that layer, or drop --deterministic")
    with expected, kernels(CPU, deterministic=True):
        torch.zeros(2).put_(torch.tensor([0]), torch.ones(1), accumulate=False)
    assert not torch.are_deterministic_algorithms_enabled()
