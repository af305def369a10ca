"""The examples with other libraries run, and learn."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("name", "library"), [("lightning_loop.py", "lightning"), ("accelerate_loop.py", "accelerate")]
)
def test_runs_and_learns(name: str, library: str, tmp_path: Path) -> None:
    pytest.importorskip(library, reason=f"{library} is not installed: make integrations")
    words = [sys.executable, "-W", "ignore", str(ROOT / "tests" / "torchvision_ops.py"), str(ROOT / "examples" / name)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    accuracy = next(line for line in done.stdout.splitlines() if line.startswith("test accuracy"))
    assert float(accuracy.split()[2]) > 80
    assert (tmp_path / "model.pt").exists()
