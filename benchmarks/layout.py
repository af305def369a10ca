"""The time of layouts: roles on ranks of their own against vanilla on as many ranks, each rank on a core or GPU.

    python benchmarks/layout.py --ranks 2 --rounds 5

Each candidate is a short `conadv train` under torchrun. They take turns, and the time of a candidate is that of the
median step after the first few, from metrics.jsonl.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from alternate import Seconds, arguments, compare, report

# Method, layout and chunks of a batch for each number of ranks: every rank has one chunk.
CANDIDATES = {
    2: {
        "vanilla": ("vanilla", "clean", 2),
        "disadv": ("disadv", "clean | adv+attack", 1),
        "recycled": ("recycled", "clean | adv", 1),
    },
    3: {"vanilla": ("vanilla", "clean", 3), "conadv": ("conadv", "clean | adv | attack", 1)},
}
WARMUP = 5


def train(folder: Path, ranks: int, method: str, layout: str, fields: dict[str, object]) -> float:
    """The seconds of the median step of one run."""
    fields = {"threads": 1, "checkpoint.every": 1000, **fields}
    words = [word for key, value in fields.items() for word in (f"--{key.replace('_', '-')}", str(value))]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m", "conadv", "train"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    named = ["--method", method, "--layout", layout, "--run-dir", str(folder), "--quiet"]
    subprocess.run(
        [sys.executable, *launcher, "digits", *named, *words], env=environment, stdout=subprocess.DEVNULL, check=True
    )
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    ends = [line["seconds"] for line in lines if "loss" in line]
    return statistics.median(after - before for before, after in zip(ends[WARMUP:], ends[WARMUP + 1 :], strict=False))


def main() -> None:
    given = arguments(__doc__ or "", ranks=2, rounds=5, steps=20, model="resnet20", width=16, chunk_size=64)
    if given.ranks not in CANDIDATES:
        raise SystemExit(f"error: --ranks is {given.ranks} but must be one of {', '.join(map(str, CANDIDATES))}")
    candidates = CANDIDATES[given.ranks]
    laps: Seconds = {name: [] for name in candidates}
    with TemporaryDirectory() as folder:
        for number in range(given.rounds):
            order = [*candidates, *candidates][number % len(candidates) :][: len(candidates)]
            for name in order:
                method, layout, chunks = candidates[name]
                fields = {
                    "model": given.model,
                    "width": given.width,
                    "chunk_size": given.chunk_size,
                    "batch_size": chunks * given.chunk_size,
                    "data.name": "synthetic",
                    "data.train_size": 4 * given.chunk_size,
                    "max_steps": given.steps + WARMUP,
                    "epochs": given.steps + WARMUP,
                    "schedule.warmup_epochs": 0,
                }
                laps[name].append(train(Path(folder, f"{name}-{number}"), given.ranks, method, layout, fields))
                print(f"round {number + 1}/{given.rounds}: {name} {1e3 * laps[name][-1]:.1f} ms", file=sys.stderr)
    ratios = [compare(laps, name, "vanilla") for name in candidates if name != "vanilla"]
    report(ratios, given.json, ranks=given.ranks, cores=os.cpu_count(), chunk=given.chunk_size)


if __name__ == "__main__":
    main()
