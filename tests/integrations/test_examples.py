"""The examples with other libraries run and learn, so do they without us, and the docs show what differs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from example_diffs import DOCS, ROOT, diff, plain, written

LIBRARIES = {
    "lightning_loop.py": "lightning",
    "fabric_loop.py": "lightning",
    "accelerate_loop.py": "accelerate",
    "transformers_trainer.py": "transformers",
    "timm_loop.py": "timm",
    "compile_loop.py": "torch",
    "fsdp2_loop.py": "torch",
    "resume_loop.py": "torchdata",
}
each = pytest.mark.parametrize("name", LIBRARIES)


# PyTorch 2.13 aborts at the exit of some programs with FSDP2 on gloo, when all is done: 3 of 24 runs of the plain loop
# without conadv.
_ABORTED_AT_EXIT = "terminate called without an active exception"


def run(script: Path, folder: Path, *words: str, by: str = "torchvision_ops.py") -> subprocess.CompletedProcess[str]:
    folder.mkdir(exist_ok=True)
    ranks = ["-m", "torch.distributed.run", "--nproc-per-node", "2"] if script.name == "fsdp2_loop.py" else []
    command = [sys.executable, "-W", "ignore", *ranks, str(ROOT / "tests" / "support" / by), str(script), *words]
    paths = os.pathsep.join([str(ROOT / "examples"), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    for _ in range(5):
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=250)
        if _ABORTED_AT_EXIT not in done.stderr:
            break
    return done


def learn(script: Path, folder: Path, by: str = "torchvision_ops.py") -> str:
    done = run(script, folder, by=by)
    assert done.returncode == 0, done.stderr
    accuracy = next(line for line in done.stdout.splitlines() if line.startswith("test accuracy"))
    assert float(accuracy.split()[2]) > 80
    assert (folder / "model.pt").exists()
    return done.stdout


@pytest.mark.parametrize("name", [name for name in LIBRARIES if name != "resume_loop.py"])  # which has its own test
def test_runs_and_learns(name: str, tmp_path: Path) -> None:
    pytest.importorskip(LIBRARIES[name], reason=f"{LIBRARIES[name]} is not installed: make integrations")
    learn(ROOT / "examples" / name, tmp_path)


@pytest.mark.parametrize("name", ["lightning_pool.py", "accelerate_pool.py"])
def test_runs_and_learns_with_a_pool(name: str, tmp_path: Path) -> None:
    said = learn(ROOT / "examples" / name, tmp_path, by="started_pool.py")
    assert int(said.split("twins of the pool ")[1].split()[0]) > 0


@pytest.mark.slow
@each
def test_runs_and_learns_without_us(name: str, tmp_path: Path) -> None:
    pytest.importorskip(LIBRARIES[name], reason=f"{LIBRARIES[name]} is not installed: make integrations")
    script = tmp_path / name
    script.write_text(plain((ROOT / "examples" / name).read_text()))
    assert "conadv." not in script.read_text()
    learn(script, tmp_path / "run")


def test_the_loop_resumes_where_it_was_interrupted(tmp_path: Path) -> None:
    pytest.importorskip("torchdata", reason="torchdata is not installed: make integrations")
    script = ROOT / "examples" / "resume_loop.py"
    learn(script, tmp_path / "whole")
    assert "interrupted after step 37" in run(script, tmp_path / "resumed", "37").stderr
    learn(script, tmp_path / "resumed")
    one, other = (torch.load(tmp_path / folder / "model.pt") for folder in ("whole", "resumed"))
    assert all(torch.equal(other[key], value) for key, value in one.items())


@each
def test_the_difference_stays_small(name: str) -> None:
    assert sum(line[0] in "+-" for line in diff(name).splitlines()) <= 12


@each
def test_the_script_without_us_is_a_script(name: str) -> None:
    """A marked line that a formatter broke in two would leave one half of it behind."""
    compile(plain((ROOT / "examples" / name).read_text()), name, "exec")


def test_the_docs_show_the_differences() -> None:
    page = DOCS.read_text()
    assert page == written(page), "run python tools/example_diffs.py"
    assert all(f"# examples/{name}" in page for name in LIBRARIES)
