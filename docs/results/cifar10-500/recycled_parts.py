"""From ConAdv to recycled in steps of one difference each: which of them costs accuracy?

OMP_NUM_THREADS=1 python docs/results/cifar10-500/recycled_parts.py --path ../shared/data/cifar10 --seeds 0 1 --out FILE

ConAdv attacks the images of its own batch from a random start, through the adversarial BatchNorm branch. Recycled
differs in three ways: its attack starts at the image, goes through the main branch, and its twins are those of the
batch before. The first variants change one of them each. The others try to mend recycled at no cost: a random start of
its twins, and learning from them through the main branch, which made them (with the statistics of the twins' own
batch; the running ones are those of the images). Everything else is as in study.toml. Appends one JSON object per run
to FILE and skips those that it has; ours are in recycled_parts.jsonl.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from torch import Tensor

import conadv
from conadv.core.handoff import Twin
from conadv.core.learner import Learner
from conadv.core.parts import Part

SETTINGS = {
    "data.train_size": 500,
    "data.image_size": 16,
    "attack.epsilon": "4/255",
    "schedule.warmup_epochs": 20,
    "optimizer.lr": 5,
    "batch_size": 250,
    "chunk_size": 125,
    "epochs": 100,
    "eval_every": 0,
    "threads": 1,
}


@dataclass(frozen=True)
class ThroughMain(conadv.PGD):
    """PGD through the main branch, as recycled takes its gradient."""

    branch: str = "main"


@dataclass(frozen=True)
class RandomStart(conadv.PGD):
    """PGD whose step along a given gradient begins at a random point of the ball instead of the image."""

    def along(self, images: Tensor, gradient: Tensor, seed: int = 0) -> Tensor:
        return self._step(images, self._start(images, seed), gradient)


def main_part(learner: Learner, twin: Twin, weight: float, share: float = 1.0) -> Part:
    """The part with the twins of a chunk, as `Learner.adv_part` builds it, but through the main branch."""
    return Part("main", twin.images, twin.labels, weight / share, twin.call, share, tracked=False, adversarial=True)


FROM_IMAGE = {"attack.random_start": 0}
ONE_BRANCH = "with one branch"
VARIANTS: dict[str, tuple[type[conadv.PGD], dict[str, Any]]] = {
    "ConAdv": (conadv.PGD, {"method": "conadv"}),
    "ConAdv from the image": (conadv.PGD, {"method": "conadv", **FROM_IMAGE}),
    "ConAdv through main": (ThroughMain, {"method": "conadv"}),
    "ConAdv from the image through main": (ThroughMain, {"method": "conadv", **FROM_IMAGE}),
    "recycled": (conadv.PGD, {"method": "recycled"}),
    "recycled with a random start": (RandomStart, {"method": "recycled"}),
    f"recycled {ONE_BRANCH}": (conadv.PGD, {"method": "recycled"}),
    f"ConAdv {ONE_BRANCH}": (ThroughMain, {"method": "conadv"}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", required=True, help="CIFAR-10, as --data.path of conadv train takes it")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="one run of each variant per seed")
    parser.add_argument("--out", type=Path, required=True, help="the file to append to")
    arguments = parser.parse_args()
    lines = arguments.out.read_text().splitlines() if arguments.out.exists() else []
    done = {(line["variant"], line["seed"]) for line in map(json.loads, lines)}
    for seed in arguments.seeds:
        for variant, (attack, settings) in VARIANTS.items():
            if (variant, seed) in done:
                continue
            chosen = {**SETTINGS, **settings, "seed": seed, "data.path": arguments.path}
            learnt = patch.object(Learner, "adv_part", main_part) if ONE_BRANCH in variant else nullcontext()
            with patch("conadv.core.pgd.PGD", attack), learnt, tempfile.TemporaryDirectory() as folder:
                summary = conadv.train(conadv.load_recipe("digits", chosen), Path(folder) / "run")
            kept = {key: summary[key] for key in ("test_top1", "train_top1", "gap", "steps")}
            with arguments.out.open("a") as file:
                print(json.dumps({"variant": variant, "seed": seed, **kept}), file=file, flush=True)


if __name__ == "__main__":
    main()
