"""The examples run, and adding the method to a loop stays a matter of a few lines."""

import difflib
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from support import tasks

EXAMPLES = Path(__file__).parents[1] / "examples"
SUPPORT = Path(__file__).parent / "support"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


def run(words: list[str], folder: Path, *before: str) -> str:
    """What Python prints with these words."""
    path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(SUPPORT.parent))))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": path}
    command = [*before, sys.executable, *words]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return done.stdout


def new_lines(one: str, other: str) -> int:
    """Lines of an example that the other one has not, wherever they stand and however they are indented."""
    texts = (re.sub(r"  # conadv.*", "", (EXAMPLES / name).read_text()) for name in (one, other))
    before, after = (Counter(line.strip() for line in text.splitlines() if line) for text in texts)
    return (after - before).total()


def changed_lines(one: str, other: str) -> int:
    before, after = ((EXAMPLES / name).read_text().splitlines() for name in (one, other))
    return sum(line[0] == "+" and line[:3] != "+++" for line in difflib.unified_diff(before, after, n=0))


def test_the_diff_is_short():
    assert 0 < changed_lines("plain_loop.py", "conadv_loop.py") < 12
    assert 0 < changed_lines("ddp_loop.py", "roles_loop.py") <= 15


@pytest.mark.parametrize(
    ("without", "lines"),
    [("conadv_loop.py", 11), ("ddp_loop.py", 12), ("lightning_loop.py", 12), ("accelerate_loop.py", 10)],
)
def test_a_pool_is_a_matter_of_a_few_lines(without, lines):
    name = "pool_loop.py" if without == "conadv_loop.py" else without.replace("_loop", "_pool")
    assert 0 < new_lines(without, name) <= lines


@pytest.mark.parametrize("name", ["plain_loop.py", "conadv_loop.py"])
def test_runs_and_learns(name, tmp_path):
    said = tasks.run_script(str(EXAMPLES / name), str(tmp_path))
    assert float(said.split()[2]) > 85
    assert (tmp_path / "model.pt").exists()


@pytest.mark.parametrize("name", ["pool_loop.py", pytest.param("ddp_pool.py", marks=pytest.mark.slow)])
def test_runs_and_learns_with_a_pool(name, tmp_path):
    ranks = [*TORCHRUN, "2"] if name == "ddp_pool.py" else []
    said = run([*ranks, str(SUPPORT / "started_pool.py"), str(EXAMPLES / name)], tmp_path)
    (accuracy,) = re.findall(r"accuracy ([0-9.]+)", said)
    twins = re.findall(r"of the pool ([0-9]+)", said)
    assert float(accuracy) > 85
    assert all(int(count) > 0 for count in twins) and len(twins) == (2 if ranks else 1)
    assert (tmp_path / "model.pt").exists()


@pytest.mark.parametrize("name", ["slurm.sbatch", "ray_slurm.sbatch"])
def test_a_batch_script_is_one(name):
    """Bash parses it, and SLURM's options stand where SLURM reads them: before the first command."""
    script = EXAMPLES / name
    subprocess.run(["bash", "-n", str(script)], check=True)
    lines = script.read_text().splitlines()
    options = [number for number, line in enumerate(lines) if line.startswith("#SBATCH --")]
    commands = [number for number, line in enumerate(lines) if line and not line.startswith("#")]
    assert lines[0] == "#!/bin/bash"
    assert options and max(options) < min(commands)


def test_runs_and_learns_on_three_ranks(pool, tmp_path):
    said, *others = pool.run(3, tasks.run_script, str(EXAMPLES / "roles_loop.py"), str(tmp_path))
    assert others == ["", ""]
    assert float(said.split()[2]) > 80
    assert (tmp_path / "model.pt").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp_loop.py", "roles_loop.py"])
def test_runs_and_learns_under_torchrun(name, tmp_path):
    said = run([*TORCHRUN, "3", str(EXAMPLES / name)], tmp_path)
    assert float(said.split()[2]) > 80
    assert (tmp_path / "model.pt").exists()


@pytest.mark.parametrize("cores", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_demo_writes_its_tables_and_picture(cores, tmp_path):
    if len(os.sched_getaffinity(0)) < cores:
        pytest.skip("needs 2 cores")
    out = tmp_path / "out"
    few = [] if cores > 1 else ["taskset", "-c", str(min(os.sched_getaffinity(0)))]
    words = [str(EXAMPLES / "demo.py"), "--out", str(out), "--seeds", "2", "--steps", "3", "--profile", "1"]
    said = run(words, tmp_path, *few)
    for arm in ("vanilla", "noise", "DisAdv", "ConAdv", "recycled"):
        assert f"\n{arm} " in said
    assert ("speed is left out" in said) == (cores == 1)
    assert ("recycled, clean | adv" in (out / "table.txt").read_text()) == (cores == 2)
    assert (out / "demo.png").read_bytes().startswith(b"\x89PNG")
