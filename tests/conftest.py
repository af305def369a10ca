"""What every test starts from: one thread, a known seed, and no process group or default left behind by another.

A worker that a signal ends is reported with the name of the signal.
"""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
import torch.distributed as dist

from conadv.last_words import explained_status
from support.ranks import Pool, Run

# On a busy two-core machine two threads can be fifteen times slower than one.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# bfloat16 without AMX, as in a run.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
# Read by the datasets library when it is imported: nothing is asked of the hub, and its files are temporary.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HOME"] = tempfile.mkdtemp(prefix="conadv-hf-")
atexit.register(shutil.rmtree, os.environ["HF_HOME"], ignore_errors=True)
torch.set_num_threads(1)

# A busy machine is no failure. Examples are other ones in each run, so that half of the usual number is enough.
hypothesis.settings.register_profile("patient", deadline=None, max_examples=50)
hypothesis.settings.load_profile("patient")


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    if error:
        _print(node.config, f"worker {node.gateway.id} {explained_status(node.gateway._io.wait())}")


def _print(config: pytest.Config, line: str) -> None:
    """Print a line also with -q, which leaves out the header."""
    config.pluginmanager.getplugin("terminalreporter").write_line(line)


def pytest_collection_finish() -> None:
    """What is imported and collected by now stays to the end: no garbage collection has to walk it."""
    gc.freeze()


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Eight rank processes, started once: starting them is what costs."""
    ranks = Pool(8)
    yield ranks
    ranks.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Start `conadv train WORDS` on so many ranks of their own; however the test ends, none of them is left."""
    runs: list[Run] = []

    def begin(words: list[str], size: int, folder: str = "run", **settings: str) -> Run:
        path = tmp_path / folder
        place = [] if {"--resume", "team"} & set(words) else ["--run-dir", str(path)]
        runs.append(Run(path, [*words, *place], size, **settings))
        return runs[-1]

    yield begin
    for run in runs:
        run.close()


@pytest.fixture
def start_team(tmp_path: Path, start: Callable[..., Run]) -> Callable[..., Run]:
    """Start a team of three ranks in a loop without end."""
    return lambda **settings: start(["team", str(tmp_path / "team")], 3, "team", **settings)


@pytest.fixture(autouse=True)
def clean_slate() -> Iterator[None]:
    """A known seed before each test; after it, the environment and PyTorch's globals as they were."""
    environment, default = dict(os.environ), torch.get_default_dtype()
    torch.manual_seed(0)
    yield
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
        pytest.fail("the test left a process group behind")
    assert torch.get_default_dtype() == default, "the test left another default dtype behind"
    os.environ.clear()
    os.environ.update(environment)
