"""The examples run, and adding the method to a loop stays a matter of a few lines."""

import difflib
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_the_diff_is_short():
    before, after = ((EXAMPLES / name).read_text().splitlines() for name in ("plain_loop.py", "conadv_loop.py"))
    changed = [line for line in difflib.unified_diff(before, after, n=0) if line[0] == "+" and line[:3] != "+++"]
    assert 0 < len(changed) < 12


@pytest.mark.parametrize("name", ["plain_loop.py", "conadv_loop.py"])
def test_runs_and_learns(name, tmp_path):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    words = [sys.executable, str(EXAMPLES / name)]
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split()[2]) > 85
    assert (tmp_path / "model.pt").exists()


def test_demo_writes_its_table_and_picture(tmp_path):
    words = [sys.executable, str(EXAMPLES / "demo.py"), "--out", str(tmp_path / "out"), "--seeds", "2", "--steps", "3"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    for method in ("vanilla", "disadv", "conadv", "recycled"):
        assert method in done.stdout
    assert (tmp_path / "out" / "demo.png").read_bytes().startswith(b"\x89PNG")
