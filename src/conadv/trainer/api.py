"""`conadv.train`: training from Python scripts and notebooks."""

from __future__ import annotations

import signal
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from conadv.config import Recipe, load_recipe, override, recipe_of_run

from .metrics import Callbacks, OnMetrics
from .stop import Interrupted
from .training import train as train_command


def train(
    recipe: Recipe | str | PathLike[str] | None = None,
    folder: str | PathLike[str] | None = None,
    resume: str | PathLike[str] | None = None,
    quiet: bool = True,
    on_step: OnMetrics | None = None,
    on_evaluation: OnMetrics | None = None,
) -> dict[str, Any]:
    """Train a recipe, and return the summary that `conadv train --json` prints.

    It writes the same folder as the command, and works under torchrun. An interrupt (Ctrl-C, or the stop button of a
    notebook) finishes the step, saves a checkpoint and raises KeyboardInterrupt; `resume=` then continues the run.
    Outside the main thread, where Python allows no signal handlers, signals are not handled.

    Args:
        recipe: A `Recipe`, the name of a built-in recipe or the path of a TOML file. None with `resume`.
        folder: The folder to write. None: a new one, runs/DATA-METHOD-001 and so on.
        resume: The folder of a run to resume, in place of `recipe` and `folder`.
        quiet: Print no progress. False: show a progress bar on a terminal or in a notebook with ipywidgets, and print
            a line every few seconds elsewhere.
        on_step: Called on rank 0 after each step with a dictionary of its metrics: step (from 0), epoch, lr, loss,
            clean_loss, adv_loss and seconds (since the start).
        on_evaluation: Called on rank 0 after each evaluation with a dictionary of its metrics: step, test_top1,
            test_top5 (with more than 5 classes), train_top1 and gap in percent, test_loss and train_loss. For the
            evaluation at the end, step is the number of steps taken.

    Returns:
        The settings, speed and final accuracy of the run, and its folder as `run`. Empty on ranks other than 0.

    Raises:
        ValueError: The recipe, the data or a folder cannot be used; the message says what to do.
        KeyboardInterrupt: The run was interrupted, and its state is saved.
    """
    chosen = _recipe(recipe, folder, resume)
    callbacks = Callbacks(on_step, on_evaluation)
    try:
        return train_command(chosen, _path(folder), _path(resume), quiet, callbacks, owns_process=False)
    except Interrupted as stop:
        if stop.exit_status == 128 + signal.SIGINT:
            raise KeyboardInterrupt(str(stop)) from None
        raise SystemExit(stop.exit_status) from None


def _recipe(
    recipe: Recipe | str | PathLike[str] | None, folder: str | PathLike[str] | None, resume: str | PathLike[str] | None
) -> Recipe:
    if resume is not None:
        if recipe is not None or folder is not None:
            raise ValueError("resume= takes the recipe and the folder from the run: drop recipe and folder")
        return recipe_of_run(fspath(resume))
    if recipe is None:
        raise ValueError("there is nothing to train: pass a recipe, such as load_recipe('digits'), or resume=")
    # A recipe that was built by hand is checked like any other.
    return override(recipe, {}) if isinstance(recipe, Recipe) else load_recipe(fspath(recipe))


def _path(path: str | PathLike[str] | None) -> Path | None:
    return None if path is None else Path(path)
