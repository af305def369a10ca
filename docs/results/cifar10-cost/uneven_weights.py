"""Vanilla whose loss weighs some chunks of each step more than the others: a control of `twin_share`, without any twin.

OMP_NUM_THREADS=1 python docs/results/cifar10-cost/uneven_weights.py --path ../shared/data/cifar10 --seeds 0 1 2 3 4

Recycled with `twin_share = "1/4"` learns from all images and from twins of a quarter of them, half of the loss each. So
a quarter of the images counts more in each step, which makes the gradient noisier. Here half of the loss is the mean
over all chunks, and the other half the mean over a quarter of the same chunks, at the cost of vanilla. Everything else
is as in study.toml. Prints one JSON object per seed; those of our run are in uneven_weights.jsonl.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import conadv
from conadv.core.methods import Vanilla, Work
from conadv.core.share import TwinShare

SETTINGS = {
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
    """Vanilla that gives half of the weight to all chunks, and the other half to a share of them alone."""

    __slots__ = ()
    share = TwinShare(1, 4)

    def _work(self, now: Any) -> Iterator[Work]:
        for parts, number, count in super()._work(now):
            extra = self._learner.has_twins(self.share, self.step, number) / float(self.share)
            yield [part._replace(weight=part.weight * (1 + extra) / 2) for part in parts], number, count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", required=True, help="CIFAR-10, as --data.path of conadv train takes it")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="one run each")
    arguments = parser.parse_args()
    for seed in arguments.seeds:
        recipe = conadv.load_recipe("digits", {**SETTINGS, "seed": seed, "data.path": arguments.path})
        with patch("conadv.core.methods.Vanilla", UnevenVanilla), tempfile.TemporaryDirectory() as folder:
            summary = conadv.train(recipe, Path(folder) / "run")
        kept = ("test_top1", "train_top1", "gap", "steps")
        print(json.dumps({"share": "1/4", "seed": seed, **{key: summary[key] for key in kept}}), flush=True)


if __name__ == "__main__":
    main()
