"""examples/slurm.sbatch under a real SLURM of two nodes: preempted, requeued, and bitwise the same at the end."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from support import slurm, tiny
from support.waiting import has_taken, until

ROOT = Path(__file__).parents[2]
# One rank on each node, so that twins cross from one to the other.
OPTIONS = ["--ntasks-per-node=1", "--cpus-per-task=1", "--gpus-per-node=0"]
STEPS = 150
LAYOUT = ["--method", "conadv", "--layout", "clean | adv+attack"]
SMALL = ["--width", "8", "--data.train-size", "20", "--batch-size", "20", "--chunk-size", "10", "--threads", "1"]
WORDS = ["digits", *LAYOUT, *SMALL, "--epochs", str(STEPS)]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        bool(slurm.missing()), reason=f"needs {', '.join(slurm.missing())}: install slurm-wlm and munge"
    ),
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[slurm.Cluster]:
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    started = slurm.Cluster(folder)
    yield started
    started.close()
    shutil.rmtree(folder)


def submit(cluster: slurm.Cluster, run: Path) -> int:
    """The example as it is, on ranks without GPUs."""
    said = f"--output={run}.txt"
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    variables = {"RUN": str(run), "PATH": path, "OMP_NUM_THREADS": "1"}
    return cluster.submit(ROOT / "examples" / "slurm.sbatch", [*OPTIONS, said], WORDS, variables)


def said(run: Path) -> str:
    return Path(f"{run}.txt").read_text()


def wait_for_step(cluster: slurm.Cluster, job: int, run: Path, step: int) -> None:
    living = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING")
    until(
        lambda: has_taken(run, step),
        lambda: f"{said(run)}\n{cluster.logs()}",
        alive=lambda: cluster.state(job)["JobState"] in living,
        every=0.2,
    )


def restarts(cluster: slurm.Cluster, job: int) -> int:
    return int(cluster.state(job)["Restarts"])


def test_a_preempted_job_ends_bitwise_as_if_it_had_not_been(cluster, tmp_path):
    whole, preempted = tmp_path / "whole", tmp_path / "preempted"
    assert cluster.wait_for_end(submit(cluster, whole))["JobState"] == "COMPLETED", said(whole)

    job = submit(cluster, preempted)
    wait_for_step(cluster, job, preempted, 5)
    assert restarts(cluster, job) == 0
    cluster.run("scancel", "--signal=TERM", str(job))
    ended = cluster.wait_for_end(job)

    text = said(preempted)
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "1"), text
    assert text.count("stopped after step") == 1, text
    assert tiny.equal(tiny.state(preempted), tiny.state(whole))
    assert len((preempted / "metrics.jsonl").read_text().splitlines()) == STEPS
