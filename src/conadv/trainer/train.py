"""Train a recipe, or resume a run from its folder: `conadv train`, and `conadv.train` in Python."""

from __future__ import annotations

import os
import platform
import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from hashlib import sha256
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from conadv import __version__
from conadv.config import RESUMABLE, Recipe, dump_recipe, flatten, load_recipe, override, recipe_of_run
from conadv.core.algorithm import ConAdv
from conadv.core.splitbn import plain_state_dict
from conadv.ranks.agreement import check_agreement, from_main
from conadv.ranks.faults import guarded
from conadv.ranks.launch import world_size
from conadv.ranks.layout import Layout
from conadv.ranks.member import StepError
from conadv.ranks.world import World, joined
from conadv.sinks import SINKS, Sink, check_sinks
from conadv.task.data import DataSet
from conadv.task.evaluate import RobustTest
from conadv.task.identity import difference, identity

from .build import Job, Task, build_job, build_task, check_fit, network_facts, open_task_data, with_sizes
from .checkpoint import BestWeights, Checkpoint, CheckpointSaver, check_tensors, newest_whole, restore, stale_versions
from .evaluation import Showcase
from .folder import RunFolder, default_folder, holds, resume_command, write_summary
from .kernels import kernels
from .loop import Progress, evaluate, position, run
from .metrics import Callback, Metrics, OnMetrics
from .progress import ProgressLines, preview, tell
from .stop import Interrupted, listening, stopped_early

