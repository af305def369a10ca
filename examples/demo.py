"""The demo: accuracy and speed of every method on 100 handwritten digits, as a table and a picture.

    python examples/demo.py [--out DIR] [--seeds 3] [--steps 120]

Accuracy: all 100 training images are one batch, so there are few updates with little noise, as in large-batch training.
The test images are the other 1,697 digits. Each method has the learning rate that was best for it on other seeds
(docs/log.md). Speed: one step of vanilla, DisAdv and recycled on two processes. Every number is measured in this run.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import mean, stdev

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F

import conadv
from conadv.config import Recipe, load_recipe, override
from conadv.core.batch import to_pixels
from conadv.core.state import below
from conadv.machine import usable_cores
from conadv.study.timeline import Timeline, draw_steps, read_timeline
from conadv.trainer.build import build_task
from conadv.trainer.checkpoint import checkpoints, read_checkpoint
from conadv.trainer.metrics import read_metrics
from conadv.trainer.train import train_recipe as train

# Fields of the recipe for each arm. "noise" is the control: random signs in place of the gradient's.
ARMS = {
    "vanilla": {"method": "vanilla", "optimizer.lr": 20.0},
    "noise": {"method": "conadv", "attack.direction": "noise", "optimizer.lr": 20.0},
    "DisAdv": {"method": "disadv", "optimizer.lr": 20.0},
    "ConAdv": {"method": "conadv", "optimizer.lr": 10.0},
    "recycled": {"method": "recycled", "optimizer.lr": 20.0},
}
# Steps that are timed: method, layout, and chunks in a batch, one for each rank that learns from the images.
STEPS = {
    "vanilla": ("vanilla", "clean", 2),
    "DisAdv": ("disadv", "clean | adv+attack", 1),
    "recycled": ("recycled", "clean | adv", 1),
}
RANKS = 2


def main() -> None:
    arguments = _arguments()
    out: Path = arguments.out
    shutil.rmtree(out / "runs", ignore_errors=True)
    changes = {"epochs": arguments.steps, "checkpoint.every": arguments.steps, "threads": 1}
    recipe = override(load_recipe("digits"), changes)
    table = _accuracy(recipe, out, arguments.seeds)
    print(f"\n{table}")
    timelines = _speed(out, arguments.profile)
    if timelines:
        table += f"\n{_speed_table(timelines)}"
        print(f"\n{_speed_table(timelines)}")
    (out / "table.txt").write_text(table)
    _picture(out, recipe, timelines)
    print(f"picture: {out / 'demo.png'}    runs: {out / 'runs'}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("demo-out"), help="where to write (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each method (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=120, help="steps of a run (default: %(default)s)")
    parser.add_argument("--profile", type=int, default=9, help="steps to time, 0: none (default: %(default)s)")
    return parser.parse_args()


def _accuracy(recipe: Recipe, out: Path, seeds: int) -> str:
    """Train every arm with every seed, in this process."""
    summaries: dict[str, list[dict[str, float]]] = {arm: [] for arm in ARMS}
    # Seed by seed and not arm by arm, so that the times of a round are taken under the same conditions.
    for seed in range(seeds):
        for arm, fields in ARMS.items():
            print(f"seed {seed}: {arm} ...", flush=True)
            chosen = override(recipe, {**fields, "seed": seed})
            summaries[arm].append(train(chosen, out / "runs" / f"{arm}-{seed}", None, quiet=True))
    (out / "summaries.json").write_text(json.dumps(summaries, indent=1))
    return _table(summaries)


def _table(summaries: dict[str, list[dict[str, float]]]) -> str:
    """Accuracy and gap as mean ± sample standard deviation over the seeds; time relative to the same seed's vanilla."""
    rows = [f"{'method':<10} {'rate':>5} {'test top-1, %':>15} {'gap, points':>15} {'time per step':>15}"]
    for arm, runs in summaries.items():
        times = [run["seconds"] / first["seconds"] for run, first in zip(runs, summaries["vanilla"], strict=True)]
        columns = (
            _spread([run["test_top1"] for run in runs], 1),
            _spread([run["gap"] for run in runs], 1),
            _spread(times, 2) + " ×",
        )
        rows.append(f"{arm:<10} {ARMS[arm]['optimizer.lr']:>5g} " + " ".join(f"{column:>15}" for column in columns))
    seeds = len(summaries["vanilla"])
    notes = f"mean ± sample standard deviation over {seeds} seeds; one process does everything, so nothing overlaps"
    return "\n".join([*rows, notes]) + "\n"


