"""Vanilla whose loss weighs some chunks of each step more than the others: a control of `twin_share`, without any twin.

OMP_NUM_THREADS=1 python benchmarks/uneven_weights.py --path ../shared/data/cifar10 --seeds 0 1 2 3 4

Recycled with `twin_share = "1/4"` learns from all images and from twins of a quarter of them, half of the loss each. So
a quarter of the images counts more in each step, which makes the gradient noisier. Here half of the loss is the mean
over all chunks, and the other half the mean over a quarter of the same chunks, at the cost of vanilla. Everything else
is as in docs/results/cifar10-cost. Prints one JSON object per seed.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import patch

from cyclopts import Parameter

import conadv
from conadv.core.methods import Vanilla, Work
from conadv.core.share import TwinShare
from scripts import run_script

_SETTINGS = {
    "method": "vanilla",
    "data.train_size": 2000,
    "data.image_size": 12,
    "data.augment": "crop-flip",
    "schedule.warmup_epochs": "20%",
    "optimizer.name": "sgd",
    "optimizer.lr": 8,
    "batch_size": 1000,
    "chunk_size": 125,
    "epochs": 150,
    "eval_every": 0,
}


class UnevenVanilla(Vanilla):
    """Vanilla that gives half of the weight to all chunks, and the other half to the chunks of `share` alone."""

    __slots__ = ()
    share = TwinShare(1, 4)

    def _work(self, now: Any) -> Iterator[Work]:
        for parts, number, count in super()._work(now):
            extra = self._learner.has_twins(self.share, self.step, number) / float(self.share)
            yield [part._replace(weight=part.weight * (1 + extra) / 2) for part in parts], number, count


def main(
    *,
    path: Path,
    seeds: Annotated[list[int], Parameter(consume_multiple=True)] = [0],  # noqa: B006
    share: str = "1/4",
    max_steps: int | None = None,
) -> None:
    """Train once per seed.

    Args:
        path: CIFAR-10, as `--data.path` of conadv train takes it.
        seeds: one run each.
        share: the part of the chunks that gets the other half of the loss.
        max_steps: stop early.
    """
    UnevenVanilla.share = TwinShare.from_number(share)
    for seed in seeds:
        settings = {
            **_SETTINGS,
            "seed": seed,
            "data.path": str(path),
            **({"max_steps": max_steps} if max_steps else {}),
        }
        with patch("conadv.core.methods.Vanilla", UnevenVanilla), tempfile.TemporaryDirectory() as folder:
            summary = conadv.train(conadv.load_recipe("digits", settings), Path(folder) / "run")
        kept = ("test_top1", "train_top1", "gap", "steps")
        print(json.dumps({"share": share, "seed": seed, **{key: summary[key] for key in kept}}), flush=True)


if __name__ == "__main__":
    run_script(main)
