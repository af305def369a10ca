"""What the command line does with runs: train, evaluate, export."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors.torch

from conadv.config import Recipe, dump_recipe
from conadv.core.attack import PGD
from conadv.core.splitbn import plain_state_dict
from conadv.parallel.world import World, joined, own_device, own_rank, world_size

from .build import Job, build_job, build_policy, build_stream, build_task, check_fit
from .checkpoint import Checkpoint
from .evaluation import evaluate_task
from .folder import claim, default_folder, is_restart, reopen, versions, write_summary
from .log import Watch
from .loop import Progress, position, run
from .record import FolderRecorder, Recorder, Silence
from .resume import find_checkpoint, go_on
from .signals import Interrupted, listening
from .state import StaleWeights, load_model


def train(recipe: Recipe, folder: Path | None, resume: Path | None, quiet: bool) -> dict[str, Any]:
    """Train to the end of a recipe, and return the summary; ranks that do not lead return nothing."""
    layout = check_fit(recipe, world_size())
    task = build_task(recipe, own_device())
    stream = build_stream(recipe, task)
    folder, checkpoint = _open_folder(recipe, folder, resume)
    with joined(recipe.timeout) as world, listening() as request:
        job = build_job(recipe, task, stream, layout, world, checkpoint.about["step"] if checkpoint else 0)
        stale = StaleWeights(task.model, job.method.delay if world.leads else 0)
        progress = Progress() if checkpoint is None else go_on(job, stale, checkpoint)
        with _recorder(recipe, job, folder, progress, quiet) as recorder:
            finished = run(job, progress, stale, build_policy(recipe, stream), request, recorder)
        if not finished:
            _tell(f"stopped after step {progress.step}; to go on: conadv train --resume {folder}")
            raise Interrupted(request.signal or signal.SIGTERM)
        figures = evaluate_task(task, world)
    if not world.leads:
        return {}
    summary = {**_facts(recipe), **position(job, progress), **figures}
    write_summary(folder, summary)
    return {**summary, "run": str(folder)}


def evaluate(recipe: Recipe, folder: Path, robust: bool, epsilon: float, steps: int) -> dict[str, Any]:
    """The figures of the newest checkpoint of a run; `robust` adds those under PGD of this radius and steps."""
    checkpoint = _checkpoint(folder)
    task = build_task(recipe, own_device())
    load_model(task.model, checkpoint.tensors)
    attack = None
    if robust:  # steps long enough to cross the ball and come back
        size = epsilon if steps == 1 else 2.5 * epsilon / steps
        attack = PGD(epsilon, size, steps, random_start=1.0, branch="main", statistics="running")
    figures = evaluate_task(task, World(0, 1, task.device), attack)
    return {**_facts(recipe), **checkpoint.about["position"], **figures}


def export(folder: Path, out: Path) -> dict[str, Any]:
    """Write the weights of the newest checkpoint as the model without further branches has them."""
    checkpoint = _checkpoint(folder)
    tensors = {name: checkpoint.tensors[f"model.{name}"] for name in checkpoint.about["plain"]}
    aside = out.with_name(f".{out.name}.partial")
    try:
        safetensors.torch.save_file(tensors, aside)
        aside.replace(out)
    except OSError as error:
        raise ValueError(f"cannot write {out} ({error.strerror or error}): name another file") from None
    return {"file": str(out), "tensors": len(tensors), "step": checkpoint.about["step"]}


def _open_folder(recipe: Recipe, folder: Path | None, resume: Path | None) -> tuple[Path, Checkpoint | None]:
    """The folder of the run, made by the leading rank, and the checkpoint to go on from."""
    leads = own_rank() == 0
    name = f"{recipe.data.name or Path(str(recipe.data.path)).name}-{recipe.method}"
    folder = resume or folder or default_folder(Path("runs"), name)
    header = "\n".join(f"{what} {version}" for what, version in versions().items())
    config = dump_recipe(recipe, f"The recipe of this run, whole. Written with:\n{header}")
    if resume is None and not (is_restart() and (folder / "config.toml").exists()):
        if leads:
            claim(folder, config)
        return folder, None
    checkpoint = find_checkpoint(folder, _tell)
    if leads:
        reopen(folder, config)
    if checkpoint is not None and checkpoint.about["versions"] != versions():
        _tell(f"written with {checkpoint.about['versions']}, now {versions()}: numbers may differ in their last digits")
    return folder, checkpoint


@contextmanager
def _recorder(recipe: Recipe, job: Job, folder: Path, progress: Progress, quiet: bool) -> Iterator[Recorder]:
    if not job.world.leads:
        yield Silence()
        return
    about = {
        "recipe": dump_recipe(recipe),
        "versions": versions(),
        "plain": list(plain_state_dict(job.task.model)),
    }
    with Watch(progress.step, job.stop, quiet) as watch:
        if job.stream.remainder:
            watch.say(f"each epoch leaves out {job.stream.remainder} images, others every time")
        recorder = FolderRecorder(folder, progress.step, recipe.checkpoint.keep, about, watch)
        try:
            yield recorder
        finally:
            recorder.close()


def _facts(recipe: Recipe) -> dict[str, Any]:
    """What a summary says of the recipe."""
    names = ("method", "delay", "batch_size", "chunk_size", "epochs", "seed")
    return {**{name: getattr(recipe, name) for name in names}, "epsilon": recipe.attack.epsilon}


def _checkpoint(folder: Path) -> Checkpoint:
    checkpoint = find_checkpoint(folder, _tell)
    if checkpoint is None:
        raise ValueError(f"{folder} has no checkpoint yet: train it further with conadv train --resume {folder}")
    return checkpoint


def _tell(text: str) -> None:
    """A line to whoever watches, from one rank only."""
    if own_rank() == 0:
        print(text, file=sys.stderr, flush=True)
