"""A flipped bit or a truncation in any file of a run, as a function of a seed; then the run is resumed.

`exercise` returns "same bits" where the resumed run ends as the undisturbed one, and "refused" where one line says why
it does not go on. A line of metrics may be missing where a line says so. If metrics.jsonl was the damaged file, a
number in it may be another one, since it has no checksum. Everything else is an error.
"""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import tempfile
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from conadv import cli
from support import tiny

SMALL: dict[str, Any] = {"data.name": "synthetic", "data.train_size": 8, "data.image_size": 8, "data.channels": 1}
SMALL |= {"batch_size": 4, "chunk_size": 2, "checkpoint.every": 2, "checkpoint.keep": 2}
RECIPES: list[dict[str, Any]] = [
    {"method": "conadv", "delay": 2},
    {"method": "recycled", "eval_every": 1},
    {"method": "vanilla", "optimizer.name": "adamw"},
]
# Metrics that are a function of the recipe alone.
NUMBERS = ("step", "epoch", "lr", "loss", "clean_loss", "adv_loss", "skipped")
_STOP = 4  # of 6 steps


@cache
def template(number: int) -> tuple[Path, Path]:
    """A run that was stopped on its way, and the same run to its end."""
    parent = Path(tempfile.mkdtemp(prefix="conadv-flips-"))
    fields = {**SMALL, **RECIPES[number]}
    words = ["--run", str(parent / "half"), "--quiet", "--max-steps", str(_STOP)]
    assert _main(["train", *tiny.words(**fields), *words])[0] == 0
    (parent / "half" / "summary.json").unlink()
    shutil.copytree(parent / "half", parent / "whole")
    status, said = _resume(parent / "whole")
    assert status == 0, said
    return parent / "half", parent / "whole"


def build(seed: int, root: Path) -> tuple[str, Path]:
    """Write the damaged run of this seed below `root`: the damage, and the folder."""
    random = Random(seed)
    half, _ = template(seed % len(RECIPES))
    run = root / "run"
    shutil.copytree(half, run)
    files = sorted(path for path in run.rglob("*") if path.is_file())
    file = random.choice(files)
    content = bytearray(file.read_bytes())
    kind = random.choice(("flip", "flip", "truncation"))
    if kind == "flip":
        content[random.randrange(len(content))] ^= 1 << random.randrange(8)
    else:
        del content[random.randrange(len(content)) :]
    file.write_bytes(content)
    return f"{kind} in {file.name}", run


def exercise(seed: int, run: Path) -> str:
    """Resume a damaged run, and compare it with the undisturbed one."""
    half, whole = template(seed % len(RECIPES))
    may_differ = (run / "metrics.jsonl").read_bytes() != (half / "metrics.jsonl").read_bytes()
    status, said = _resume(run)
    assert "Traceback" not in said, said
    complaints = [line for line in said.splitlines() if line.startswith("error: ")]
    if status:
        assert (status, len(complaints)) == (2, 1), f"status {status}: {said}"
        return "refused"
    assert not complaints, said
    assert tiny.equal(tiny.state(run), tiny.state(whole)), f"other weights: {said}"
    if [line["step"] for line in _metrics(run)] != [line["step"] for line in _metrics(whole)]:
        assert "metrics.jsonl was damaged" in said, f"other metrics: {said}"
    wrong = [line for line in _metrics(run) if line not in _metrics(whole)]
    assert len(wrong) <= may_differ, f"wrong metrics: {said}"
    return "same bits"


def _resume(run: Path) -> tuple[int, str]:
    return _main(["train", "--resume", str(run), "--model", "support.tiny:net", "--max-steps", "none", "--quiet"])


def _main(words: list[str]) -> tuple[int, str]:
    """The status of a command, and what it said."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        status = cli.main(words)
    return status, said.getvalue()


def _metrics(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: line[key] for key in NUMBERS if key in line} for line in lines]
