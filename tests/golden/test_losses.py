"""Losses that a refactor must reproduce: a short run of each method, against the losses that were written down.

They say that nothing changed, not that it is right (tests/contracts says that). When numbers are meant to change, write
them anew with `python tests/golden/test_losses.py` and say why in the commit.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import pytest

from conadv.config import load_recipe, override
from conadv.trainer.metrics import read_metrics
from conadv.trainer.train import train_recipe as train

FILE = Path(__file__).with_name("losses.json")
# Some of the losses were written down as float32, which rounds to 6e-8. Other instruction sets (SSE to AVX-512) and
# PyTorch 2.8 to 2.15 change them by 2e-10 at most.
TOLERANCE = 1e-7
METHODS = {
    "vanilla": {"method": "vanilla"},
    "disadv": {"method": "disadv"},
    "conadv": {"method": "conadv"},
    "conadv, delay 2": {"method": "conadv", "delay": 2},
    "recycled": {"method": "recycled"},
}
# float64, so that another machine's order of additions does not show.
SHORT = {
    "batch_size": 40,
    "chunk_size": 20,
    "max_steps": 6,
    "precision": "float64",
    "checkpoint.every": 6,
    "threads": 1,
}


def losses(name: str, folder: Path) -> list[float]:
    train(override(load_recipe("digits"), {**SHORT, **METHODS[name]}), folder / "run", None, quiet=True)
    return [line["loss"] for line in read_metrics(folder / "run" / "metrics.jsonl")]


@pytest.mark.parametrize("name", METHODS)
def test_losses_are_those_written_down(name, tmp_path):
    assert losses(name, tmp_path) == pytest.approx(json.loads(FILE.read_text())[name], rel=TOLERANCE)


if __name__ == "__main__":
    written = {}
    for name in METHODS:
        with tempfile.TemporaryDirectory() as folder:
            written[name] = losses(name, Path(folder))
    FILE.write_text(json.dumps(written, indent=1) + "\n")
    sys.exit(0)
