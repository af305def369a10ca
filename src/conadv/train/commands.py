"""What the command line does with runs: train, evaluate, export."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors.torch

from conadv.config import RESUMABLE, Recipe, dump_recipe, flatten
from conadv.core.attack import PGD
from conadv.core.splitbn import plain_state_dict
from conadv.parallel.collectives import World, joined, own_device, own_rank, world_size
from conadv.parallel.watch import watched

from .build import Job, Task, build_job, build_optimizer, build_policy, build_stream, build_task, check_fit
from .checkpoint import Checkpoint, newest_whole
from .ema import Ema
from .evaluation import evaluate_task
from .files import replace_file
from .folder import claim, default_folder, is_restart, reopen, versions, write_summary
from .loop import NotFiniteError, Progress, position, run
from .progress import ProgressBar
from .record import FolderRecorder, NullRecorder, Recorder
from .resume import Expected, find_checkpoint, restore_job
from .signals import Interrupted, listening
from .state import average_weights, fill_state, load_model


def train(recipe: Recipe, folder: Path | None, resume: Path | None, quiet: bool) -> dict[str, Any]:
    """Train to the end of a recipe, and return the summary; ranks that do not lead return nothing."""
    layout = check_fit(recipe, world_size())
    task = build_task(recipe, own_device())
    stream = build_stream(recipe, task)
    folder, found = _open_folder(recipe, task, folder, resume)
    agreed = (Interrupted, NotFiniteError)
    with joined(recipe.timeout) as world, listening() as request, watched(world, layout, agreed):
        # Only the leading rank reads the folder, so that all go on from the same checkpoint.
        packed = world.broadcast(found.pack() if found else b"")
        checkpoint = Checkpoint.unpack(packed) if packed else None
        job = build_job(recipe, task, stream, layout, world, checkpoint.about["step"] if checkpoint else 0)
        progress = Progress() if checkpoint is None else restore_job(job, checkpoint)
        with _recorder(recipe, job, folder, progress, quiet) as recorder:
            signal_number = run(job, progress, build_policy(recipe, stream), request, recorder)
        if progress.step < job.stop:
            _tell(f"stopped after step {progress.step}; to go on: {_command(recipe, folder)}")
            raise Interrupted(signal_number)
        figures = evaluate_task(task, world, job.ema)
    if not world.is_main:
        return {}
    summary = {**_facts(recipe), **position(job, progress), **figures}
    write_summary(folder, summary)
    return {**summary, "run": str(folder)}


def evaluate(recipe: Recipe, folder: Path, robust: bool, epsilon: float, steps: int) -> dict[str, Any]:
    """The figures of the newest checkpoint of a run; `robust` adds those under PGD of this radius and steps."""
    task = build_task(recipe, own_device())
    checkpoint = find_checkpoint(folder, _expected(recipe, task), _tell)
    if checkpoint is None:
        raise ValueError(f"{folder} has no checkpoint yet: train it further with {_command(recipe, folder)}")
    load_model(task.model, checkpoint.tensors)
    ema = Ema(task.model, recipe.ema)
    ema.load(average_weights(checkpoint.tensors))
    attack = None
    if robust:  # steps long enough to cross the ball and come back
        size = epsilon if steps == 1 else 2.5 * epsilon / steps
        attack = PGD(epsilon, size, steps, random_start=1.0, branch="main", statistics="running")
    figures = evaluate_task(task, World(0, 1, task.device), ema, attack)
    return {**_facts(recipe), **checkpoint.about["position"], **figures}


def export(folder: Path, out: Path, raw: bool = False) -> dict[str, Any]:
    """Write the weights of the newest checkpoint as the model without further branches has them.

    Where the run keeps a moving average of the weights, that is written, unless `raw` asks for the weights themselves.
    """
    checkpoint = newest_whole(folder / "checkpoints", _tell, _check_plain)
    source = "model" if raw or not average_weights(checkpoint.tensors) else "ema"
    tensors = {name: checkpoint.tensors[f"{source}.{name}"] for name in checkpoint.about["plain"]}
    try:
        replace_file(out, safetensors.torch.save(tensors))
    except OSError as error:
        raise ValueError(f"cannot write {out} ({error.strerror or error}): name another file") from None
    kind = "moving average" if source == "ema" else "raw"
    return {"file": str(out), "weights": kind, "tensors": len(tensors), "step": checkpoint.about["step"]}


def _open_folder(
    recipe: Recipe, task: Task, folder: Path | None, resume: Path | None
) -> tuple[Path, Checkpoint | None]:
    """The folder of the run and the checkpoint to go on from: the leading rank makes the one and finds the other."""
    header = "\n".join(f"{what} {version}" for what, version in versions().items())
    config = dump_recipe(recipe, f"The recipe of this run, whole. Written with:\n{header}")
    name = f"{recipe.data.name or Path(str(recipe.data.path)).name}-{recipe.method}"
    folder = resume or folder or default_folder(Path("runs"), name, config)
    if own_rank() != 0:
        return folder, None
    if resume is None and not is_restart(folder, config):
        claim(folder, config)
        return folder, None
    checkpoint = find_checkpoint(folder, _expected(recipe, task), _tell)
    reopen(folder, config, checkpoint.about["step"] if checkpoint else 0)
    if checkpoint is None:
        _tell(f"{folder} has no checkpoint yet: starting from its first step")
    elif checkpoint.about["versions"] != versions():
        _tell(f"written with {checkpoint.about['versions']}, now {versions()}: numbers may differ in their last digits")
    return folder, checkpoint


def _expected(recipe: Recipe, task: Task) -> Expected:
    decisive = {key: value for key, value in flatten(recipe).items() if key not in RESUMABLE}
    optimizer = build_optimizer(recipe, task.model)
    fill_state(optimizer)
    return Expected(task.model, optimizer, recipe.delay, recipe.ema > 0, decisive)


def _command(recipe: Recipe, folder: Path) -> str:
    """What to type to go on with a run."""
    size = world_size()
    local = int(os.environ.get("LOCAL_WORLD_SIZE", str(size)))
    nodes = f"--nnodes {size // local} " if size > local else ""
    launcher = "" if size == 1 else f"torchrun {nodes}--nproc-per-node {local} -m "
    # A folder may not name code to import, so its command does.
    model = f" --model {shlex.quote(recipe.model)}" if ":" in recipe.model else ""
    return f"{launcher}conadv train --resume {shlex.quote(str(folder))}{model}"


@contextmanager
def _recorder(recipe: Recipe, job: Job, folder: Path, progress: Progress, quiet: bool) -> Iterator[Recorder]:
    if not job.world.is_main:
        yield NullRecorder()
        return
    about = {
        "recipe": flatten(recipe),
        "versions": versions(),
        "plain": list(plain_state_dict(job.task.model)),
    }
    with ProgressBar(progress.step, job.stop, quiet) as watch:
        for problem in job.task.data.skipped:
            watch.say(f"left out: {problem}")
        for note in job.task.data.notes:
            watch.say(note)
        if job.stream.remainder:
            watch.say(f"each epoch leaves out {job.stream.remainder} images, others every time")
        recorder = FolderRecorder(folder, progress.step, recipe.checkpoint.keep, about, watch)
        if recorder.missing:
            _tell(f"metrics.jsonl was damaged: {recorder.missing} of the steps before {progress.step} have no line")
        try:
            yield recorder
        finally:
            recorder.close()


def _facts(recipe: Recipe) -> dict[str, Any]:
    """What a summary says of the recipe."""
    names = ("method", "delay", "batch_size", "chunk_size", "epochs", "seed")
    facts = {**{name: getattr(recipe, name) for name in names}, "epsilon": recipe.attack.epsilon}
    return {**facts, "ema": recipe.ema} if recipe.ema else facts


def _check_plain(checkpoint: Checkpoint) -> None:
    sources = ["model.", *["ema."] * bool(average_weights(checkpoint.tensors))]
    names = [source + name for source in sources for name in checkpoint.about["plain"]]
    missing = [name for name in names if name not in checkpoint.tensors]
    if missing:
        raise ValueError(f"lacks the tensor {missing[0]}")


def _tell(text: str) -> None:
    """A line to whoever watches, from one rank only."""
    if own_rank() == 0:
        print(text, file=sys.stderr, flush=True)
