"""Several GPUs with NCCL: every layout trains to its end, with the numbers of one GPU, also one kernel at a time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support import tiny

CASES = [
    pytest.param(2, "vanilla", 0, "none", marks=pytest.mark.gpus(2)),
    pytest.param(2, "recycled", 1, "clean | adv", marks=pytest.mark.gpus(2)),
    pytest.param(2, "disadv", 0, "clean | adv+attack", marks=pytest.mark.gpus(2)),
    pytest.param(3, "conadv", 1, "clean | adv | attack", marks=pytest.mark.gpus(3)),
    pytest.param(3, "conadv", 3, "attack | clean | adv", marks=pytest.mark.gpus(3)),
    pytest.param(6, "conadv", 1, "clean | adv | attack", marks=pytest.mark.gpus(6)),
]


def train(folder: Path, ranks: int, environment: dict[str, str], **changes: Any) -> None:
    words = [*tiny.words(**changes), "--run", str(folder), "--quiet"]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    path = f"{Path(tiny.__file__).parents[1]}:{os.environ.get('PYTHONPATH', '')}"
    command = [sys.executable, *launcher, "-m", "conadv", "train", *words]
    subprocess.run(command, check=True, env={**os.environ, **environment, "PYTHONPATH": path}, timeout=280)


@pytest.mark.parametrize("blocking", ["0", "1"], ids=["", "one kernel at a time"])
@pytest.mark.parametrize(("ranks", "method", "delay", "layout"), CASES)
def test_a_layout_trains_like_one_gpu(ranks, method, delay, layout, blocking, tmp_path):
    """CUDA_LAUNCH_BLOCKING makes each rank run its kernels one by one: a wrong order of communication hangs."""
    changes = {"method": method, "delay": delay, "deterministic": "true"}
    train(tmp_path / "one", 1, {}, **changes)
    train(tmp_path / "all", ranks, {"CUDA_LAUNCH_BLOCKING": blocking}, layout=layout, **changes)
    assert tiny.distance(tiny.state(tmp_path / "all"), tiny.state(tmp_path / "one")) < 1e-9
