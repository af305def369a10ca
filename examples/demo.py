"""The demo: four ways to train on 100 handwritten digits at full batch, as a table and a picture.

    python examples/demo.py [--out DIR] [--seeds 3] [--steps 120]

A batch of all 100 training images leaves the weights little noise and few updates: large-batch training in small.
The other 1,697 digits are the test. Every figure is measured by this run.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from statistics import mean, stdev

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F

import conadv
from conadv.config import Recipe, load_recipe, override
from conadv.core.batch import to_pixels
from conadv.trainer.build import build_task
from conadv.trainer.checkpoint import checkpoints, read_checkpoint
from conadv.trainer.commands import train
from conadv.trainer.metrics import read_metrics
from conadv.trainer.state import load_model

METHODS = ("vanilla", "disadv", "conadv", "recycled")


def main() -> None:
    arguments = _arguments()
    out: Path = arguments.out
    shutil.rmtree(out / "runs", ignore_errors=True)
    steps = arguments.steps
    changes = {"epochs": steps, "checkpoint.every": steps, "threads": 1}
    recipe = override(load_recipe("digits"), changes)
    summaries: dict[str, list[dict[str, float]]] = {method: [] for method in METHODS}
    # Seed by seed and not method by method, so that the times of a round are taken under the same conditions.
    for seed in range(arguments.seeds):
        for method in METHODS:
            print(f"seed {seed}: {method} ...", flush=True)
            chosen = override(recipe, {"method": method, "seed": seed})
            summaries[method].append(train(chosen, out / "runs" / f"{method}-{seed}", None, quiet=True))
    table = _table(summaries)
    (out / "table.txt").write_text(table)
    (out / "summaries.json").write_text(json.dumps(summaries, indent=1))
    _picture(out, recipe)
    print(f"\n{table}\npicture: {out / 'demo.png'}    runs: {out / 'runs'}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("demo-out"), help="where to write (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each method (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=120, help="steps of a run (default: %(default)s)")
    return parser.parse_args()


def _table(summaries: dict[str, list[dict[str, float]]]) -> str:
    """Accuracy and gap as mean ± sample standard deviation over the seeds; time relative to the same seed's vanilla."""
    rows = [f"{'method':<10} {'test top-1, %':>15} {'gap, points':>15} {'time a step':>15}"]
    for method, runs in summaries.items():
        times = [run["seconds"] / first["seconds"] for run, first in zip(runs, summaries["vanilla"], strict=True)]
        columns = (
            _spread([run["test_top1"] for run in runs], 1),
            _spread([run["gap"] for run in runs], 1),
            _spread(times, 2) + " ×",
        )
        rows.append(f"{method:<10} " + " ".join(f"{column:>15}" for column in columns))
    seeds = len(summaries["vanilla"])
    return "\n".join([*rows, f"mean ± sample standard deviation over {seeds} seeds; one rank does everything"]) + "\n"


def _spread(values: list[float], digits: int) -> str:
    if len(values) < 2:
        return f"{mean(values):.{digits}f}"
    return f"{mean(values):.{digits}f} ± {stdev(values):.{digits}f}"


def _picture(out: Path, recipe: Recipe) -> None:
    """Left: images, their perturbations and twins under a trained model. Right: the curves of seed 0."""
    figure = plt.figure(figsize=(13, 5), layout="constrained")
    gallery, curves = figure.subfigures(1, 2, width_ratios=(1.1, 1))
    _draw_gallery(gallery, out, recipe)
    _draw_curves(curves, out)
    figure.savefig(out / "demo.png", dpi=130)
    plt.close(figure)


def _draw_gallery(figure, out: Path, recipe: Recipe) -> None:
    task = build_task(recipe, torch.device("cpu"))
    load_model(task.model, read_checkpoint(checkpoints(out / "runs" / "conadv-0" / "checkpoints")[0]).tensors)
    images = torch.from_numpy(task.data.train.images[:64]).permute(0, 3, 1, 2)
    pixels = to_pixels(images, torch.device("cpu"), torch.float32)
    labels = torch.from_numpy(task.data.train.labels[:64])
    epsilon = recipe.attack.epsilon
    twins = conadv.PGD(epsilon, random_start=0)(task.model, F.cross_entropy, pixels, labels)
    rows = {
        "image": pixels,
        "perturbation": 0.5 + (twins - pixels) / (2 * epsilon),  # grey is none, black and white are ∓ε
        "twin": twins,
    }
    axes = figure.subplots(len(rows), 8)
    figure.suptitle(f"Digits, what is added to them (magnified), and their twins: ε = {255 * epsilon:.0f}/255")
    for row, (name, pictures) in zip(axes, rows.items(), strict=True):
        for axis, picture in zip(row, pictures, strict=False):
            axis.imshow(picture[0], cmap="gray", vmin=0, vmax=1)
            axis.set(xticks=[], yticks=[])
        row[0].set_ylabel(name)


def _draw_curves(figure, out: Path) -> None:
    axis = figure.subplots()
    for method, style in zip(METHODS, ("-", "--", "-.", ":"), strict=True):
        lines = read_metrics(out / "runs" / f"{method}-0" / "metrics.jsonl")
        axis.plot([line["clean_loss"] for line in lines], style, label=method)
    axis.set(xlabel="step", ylabel="loss on the clean batch", title="Training, seed 0", yscale="log")
    axis.legend()


if __name__ == "__main__":
    main()
