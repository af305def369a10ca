"""Promise: a node of a real Ray cluster that is stopped in the middle changes nothing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
# Networks and processes of their own: only loopback is there, and whatever happens no process is left.
ALONE = ["unshare", "--user", "--map-root-user", "--net", "--pid", "--fork", "--mount-proc", "--kill-child"]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_node_that_is_stopped_changes_nothing():
    if shutil.which("unshare") is None or subprocess.run([*ALONE, "true"], capture_output=True).returncode:
        pytest.skip("needs unshare and user namespaces")
    folder = tempfile.mkdtemp(prefix="ray-")  # short, since Unix sockets have at most 107 characters
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(TESTS)}
    words = [*ALONE, sys.executable, str(TESTS / "support" / "ray_cluster.py"), folder]
    try:
        done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=1000)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    print(f"happened: {found}")  # pytest -s: the numbers of docs/log.md
    assert found["same"]
    assert len(found["lost"]) >= 1
    assert max(found["nodes"]) >= 3
    assert found["twins_pool"] >= 4 * 3 + 4 * 3  # before the node was stopped, and after another one joined
    assert found["twins_pool"] + found["twins_here"] == 4 * found["steps"]