def _spread(values: list[float], digits: int) -> str:
    if len(values) < 2:
        return f"{mean(values):.{digits}f}"
    return f"{mean(values):.{digits}f} ± {stdev(values):.{digits}f}"


def _speed(out: Path, profile: int) -> dict[str, Timeline]:
    """What each of two processes does in one step; nothing where they would have to share a core."""
    if not profile:
        return {}
    if len(usable_cores()) < RANKS:
        print(f"speed is left out: it needs {RANKS} cores, and this machine has {len(usable_cores())}")
        return {}
    found = {}
    for name, (method, layout, chunks) in STEPS.items():
        print(f"{name} on {RANKS} processes ...", flush=True)
        sizes = {"data.name": "synthetic", "data.train_size": 128, "data.image_size": 32, "model": "resnet20"}
        steps = {"chunk_size": 64, "batch_size": 64 * chunks, "profile": profile, "max_steps": profile + 3}
        folder = out / "runs" / f"{name}-2-ranks"
        _train_on_ranks(folder, {"method": method, "layout": layout, **sizes, **steps, "schedule.warmup_epochs": 0})
        found[f"{name}, {layout}"] = read_timeline(folder)
    return found


def _train_on_ranks(folder: Path, fields: dict[str, object]) -> None:
    """Train on two processes of one thread each, with `conadv train`."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    flags = [word for key, value in fields.items() for word in (f"--{key.replace('_', '-')}", str(value))]
    words = [
        *launcher,
        "-m",
        "conadv",
        "train",
        "digits",
        "--quiet",
        "--threads",
        "1",
        "--run-dir",
        str(folder),
        *flags,
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{fields['method']} on {RANKS} processes failed:\n{done.stderr}")


def _speed_table(timelines: dict[str, Timeline]) -> str:
    figure = plt.figure()
    lengths = draw_steps(figure, list(timelines.items()))
    plt.close(figure)
    first = lengths[0]
    rows = [f"{'on 2 processes':<28} {'ms per step':>12} {'to vanilla':>12}"]
    for name, length in zip(timelines, lengths, strict=True):
        rows.append(f"{name:<28} {length:>12.0f} {length / first:>10.2f} ×")
    note = "ResNet-20 with 64 images per process; the step of median length, which the picture shows"
    return "\n".join([*rows, note]) + "\n"


def _picture(out: Path, recipe: Recipe, timelines: dict[str, Timeline]) -> None:
    """Above: images, their perturbations and twins, and the curves of seed 0. Below: one step of each method."""
    figure = plt.figure(figsize=(13, 10 if timelines else 5), layout="constrained")
    upper, *lower = figure.subfigures(2, 1, hspace=0.04) if timelines else [figure]
    gallery, curves = upper.subfigures(1, 2, width_ratios=(1.1, 1))
    _draw_gallery(gallery, out, recipe)
    _draw_curves(curves, out)
    for part in lower:
        part.suptitle("One step on two processes: DisAdv attacks before it learns, recycled has its twins already")
        draw_steps(part, list(timelines.items()))
    figure.savefig(out / "demo.png", dpi=130)
    plt.close(figure)


def _draw_gallery(figure, out: Path, recipe: Recipe) -> None:
    task = build_task(recipe, torch.device("cpu"))
    state = read_checkpoint(checkpoints(out / "runs" / "ConAdv-0" / "checkpoints")[0]).tensors
    task.model.load_state_dict(below("model.", state))
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
    for arm, style in zip(ARMS, ("-", (0, (1, 1)), "--", "-.", ":"), strict=True):
        lines = read_metrics(out / "runs" / f"{arm}-0" / "metrics.jsonl")
        label = f"{arm}, rate {ARMS[arm]['optimizer.lr']:g}"
        axis.plot([line["clean_loss"] for line in lines], linestyle=style, label=label)
    axis.set(xlabel="step", ylabel="loss on the clean batch", title="Training, seed 0", yscale="log")
    axis.legend(title="method, and the learning rate\nthat was best for it")


if __name__ == "__main__":
    main()
