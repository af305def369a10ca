"""Promise: a node of a real Ray cluster that is stopped in the middle changes nothing.

The test runs this file as a script, in a network namespace of its own: a head and two worker nodes, one of which is
stopped. Their only network is loopback. The script prints what happened as JSON, on the last line.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import conadv
from contracts.test_pool_promise import STEPS, assert_equal, make_model, started, train
from support.waiting import until

# Networks and processes of their own: only loopback is there, and whatever happens no process is left.
ALONE = ["unshare", "--user", "--map-root-user", "--net", "--pid", "--fork", "--mount-proc", "--kill-child"]
RAY = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--node-ip-address=127.0.0.1"]
ADDRESS = "127.0.0.1:6379"
_SET_FLAGS, _UP = 0x8914, 1  # SIOCSIFFLAGS, IFF_UP


def use_loopback() -> None:
    """Switch the network device lo on, the only one of a new namespace."""
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, _SET_FLAGS, struct.pack("16sH14x", b"lo", _UP))


def start_node(*options: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([*RAY, *options], stdout=sys.stderr, start_new_session=True)


def worker_node() -> subprocess.Popen[bytes]:
    return start_node(f"--address={ADDRESS}", "--num-cpus=1")


def alive(pool: conadv.ray.Pool) -> int:
    return sum(node["Alive"] for node in pool._ray.nodes())


def connected() -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", 6379)) == 0


def main(folder: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    use_loopback()
    os.environ.update(RAY_worker_niceness="0", RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))
    start_node("--head", "--port=6379", "--num-cpus=0", "--include-dashboard=false", f"--temp-dir={folder}")
    until(connected)
    with (
        conadv.ray.Pool(make_model(), attackers=2, address=ADDRESS, wait=60) as pool,
        warnings.catch_warnings(record=True) as told,
    ):
        warnings.simplefilter("always")
        workers = []
        for count in (2, 3):  # not at the same time: nodes of one machine would take the same files
            workers.append(worker_node())
            until(lambda count=count: alive(pool) == count)
        started(pool)
        nodes: list[int] = []

        def each(t: int) -> None:
            if t == 4:
                workers[0].terminate()
                workers[0].wait()
            if t == 8:
                workers.append(worker_node())  # the attacker that was lost starts again there
                started(pool)
            nodes.append(alive(pool))

        weights, state, counts = train(pool, each, chunk_size=2)
    assert_equal((weights, state), train(chunk_size=2))
    lost = [str(each.message) for each in told if "an attacker was lost" in str(each.message)]
    return {"steps": STEPS, "nodes": nodes, "lost": lost, **counts}


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_node_that_is_stopped_changes_nothing():
    if shutil.which("unshare") is None or subprocess.run([*ALONE, "true"], capture_output=True).returncode:
        pytest.skip("needs unshare and user namespaces")
    folder = tempfile.mkdtemp(prefix="ray-")  # short, since Unix sockets have at most 107 characters
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
    words = [*ALONE, sys.executable, __file__, folder]
    try:
        done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=1000)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    print(f"happened: {found}")  # pytest -s: the numbers of docs/log.md
    assert len(found["lost"]) >= 1
    assert max(found["nodes"]) >= 3
    assert found["twins_pool"] >= 4 * 3 + 4 * 3  # before the node was stopped, and after another one joined
    assert found["twins_pool"] + found["twins_here"] == 4 * found["steps"]


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
