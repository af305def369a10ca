"""As a script, in a network namespace of its own: a Ray cluster of a head and two worker nodes; one is stopped.

Its only network is loopback: no other machine can reach it. Prints what happened as JSON, on the last line.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import socket
import struct
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch

import conadv
from contracts.test_pool_promise import STEPS, make_model, train

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


def wait_until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 300
    while not true():
        assert time.monotonic() < end
        time.sleep(0.2)


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
    wait_until(connected)
    with (
        conadv.ray.Pool(make_model(), attackers=2, address=ADDRESS, wait=60) as pool,
        warnings.catch_warnings(record=True) as told,
    ):
        warnings.simplefilter("always")
        workers = []
        for count in (
            2,
            3,
        ):  # one after the other: nodes of one machine that start at the same time take the same files
            workers.append(worker_node())
            wait_until(lambda count=count: alive(pool) == count)
        wait_until(lambda: len(pool._ready()) == 2)
        nodes: list[int] = []

        def each(t: int) -> None:
            if t == 4:
                workers[0].terminate()
                workers[0].wait()
            if t == 8:
                workers.append(worker_node())  # the attacker that was lost starts again there
                wait_until(lambda: len(pool._ready()) == 2)
            nodes.append(alive(pool))

        weights, state, counts = train(pool, each, chunk_size=2)
    alone = train(chunk_size=2)
    same = all(
        torch.equal(mine[name], theirs[name])
        for mine, theirs in zip((weights, state), alone[:2], strict=True)
        for name in mine
    )
    lost = [str(each.message) for each in told if "an attacker was lost" in str(each.message)]
    return {"same": same, "steps": STEPS, "nodes": nodes, "lost": lost, **counts}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
