"""Every recipe parses, says what a header must say, and runs two steps on images of its own kind, made small."""

import json
from pathlib import Path

import pytest

from conadv.config import find_recipe, flatten, load_recipe, override, recipe_names
from conadv.study.results import read_results
from conadv.study.study_file import NUMBERLESS, identity_of, read_study
from conadv.trainer.train import train_recipe as train

# Small enough for a test: the batch and the images shrink, everything else is the recipe's.
SMALL = {"batch_size": 8, "chunk_size": 4, "max_steps": 2, "threads": 1, "eval_every": 0, "precision": "float32"}
SYNTHETIC = {"data.name": "synthetic", "data.train_size": 16, "data.image_size": 32, "data.workers": 0}


@pytest.mark.parametrize("name", recipe_names())
def test_runs_two_steps(name, tmp_path):
    recipe = load_recipe(name)
    changes = SMALL if recipe.data.name == "digits" else {**SMALL, **SYNTHETIC}
    if recipe.model == "resnet50":
        changes = {**changes, "width": 4}
    summary = train(override(recipe, changes), tmp_path / "run", None, quiet=True)
    assert summary["steps"] == 2
    assert summary["method"] == recipe.method


@pytest.mark.parametrize("name", recipe_names())
def test_header_teaches(name):
    lines = find_recipe(name).read_text(encoding="utf-8").splitlines()
    assert lines[0].startswith("# ")  # the title, which conadv recipes prints
    header = "\n".join(line for line in lines[: lines.index("")])
    for word in ("Command", "Hardware", "Time", "Expected", "Run by us"):
        assert word in header, f"{name} does not say {word}"
    assert f"conadv train {name}" in header


def test_the_cells_of_the_study_on_record_still_mean_what_was_run():
    """Its base is a built-in recipe, so that neither that recipe nor a default may change in silence."""
    record = Path(__file__).parents[1] / "studies" / "earlier" / "cifar10-500" / "results.jsonl"
    cells = [json.loads(line) for line in record.read_text(encoding="utf-8").splitlines()]
    assert len(cells) == 82
    for cell in cells:
        values = flatten(load_recipe("digits", cell["overrides"]))
        decisive = cell["values"].keys() & values.keys() - NUMBERLESS
        assert {key: values[key] for key in decisive} == {key: cell["values"][key] for key in decisive}


def test_results_on_record_are_still_those_of_their_study():
    """Or a sweep would run them again: a default that is spelled differently is enough."""
    folder = Path(__file__).parents[1] / "studies" / "robust"
    cells = read_study(folder / "study.toml").cells
    known = {identity_of(cell) for cell in cells}
    assert {identity_of(line) for line in read_results(folder)} <= known


# What the paper says of its runs: batch, peak learning rate, warm-up epochs.
@pytest.mark.parametrize(
    ("name", "batch", "rate", "warmup"),
    [("imagenet-32k", 32768, 35, 40), ("imagenet-64k", 65536, 41, 41), ("imagenet-96k", 98304, 43, 41)],
)
def test_the_papers_runs(name, batch, rate, warmup):
    recipe = load_recipe(name)
    assert (recipe.batch_size, recipe.optimizer.lr, recipe.schedule.warmup_epochs) == (batch, rate, warmup)
    assert (recipe.method, recipe.delay, recipe.epochs, recipe.chunk_size) == ("conadv", 1, 90, 64)
    assert (recipe.optimizer.momentum, recipe.optimizer.weight_decay) == (0.9, 5e-4)
    assert (recipe.schedule.power, recipe.label_smoothing) == (2.0, 0.1)
