"""Short runs under torchrun whose steps are recorded, for pictures of what each rank does."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path


def profile_run(folder: Path, method: str, layout: str, ranks: int, fields: Mapping[str, object]) -> None:
    """Train on some ranks of this machine, with one thread each, and record steps for `conadv timeline`.

    Args:
        folder: the run folder to write; its traces are in FOLDER/traces.
        method: as in a recipe.
        layout: as in a recipe.
        ranks: number of processes.
        fields: further fields of the recipe `digits`, by dotted name; `profile` says how many steps to record.
    """
    values = {"method": method, "layout": layout, "threads": 1, "checkpoint.every": 1000, **fields}
    flags = [word for name, value in values.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    words = [*launcher, "-m", "conadv", "train", "digits", "--quiet", "--run-dir", str(folder), *flags]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(f"{method} on {ranks} ranks failed: {_last_line(done.stderr)}")


def _last_line(text: str) -> str:
    """The line that says what went wrong, among those that torchrun adds."""
    lines = [line for line in text.splitlines() if line.startswith("error: ")] or text.split("\n") or [""]
    return lines[-1].removeprefix("error: ")