# Flags that may differ between machines. The content of the data is compared separately.
_MACHINE_FLAGS = ("threads", "data.path", "data.workers")
# Errors that all ranks raise together.
_AGREED = (Interrupted, StepError)


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
        quiet: Print no progress. False: print a line every few seconds.
        on_step: Called on the first rank that learns, after each step with a dictionary of its metrics: step (from 0),
            epoch, lr, loss, clean_loss, adv_loss and seconds (since the start); those of an evaluation if one was due.
        on_evaluation: Called there after each evaluation with a dictionary of its metrics: step, test_top1,
            test_top5 (with more than 5 classes), train_top1 and gap in percent, test_loss and train_loss; adv_top1,
            held_out_top1, held_out_robust_top1 and robust_top1 if the run has them. For the evaluation at the end,
            step is the number of steps taken.

    Returns:
        The settings, speed and final accuracy of the run, and its folder as `run`. Empty on all ranks but that one.

    Raises:
        ValueError: The recipe, the data or a folder cannot be used; the message says what to do. If ranks differ in
            what they find, all processes end instead, and one prints the message.
        FloatingPointError: A loss, a gradient or a statistic is not finite.
        KeyboardInterrupt: The run was interrupted, and its state is saved; SystemExit, if it was a SIGTERM.
    """
    if resume is not None:
        if recipe is not None or folder is not None:
            raise ValueError("resume= takes the recipe and the folder from the run: drop recipe and folder")
        recipe = recipe_of_run(fspath(resume))
    elif recipe is None:
        raise ValueError("there is nothing to train: pass a recipe, such as load_recipe('digits'), or resume=")
    # A recipe that was built by hand is checked like any other.
    recipe = override(recipe, {}) if isinstance(recipe, Recipe) else load_recipe(fspath(recipe))
    keys = (("loss", on_step), ("test_top1", on_evaluation))
    callbacks = [Callback(function, key) for key, function in keys if function is not None]
    new, old = (None if path is None else Path(path) for path in (folder, resume))
    try:
        return train_recipe(recipe, new, old, quiet, callbacks, owns_process=False)
    except Interrupted as stop:
        if stop.exit_status == 128 + signal.SIGINT:
            raise KeyboardInterrupt(str(stop)) from None
        raise SystemExit(stop.exit_status) from None


def train_recipe(
    recipe: Recipe,
    folder: Path | None,
    resume: Path | None,
    quiet: bool,
    callbacks: Sequence[Callback] = (),
    owns_process: bool = True,
) -> dict[str, Any]:
    """Train to the end of a checked recipe, and return the summary; the arguments are those of `train`.

    If it `owns_process`, signals may end the process; in a notebook they may not.
    """
    check_sinks(recipe.log)
    data = open_task_data(recipe) if not recipe.batch_size and world_size() == 1 else None
    recipe = with_sizes(recipe, world_size(), None if data is None else len(data.train))
    layout = check_fit(recipe, world_size())
    with (
        listening(owns_process) as request,
        joined(recipe.timeout, main=layout.learners()[0]) as world,
        _run_folder(recipe, folder, resume, world) as place,
        guarded(world, layout, _AGREED, place.close, lambda: request.signal is not None) as end_all,
    ):
        to_resume = f"to resume: {resume_command(place.path, recipe.model, recipe.data.path)}"
        if owns_process:
            advice = [to_resume] if resume else []
            request.obey_by(lambda number: end_all(128 + number, stopped_early(number, *advice)))
        task = _build(recipe, world, data)
        with kernels(task.device, recipe.deterministic), ExitStack() as until_evaluated:
            check_agreement(world, _in_common(task))
            job, progress = _start(layout, world, place, task)
            if job.pool is not None:
                until_evaluated.callback(job.pool.close)
            request.obey_by(None)
            if progress.step >= job.stop and not quiet:
                tell(f"{place.path} is complete ({progress.step:,} steps): evaluating it again")
            sinks = [*_sinks(job, place.path, progress.step, until_evaluated), *callbacks] if world.is_main else []
            with _recorder(job, place.path, progress.step, quiet) as (own_sinks, saver):
                traces = Path(os.fsdecode(from_main(world, lambda: os.fsencode(place.path)))) / "traces"
                trace = traces / f"rank-{world.rank}.json"  # only rank 0 knows the folder of the run
                signal_number = run(job, progress, request, [*own_sinks, *sinks], saver, trace)
            if progress.step < job.stop:
                tell(f"stopped after step {progress.step}; {to_resume}")
                world.barrier()  # torchrun ends all ranks when one exits, and rank 0 may still be writing
                raise Interrupted(signal_number)
            robust = RobustTest(recipe.attack.epsilon, recipe.attack.norm, images=recipe.eval_robust)
            evaluation = evaluate(job, robust if recipe.eval_robust else None)
            for sink in sinks:
                sink.log(progress.step, evaluation)
        summary = {**run_facts(task), **position(job, progress), **evaluation}
        if world.is_main:
            write_summary(place.path, summary)
    return {**summary, "run": str(place.path)} if world.is_main else {}


def _build(recipe: Recipe, world: World, data: DataSet | None) -> Task:
    """Build the network and the data."""
    flags = {key: value for key, value in flatten(recipe).items() if key not in _MACHINE_FLAGS}
    check_agreement(world, {"flags": flags})  # first, since everything else depends on the flags
    opened = [] if data is None else [data]
    if world.size > 1:  # rank 0 first: the others find its index of shards and its search for damage in the cache
        from_main(world, lambda: opened.append(open_task_data(recipe)))
    return build_task(recipe, world.device, trains=True, data=opened[0] if opened else None)


def versions() -> dict[str, str]:
    """Return the versions that a result depends on."""
    return {"conadv": __version__, "torch": torch.__version__, "python": platform.python_version()}


def _in_common(task: Task) -> dict[str, dict[str, Any]]:
    """Return what all ranks must have in common besides flags: data, and software."""
    tensors = [f"{name} {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in task.model.state_dict().items()]
    model = sha256("\n".join(tensors).encode()).hexdigest()[:12]
    return {"data": identity(task.data), "software": {**versions(), "model": model}}


@contextmanager
def _run_folder(recipe: Recipe, folder: Path | None, resume: Path | None, world: World) -> Iterator[RunFolder]:
    """The folder of the run, unlocked at the end; only rank 0 opens it."""
    header = "\n".join(f"{what} {version}" for what, version in versions().items())
    config = dump_recipe(recipe, f"The recipe of this run, whole. Written with:\n{header}")
    data = recipe.data.name or Path(str(recipe.data.path)).name.replace(":", "-")
    restarted = world.attempt > 0
    path = resume or folder or default_folder(Path("runs"), f"{data}-{recipe.method}", config, restarted)
    place = RunFolder(path, config, is_new=resume is None and not (restarted and holds(path, config)))
    try:
        yield place
    except (ValueError, Interrupted):  # a new folder is removed unless it has a checkpoint
        place.close(status=2)
        raise
    finally:
        place.close()


def _start(layout: Layout, world: World, place: RunFolder, task: Task) -> tuple[Job, Progress]:
    """Build the job of a new run, or restore it from the newest checkpoint; every rank must call it."""

    def find() -> bytes:
        place.open()
        found = None if place.is_new else find_checkpoint(place.path, task, trains=True)
        if found is None and not place.is_new:
            tell(f"{place.path} has no checkpoint yet: starting from its first step")
        return b"" if found is None else found.pack()

    # Only rank 0 reads the folder, so that all ranks resume from the same checkpoint.
    packed = from_main(world, find)
    # All ranks use the same seed, but machines may differ in the last digits.
    world.broadcast_tensors([*task.model.parameters(), *task.model.buffers()])
    if not packed:
        return build_job(task, layout, world, start=0), Progress()
    checkpoint = Checkpoint.unpack(packed)
    step, before = checkpoint.about["step"], checkpoint.about["versions"]
    if before != versions():
        then, now = (", ".join(f"{what} {number}" for what, number in sorted(v.items())) for v in (before, versions()))
        tell(f"written with {then}; now {now}: numbers may differ in their last digits")
    job, stale = build_job(task, layout, world, step), stale_versions(checkpoint.tensors)
    if job.method.delay and not isinstance(job.method, ConAdv):
        _prime(job, stale[-1], step - 1)
    restore(checkpoint, task.model, job.optimizer)
    job.member.resume(step, stale)
    return job, Progress(step, checkpoint.about["position"]["seconds"])


def find_checkpoint(folder: Path, task: Task, trains: bool = False) -> Checkpoint | None:
    """Return the newest intact checkpoint of a run, if any; its data, or to evaluate its classes, must be the same."""

    def other_data(checkpoint: Checkpoint) -> str:  # older checkpoints do not say what data they had
        return difference(task.data, checkpoint.about.get("data", {}), classes_only=not trains)

    def check(checkpoint: Checkpoint) -> None:
        # Fields that were added after it was written stand for their defaults.
        theirs, own = {**flatten(Recipe()), **checkpoint.about["recipe"]}, flatten(task.recipe)
        other = [key for key in own if key not in RESUMABLE and theirs.get(key) != own[key]]
        if other:
            raise ValueError(f"is of another run: its recipe differs in {', '.join(other)}")
        if not other_data(checkpoint):  # which may need other tensors
            check_tensors(checkpoint.tensors, task.model, task.recipe.delay)

    found = newest_whole(folder / "checkpoints", tell, check)
    if found is not None and (other := other_data(found)):
        raise ValueError(
            f"the data at {task.recipe.data.path or task.recipe.data.name} is not that of the run ({other}): give "
            f"--data.path the same {'images' if trains else 'classes'}, or start a new run"
        )
    return found


def run_facts(task: Task) -> dict[str, Any]:
    """Return what a summary says about a run beforehand; epsilon is None for a method without attack."""
    names = ("method", "delay", "model", "batch_size", "chunk_size", "epochs", "seed")
    return {
        **{name: getattr(task.recipe, name) for name in names},
        "epsilon": None if task.twins is None else task.recipe.attack.epsilon,
        "classes": len(task.data.train.classes),
    }


def _prime(job: Job, weights: dict[str, Tensor], step: int) -> None:
    """Evaluate again what the last step has left behind, with its weights and its batch."""
    job.task.model.load_state_dict(weights)
    job.begin_step(step)
    with closing(job.batches(step, step + 1)) as batches:
        job.member.prime(next(batches), step)


def _sinks(job: Job, folder: Path, start: int, until_evaluated: ExitStack) -> Iterator[Sink]:
    """Make the sinks of --log and the best weights, which also get the final evaluation."""
    recipe, task = job.task.recipe, job.task
    boards = [SINKS[name](folder, start, flatten(recipe)) for name in dict.fromkeys(recipe.log)]
    for board in boards:
        until_evaluated.callback(board.close)
    yield from boards
    if boards and task.twins is not None:
        yield Showcase(task, task.twins, boards)
    if recipe.eval_every:
        yield BestWeights(folder, task.model, network_facts(task), tell)


@contextmanager
def _recorder(
    job: Job, folder: Path, start: int, quiet: bool
) -> Iterator[tuple[Sequence[Sink], CheckpointSaver | None]]:
    """Print what the run will do, and open the sinks of its steps and the checkpoint saver; ranks but 0 have none."""
    if not job.member.world.is_main:
        yield [], None
        return
    about = {
        "recipe": flatten(job.task.recipe),
        "versions": versions(),
        "plain": list(plain_state_dict(job.task.model)),
        "network": network_facts(job.task),
        "data": identity(job.task.data),
    }
    lines = ProgressLines(job.stop, quiet)
    with (
        closing(Metrics(folder / "metrics.jsonl", start)) as metrics,
        closing(CheckpointSaver(folder, job.task.recipe.checkpoint.keep, start, about, before=metrics.flush)) as saver,
    ):
        if start < job.stop:
            for line in preview(job, start):
                lines.say(line)
        if metrics.missing:
            tell(f"metrics.jsonl was damaged: {metrics.missing} of the steps before {start} have no line")
        yield [metrics, lines], saver
