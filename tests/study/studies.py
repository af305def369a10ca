"""Studies with made-up figures, so that reports can be tested without training anything."""

from __future__ import annotations

import base64
import io
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from PIL import Image

from conadv import config
from conadv.study.results import read_summary, result_of, write_results
from conadv.study.study_file import Cell, read_study

FULL = """
title = "All that a study can have"
about = \"\"\"
What is asked: does a twin help where data is scarce? With <tags> & "quotes" | pipes.

A second paragraph.
\"\"\"
conclusions = "It holds, and `code` shows it."

[base]
recipe = "digits"
batch_size = 50
chunk_size = 25

[[arm]]
name = "vanilla"
method = "vanilla"

[[arm]]
name = "vanilla, twice the epochs"
method = "vanilla"
epochs = 240
grids = ["tuning", "final"]

[[arm]]
name = "DisAdv"
method = "disadv"

[[arm]]
name = "ConAdv"
method = "conadv"

[[arm]]
name = "recycled"
method = "recycled"

[[arm]]
name = "ConAdv, delay 2"
delay = 2
grids = ["tuning", "final"]

[[arm]]
name = "ConAdv, delay 4"
delay = 4
grids = ["tuning", "final"]

[[arm]]
name = "ConAdv, ε = 0"
attack.epsilon = 0
grids = ["tuning", "final"]

[[arm]]
name = "noise"
attack.direction = "noise"
grids = ["tuning", "final"]

[[arm]]
name = "vanilla + AA"
method = "vanilla"
data.augment = "autoaugment-cifar10"
grids = ["final"]

[[arm]]
name = "ConAdv + AA"
data.augment = "autoaugment-cifar10"
grids = ["final"]

[[arm]]
name = "ConAdv"
grids = ["epsilon"]
[arm.grid]
attack.epsilon = ["4/255", "8/255", "12/255", "32/255"]

[[grid]]
name = "tuning"
seed = [10]
optimizer.lr = [5, 10, 20]

[[grid]]
name = "final"
seed = [0, 1, 2]

[[grid]]
name = "batch"
seed = [0, 1, 2]
batch_size = [25, 100]

[[grid]]
name = "epsilon"
seed = [0, 1]
"""

Outcome = Callable[[Mapping[str, Any]], float | str | None]
"""The test accuracy of a cell with these values, or its error, or None where it has not been run."""


def accuracy(values: Mapping[str, Any]) -> float | str | None:
    """Smooth in every setting, different for every seed; one cell fails and one is still to come."""
    if values["method"] == "recycled" and values["optimizer.lr"] == 20:
        return "the loss of step 3 is not finite <b>"
    if values["method"] == "recycled" and values["seed"] == 2 and values["batch_size"] == 50:
        return None
    gain = {"vanilla": 0.0, "disadv": 4.4, "conadv": 4.2, "recycled": 4.6, "sam": 2.0}[values["method"]]
    epsilon = 255 * values["attack.epsilon"]
    if values["method"] != "vanilla":
        gain *= 0.15 + 0.85 * math.exp(-((epsilon - 20) ** 2) / 300) - 0.2 * (values["attack.direction"] == "noise")
        gain -= 0.2 * values["delay"]
    gain += 1.5 * (values["data.augment"] != "none") + 0.4 * (values["epochs"] == 240)
    gain -= 1.5 * abs(math.log2(values["optimizer.lr"] / 10)) + 0.8 * math.log2(values["batch_size"] / 25)
    return 33 + gain + 0.7 * math.sin(7.3 * values["seed"] + len(values["method"])) + 0.1 * math.sin(epsilon)


def make_study(folder: Path, text: str = FULL, outcome: Outcome = accuracy, steps: int = 40) -> Path:
    """The folder that a sweep of this study would leave, had its cells these outcomes."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "study.toml").write_text(text, encoding="utf-8")
    cells = read_study(folder / "study.toml", _resolve).cells
    results = []
    for cell in cells:
        figure, home = outcome(cell.values), folder / "runs" / cell.slug
        if isinstance(figure, float):
            _finish(cell, home, figure, steps)
        results.append(result_of(cell, read_summary(home), figure if isinstance(figure, str) else None))
    write_results(folder, results)
    (folder / "origin.json").write_text(json.dumps([ORIGIN]), encoding="utf-8")
    return folder


ORIGIN = {
    "date": "2026-11-15",
    "processor": "A processor",
    "cores": 2,
    "memory_gb": 25.3,
    "system": "Linux",
    "versions": {"conadv": "0.1.0", "torch": "2.13.0"},
    "commit": "0123456789ab",
}


def add_gallery(home: Path, side: int = 16) -> None:
    """Made-up pictures in the folder of a run."""

    def png(number: int, kind: int) -> str:
        shades = [(40 * number + 9 * place * kind) % 256 for place in range(side * side)]
        image = Image.frombytes("L", (side, side), bytes(shades))
        with io.BytesIO() as file:
            image.save(file, "PNG")
            return base64.b64encode(file.getvalue()).decode()

    images = [
        {
            "label": f"class {number}",
            "answer": f"class {number}",
            "twin_answer": "aeroplane",
            "image": png(number, 1),
            "twin": png(number, 2),
            "perturbation": png(number, 3),
        }
        for number in range(6)
    ]
    text = json.dumps({"epsilon": 4 / 255, "magnified": 31.9, "images": images})
    (home / "gallery.json").write_text(text, encoding="utf-8")


def _resolve(recipe: str, overrides: Mapping[str, str]) -> dict[str, Any]:
    return dict(config.flatten(config.load_recipe(recipe, overrides)))


def _finish(cell: Cell, home: Path, top1: float, steps: int) -> None:
    home.mkdir(parents=True, exist_ok=True)
    work = {"vanilla": 3, "disadv": 8, "conadv": 8, "recycled": 6, "sam": 6}[cell.values["method"]]
    seconds = 10.0 * work + cell.values["seed"]
    summary = {
        "steps": steps,
        "seconds": seconds,
        "images_per_second": steps * cell.values["batch_size"] / seconds,
        "test_top1": top1,
        "train_top1": 99.0,
        "gap": 99.0 - top1,
    }
    (home / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    lines = []
    for step in range(steps):
        epoch = cell.values["epochs"] * (step + 1) / steps
        line = {"step": step, "epoch": epoch, "clean_loss": 0.5 + 50 / top1 * math.exp(-4 * step / steps)}
        if step % 10 == 9:
            line["test_top1"] = top1 * (step + 1) / steps
        lines.append(json.dumps(line) + "\n")
    (home / "metrics.jsonl").write_text("".join(lines), encoding="utf-8")
