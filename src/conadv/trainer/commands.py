"""The commands on runs: train, evaluate, export."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import safetensors.torch

from conadv.config import RESUMABLE, Recipe, added_values, check_run_folder, dump_recipe, flatten
from conadv.core.catalog import ATTACKS, METHODS, is_callable
from conadv.core.pgd import PGD
from conadv.core.splitbn import plain_state_dict
from conadv.parallel.agreement import AgreedError, check_agreement, from_main, from_main_patiently, on_all
from conadv.parallel.collectives import World, joined, own_device
from conadv.parallel.launch import own_rank, world_size
from conadv.parallel.layout import Layout
from conadv.parallel.outcome import DriftError, NotFiniteError
from conadv.parallel.watch import watched
from conadv.sinks import SINKS, check_sinks
from conadv.task.data import DataSet, Stream

from .analysis import FILE, Analysis
from .analysis import analyze as run_analysis
from .build import Job, build_job, build_optimizer, build_policy, build_stream, check_fit
from .build_task import Task, build_task, open_task_data, resolved
from .checkpoint import Checkpoint, newest_whole
from .compiling import compiler_errors
from .ema import Ema
from .evaluation import evaluate_task
from .files import replace_file
from .fingerprint import data_facts, software_facts
from .folder import RunFolder, default_folder, holds, versions, write_summary
from .kernels import kernels
from .ledger import Progress
from .loop import position, run
from .metrics import Metrics
from .preview import preview
from .profiling import Profile
from .progress import ProgressBar
from .record import Callbacks, CheckpointSaver, NullSaver, Sinks, StateSaver
from .resume import Expected, find_checkpoint, restore_job
from .signals import Interrupted, following_launcher, listening
from .state import average_weights, fill_state, load_model

# Flags that may differ from machine to machine; whether the data is the same is compared by itself.
_OF_A_MACHINE = ("threads", "data.path", "data.workers")

# What a checkpoint says of how its run went, in the order in which a run prints it.
_POSITION = ("layout", "world_size", "steps", "skipped", "seconds", "images_per_second")


def train(
    recipe: Recipe,
    folder: Path | None,
    resume: Path | None,
    quiet: bool,
    callbacks: Callbacks | None = None,
    owns_process: bool = True,
) -> dict[str, Any]:
    """Train to the end of a recipe, and return the summary; ranks other than 0 return nothing.

    Args:
        recipe: What to train, and how.
        folder: The folder to write; None: a new one under runs.
        resume: The folder of a run to resume, in place of `folder`.
        quiet: Print no progress.
        callbacks: Functions that get the metrics.
        owns_process: Whether a second signal may end the process.
    """
    check_sinks(recipe.log or ())
    layout = check_fit(recipe, world_size())
    agreed = (AgreedError, Interrupted, NotFiniteError, DriftError)
    with (
        joined(recipe.timeout) as world,
        _run_folder(recipe, folder, resume, world) as place,
        watched(world, layout, agreed, place.close),
        compiler_errors(),
    ):
        check_agreement(world, {"flags": _shared_flags(recipe)})  # first: what follows depends on them
        task, stream = _build(recipe, world)
        with (
            kernels(task.device, recipe.deterministic, recipe.tf32),
            listening(owns_process) as request,
            following_launcher(request),
        ):
            check_agreement(world, _common(recipe, task))
            job, progress = _start(recipe, layout, world, place, task, stream)
            if progress.step >= job.stop and not quiet:
                _tell(f"{place.path} is complete ({progress.step:,} steps): evaluating it again")
            from_main(world, lambda: place.open(progress.step))
            with closing(_optional_sinks(recipe, job, place.path, progress, callbacks)) as optional:
                with _recording(recipe, job, place.path, progress, quiet, optional) as (sinks, saver):
                    traces = Path(os.fsdecode(from_main(world, lambda: os.fsencode(place.path / "traces"))))
                    profile = Profile(recipe.profile, traces, world.rank)
                    policy = build_policy(recipe, stream, world.device)
                    signal_number = run(job, progress, policy, request, sinks, saver, profile)
                if progress.step < job.stop:
                    _tell(f"stopped after step {progress.step}; to resume: {_command(recipe, place.path)}")
                    world.barrier()  # a rank that ends earlier would have its launcher end the one that still writes
                    raise Interrupted(signal_number)
                evaluation = evaluate_task(task, world, job.ema)
                optional.log(progress.step, evaluation)
            summary = {**_facts(resolved(recipe, task.data)), **position(job, progress), **evaluation}
            if world.is_main:
                write_summary(place.path, summary)
    return {**summary, "run": str(place.path)} if world.is_main else {}


def _build(recipe: Recipe, world: World) -> tuple[Task, Stream]:
    """The network and the data, whose files rank 0 lists for all; what is wrong on any rank, all ranks say."""
    share = None if world.size == 1 else partial(from_main_patiently, world)

    def build(data: DataSet) -> tuple[Task, Stream]:
        task = build_task(recipe, world.device, trains=True, data=data)
        return task, build_stream(recipe, task)

    data = open_task_data(recipe, share)
    return on_all(world, lambda: build(data))


def _start(
    recipe: Recipe, layout: Layout, world: World, place: RunFolder, task: Task, stream: Stream
) -> tuple[Job, Progress]:
    """The run at its first step, or where the newest checkpoint of its folder left it."""
    # Only rank 0 reads the folder, so that all ranks resume from the same checkpoint.
    packed = from_main(world, lambda: _find(recipe, task, place))
    checkpoint = Checkpoint.unpack(packed) if packed else None
    # Made from the same seed, but machines may differ in the last digits.
    world.broadcast_tensors([*task.model.parameters(), *task.model.buffers()])
    job = build_job(recipe, task, stream, layout, world, checkpoint.about["step"] if checkpoint else 0)
    return job, Progress() if checkpoint is None else restore_job(job, checkpoint)


def evaluate(recipe: Recipe, folder: Path, robust: bool, epsilon: float, steps: int) -> dict[str, Any]:
    """Evaluate the newest checkpoint of a run; `robust` adds the accuracy under PGD of this radius and steps."""
    task, checkpoint, ema = _trained(recipe, folder)
    attack = None
    if robust:  # steps long enough to cross the ball and come back
        size = epsilon if steps == 1 else 2.5 * epsilon / steps
        attack = PGD(epsilon, size, steps, random_start=1.0, branch="main", statistics="running")
    with kernels(task.device, recipe.deterministic, recipe.tf32):
        figures = evaluate_task(task, World(0, 1, task.device), ema, attack)
    about = {key: checkpoint.about["position"][key] for key in _POSITION if key in checkpoint.about["position"]}
    return {**_facts(resolved(recipe, task.data)), **about, **figures}


def analyze(recipe: Recipe, folder: Path, wanted: Analysis, again: bool, quiet: bool) -> dict[str, Any]:
    """Sharpness and robust accuracy of the newest checkpoint, by branch, also written as analysis.json in its folder.

    Args:
        recipe: That of the run.
        folder: The folder of the run.
        wanted: What to measure, and how precisely.
        again: Measure also what analysis.json has already.
        quiet: Print no progress.
    """
    task, checkpoint, ema = _trained(recipe, folder)
    about = {"step": checkpoint.about["step"], "ema": bool(ema)}
    twins = partial(ATTACKS[recipe.attack.name].build, asdict(recipe.attack), statistics="running")
    path = folder / FILE
    with ema.swapped_in():
        found = run_analysis(
            task, lambda name: twins(branch=name), recipe.chunk_size, path, about, wanted, again, quiet
        )
    return {**about, **found, "file": str(path)}


def _trained(recipe: Recipe, folder: Path) -> tuple[Task, Checkpoint, Ema]:
    """The task with the weights of the newest checkpoint, and their moving average."""
    task = build_task(recipe, own_device())
    checkpoint = find_checkpoint(folder, _expected(recipe, task), _tell)
    if checkpoint is None:
        raise ValueError(f"{folder} has no checkpoint yet: train it further with {_command(recipe, folder)}")
    load_model(task.model, checkpoint.tensors)
    ema = Ema(task.model, recipe.ema)
    ema.load(average_weights(checkpoint.tensors))
    return task, checkpoint, ema


def export(folder: Path, out: Path, raw: bool = False) -> dict[str, Any]:
    """Write the weights of the newest checkpoint as a plain model, without adversarial branches.

    If the run keeps a moving average of the weights, that is written, unless `raw` is set.
    """
    check_run_folder(folder)
    checkpoint = newest_whole(folder / "checkpoints", _tell, _check_plain)
    source = "model" if raw or not average_weights(checkpoint.tensors) else "ema"
    tensors = {name: checkpoint.tensors[f"{source}.{name}"] for name in checkpoint.about["plain"]}
    try:
        replace_file(out, safetensors.torch.save(tensors))
    except OSError as error:
        raise ValueError(f"cannot write {out} ({error.strerror or error}): name another file") from None
    kind = "moving average" if source == "ema" else "raw"
    return {"file": str(out), "weights": kind, "tensors": len(tensors), "step": checkpoint.about["step"]}


@contextmanager
def _run_folder(recipe: Recipe, folder: Path | None, resume: Path | None, world: World) -> Iterator[RunFolder]:
    """The folder of the run, which only rank 0 opens; unlocked at the end."""
    header = "\n".join(f"{what} {version}" for what, version in versions().items())
    config = dump_recipe(recipe, f"The recipe of this run, whole. Written with:\n{header}")
    name = f"{recipe.data.name or Path(str(recipe.data.path)).name}-{recipe.method}"
    restarted = world.attempt > 0
    path = resume or folder or default_folder(Path("runs"), name, config, restarted)
    place = RunFolder(path, config, is_new=resume is None and not (restarted and holds(path, config)))
    try:
        yield place
    except ValueError:
        place.close(status=2)
        raise
    finally:
        place.close()


def _find(recipe: Recipe, task: Task, place: RunFolder) -> bytes:
    """The checkpoint to resume from, packed; empty if the run starts."""
    place.prepare()
    if place.is_new:
        return b""
    checkpoint = find_checkpoint(place.path, _expected(recipe, task), _tell)
    if checkpoint is None:
        _tell(f"{place.path} has no checkpoint yet: starting from its first step")
        return b""
    if checkpoint.about["versions"] != versions():
        before, now = (
            ", ".join(f"{what} {number}" for what, number in sorted(found.items()))
            for found in (checkpoint.about["versions"], versions())
        )
        _tell(f"written with {before}; now {now}: numbers may differ in their last digits")
    return checkpoint.pack()


def _shared_flags(recipe: Recipe) -> dict[str, Any]:
    return {key: value for key, value in flatten(recipe).items() if key not in _OF_A_MACHINE}


def _common(recipe: Recipe, task: Task) -> dict[str, dict[str, Any]]:
    """What all ranks must have in common besides flags."""
    return {
        "data": data_facts(task.data, recipe.data.path),
        "software": software_facts(versions(), task.model),
    }


def _expected(recipe: Recipe, task: Task) -> Expected:
    decisive = {key: value for key, value in flatten(recipe).items() if key not in RESUMABLE}
    optimizer = build_optimizer(recipe, task.model)
    fill_state(optimizer)
    return Expected(task.model, optimizer, recipe.delay, recipe.ema > 0, decisive, added_values())


def _command(recipe: Recipe, folder: Path) -> str:
    """The command that resumes a run."""
    size = world_size()
    local = int(os.environ.get("LOCAL_WORLD_SIZE", str(size)))
    nodes = f"--nnodes {size // local} " if size > local else ""
    launcher = "" if size == 1 else f"torchrun {nodes}--nproc-per-node {local} -m "
    # A folder may not name code to import, so its command does.
    model = f" --model {shlex.quote(recipe.model)}" if is_callable(recipe.model) else ""
    return f"{launcher}conadv train --resume {shlex.quote(str(folder))}{model}"


def _optional_sinks(recipe: Recipe, job: Job, folder: Path, progress: Progress, callbacks: Callbacks | None) -> Sinks:
    """The sinks of --log and the callbacks; they also get the final evaluation."""
    if not job.world.is_main:
        return Sinks()
    made = [SINKS[name].make(folder, progress.step, flatten(recipe)) for name in dict.fromkeys(recipe.log or ())]
    return Sinks([*made, *([callbacks] if callbacks else [])])


@contextmanager
def _recording(
    recipe: Recipe, job: Job, folder: Path, progress: Progress, quiet: bool, optional: Sinks
) -> Iterator[tuple[Sinks, StateSaver]]:
    """The sinks of a run, and the saver of its checkpoints."""
    if not job.world.is_main:
        yield Sinks(), NullSaver()
        return
    about = {
        "recipe": flatten(recipe),
        "versions": versions(),
        "plain": list(plain_state_dict(job.task.model)),
    }
    with (
        ProgressBar(progress.step, job.stop, quiet) as bar,
        closing(Metrics(folder / "metrics.jsonl", progress.step)) as metrics,
        closing(CheckpointSaver(folder, recipe.checkpoint.keep, about, before=metrics.flush)) as saver,
    ):
        if not quiet and progress.step < job.stop:
            values = flatten(resolved(recipe, job.task.data))
            for line in preview(values, METHODS[recipe.method].passes, job, progress.step):
                bar.say(line)
        for note in _notes(job):
            bar.say(note)
        if metrics.missing:
            _tell(f"metrics.jsonl was damaged: {metrics.missing} of the steps before {progress.step} have no line")
        yield Sinks([metrics, bar, optional]), saver


def _notes(job: Job) -> Iterator[str]:
    """Notes about the data to print before training starts."""
    yield from (f"left out: {problem}" for problem in job.task.data.skipped)
    yield from job.task.data.notes
    if job.stream.remainder:
        yield f"each epoch leaves out {job.stream.remainder} images, others every time"


def _facts(recipe: Recipe) -> dict[str, Any]:
    """What a summary says of the recipe."""
    names = ("method", "delay", "model", "batch_size", "chunk_size", "epochs", "seed")
    facts = {**{name: getattr(recipe, name) for name in names}, "epsilon": recipe.attack.epsilon}
    return {**facts, "ema": recipe.ema} if recipe.ema else facts


def _check_plain(checkpoint: Checkpoint) -> None:
    sources = ["model.", *["ema."] * bool(average_weights(checkpoint.tensors))]
    names = [source + name for source in sources for name in checkpoint.about["plain"]]
    missing = [name for name in names if name not in checkpoint.tensors]
    if missing:
        raise ValueError(f"lacks the tensor {missing[0]}")


def _tell(text: str) -> None:
    """Print a line on standard error, from rank 0 only."""
    if own_rank() == 0:
        with suppress(OSError):  # the launcher that read it may be gone
            print(text, file=sys.stderr, flush=True)
