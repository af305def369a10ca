"""`conadv train`: start a run from a recipe, or resume one from its folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from conadv import bf16
from conadv.config import Recipe, dump_recipe, flatten, sealed
from conadv.core.splitbn import plain_state_dict
from conadv.ranks.agreement import AgreedError, check_agreement, from_main, on_all
from conadv.ranks.faults import guarded
from conadv.ranks.launch import local_rank, world_size
from conadv.ranks.layout import Layout
from conadv.ranks.member import StepError
from conadv.ranks.world import World, joined
from conadv.sinks import SINKS, Sink, check_sinks
from conadv.task.stream import Stream

from .best import BestWeights
from .build import Job, build_job, build_policy, build_stream, check_fit, with_chunk_size
from .build_task import Task, build_task, final_test, network_facts, open_task_data, resolved
from .checkpoint import Checkpoint, CheckpointSaver, NullSaver, StateSaver
from .fingerprint import data_facts, software_facts
from .folder import RunFolder, default_folder, holds, resume_command, versions, write_summary
from .kernels import compiler_errors, kernels
from .ledger import Progress
from .loop import evaluate, position, run
from .metrics import Callbacks, Metrics, Sinks
from .preview import preview
from .profiling import Profile
from .progress import ProgressBar, tell
from .resume import find_checkpoint, restore_job
from .showcase import Showcase
from .stop import Interrupted, listening, stopped_early
from .trained import expected, facts

# Flags that may differ between machines. The content of the data is compared separately.
_MACHINE_FLAGS = ("threads", "data.path", "data.workers")
# Errors that all ranks raise together.
_AGREED = (AgreedError, Interrupted, StepError)


def train(
    recipe: Recipe,
    folder: Path | None,
    resume: Path | None,
    quiet: bool,
    callbacks: Callbacks | None = None,
    owns_process: bool = True,
) -> dict[str, Any]:
    """Train to the end of a recipe, and return the summary; empty on ranks other than 0.

    Args:
        recipe: What to train, and how.
        folder: The folder to write; None: a new one under runs.
        resume: The folder of a run to resume, in place of `folder`.
        quiet: Print no progress.
        callbacks: Functions to call with the metrics.
        owns_process: Whether signals may end the process; False in a notebook.
    """
    check_sinks(recipe.log)
    recipe = with_chunk_size(recipe, world_size())
    layout = check_fit(recipe, world_size())
    with (
        listening(owns_process) as request,
        joined(recipe.timeout, main=layout.learners()[0]) as world,
        _run_folder(recipe, folder, resume, world) as place,
        guarded(world, layout, _AGREED, place.close, lambda: request.signal is not None) as end_all,
        compiler_errors(),
    ):
        to_resume = f"to resume: {resume_command(place.path, recipe.model, recipe.data.path)}"
        if owns_process:
            advice = [to_resume] if resume else []
            request.obey_by(lambda number: end_all(128 + number, stopped_early(number, *advice)))
        flags = {key: value for key, value in flatten(recipe).items() if key not in _MACHINE_FLAGS}
        check_agreement(world, {"flags": flags})  # first, since everything else depends on the flags
        _try_bfloat16(recipe, world, sets=owns_process)
        task, stream = _build(recipe, world)
        with kernels(task.device, recipe.deterministic):
            check_agreement(world, _common(recipe, task))
            job, progress = _start(recipe, layout, world, place, task, stream)
            request.obey_by(None)
            if progress.step >= job.stop and not quiet:
                tell(f"{place.path} is complete ({progress.step:,} steps): evaluating it again")
            from_main(world, lambda: place.open(progress.step))
            with closing(job), closing(_optional_sinks(recipe, job, place.path, progress, callbacks)) as optional:
                with _recording(recipe, job, place.path, progress, quiet, optional) as (sinks, saver):
                    traces = Path(os.fsdecode(from_main(world, lambda: os.fsencode(place.path / "traces"))))
                    profile = Profile(recipe.profile, traces, world.rank, job.pool)
                    policy = build_policy(recipe, stream, world.device)
                    signal_number = run(job, progress, policy, request, sinks, saver, profile)
                if progress.step < job.stop:
                    tell(f"stopped after step {progress.step}; {to_resume}")
                    world.barrier()  # torchrun ends all ranks when one exits, and rank 0 may still be writing
                    raise Interrupted(signal_number)
                evaluation = evaluate(job, final_test(recipe))
                optional.log(progress.step, evaluation)
            summary = {**facts(resolved(recipe, task.data)), **position(job, progress), **evaluation}
            if world.is_main:
                write_summary(place.path, summary)
    return {**summary, "run": str(place.path)} if world.is_main else {}


def _try_bfloat16(recipe: Recipe, world: World, sets: bool) -> None:
    """Try bfloat16 on one rank of each machine if the run computes with it on CPUs; `sets`: set what it needs."""
    if recipe.precision != "bfloat16" or world.device.type != "cpu":
        return
    note = bf16.prepare(world.all_reduce_max, tries=local_rank() == 0, sets=sets)
    if note:
        tell(note)


def _build(recipe: Recipe, world: World) -> tuple[Task, Stream]:
    """Build the network and the data; rank 0 lists the files, and an error of any rank is raised on all of them."""
    share = None if world.size == 1 else partial(from_main, world)

    def build() -> tuple[Task, Stream]:
        task = build_task(recipe, world.device, trains=True, data=open_task_data(recipe, share))
        return task, build_stream(recipe, task)

    return on_all(world, build)


def _start(
    recipe: Recipe, layout: Layout, world: World, place: RunFolder, task: Task, stream: Stream
) -> tuple[Job, Progress]:
    """Build the job of a new run, or restore it from the newest checkpoint."""
    # Only rank 0 reads the folder, so that all ranks resume from the same checkpoint.
    packed = from_main(world, lambda: _find(recipe, task, place))
    checkpoint = Checkpoint.unpack(packed) if packed else None
    # All ranks use the same seed, but machines may differ in the last digits.
    world.broadcast_tensors([*task.model.parameters(), *task.model.buffers()])
    job = build_job(recipe, task, stream, layout, world, checkpoint.about["step"] if checkpoint else 0)
    return job, Progress() if checkpoint is None else restore_job(job, checkpoint)


@contextmanager
def _run_folder(recipe: Recipe, folder: Path | None, resume: Path | None, world: World) -> Iterator[RunFolder]:
    """The folder of the run, unlocked at the end; only rank 0 opens it."""
    header = "\n".join(f"{what} {version}" for what, version in versions().items())
    config = sealed(dump_recipe(recipe, f"The recipe of this run, whole. Written with:\n{header}"))
    data = recipe.data.name or Path(str(recipe.data.path)).name.replace(":", "-")
    name = f"{data}-{recipe.method}"
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
    """Return the checkpoint to resume from, packed; empty for a new run."""
    place.prepare()
    if place.is_new:
        return b""
    checkpoint = find_checkpoint(place.path, expected(recipe, task), tell)
    if checkpoint is None:
        tell(f"{place.path} has no checkpoint yet: starting from its first step")
        return b""
    if checkpoint.about["versions"] != versions():
        before, now = (
            ", ".join(f"{what} {number}" for what, number in sorted(found.items()))
            for found in (checkpoint.about["versions"], versions())
        )
        tell(f"written with {before}; now {now}: numbers may differ in their last digits")
    return checkpoint.pack()


def _common(recipe: Recipe, task: Task) -> dict[str, dict[str, Any]]:
    """Return the facts besides flags that must be the same on all ranks."""
    return {"data": data_facts(task.data, recipe.data.path), "software": software_facts(versions(), task.model)}


def _optional_sinks(recipe: Recipe, job: Job, folder: Path, progress: Progress, callbacks: Callbacks | None) -> Sinks:
    """The sinks of --log, the best weights and the callbacks, which also get the final evaluation."""
    if not job.world.is_main:
        return Sinks()
    names, values = dict.fromkeys(recipe.log), flatten(recipe)
    boards = [SINKS[name](folder, progress.step, values) for name in names]
    made: list[Sink] = [*boards]
    if boards and job.task.twins is not None:
        made.append(Showcase(job.task, job.task.twins, boards))
    best = [BestWeights(folder, job.task.model, tell)] if recipe.eval_every else []
    return Sinks([*made, *best, *([callbacks] if callbacks else [])])


@contextmanager
def _recording(
    recipe: Recipe, job: Job, folder: Path, progress: Progress, quiet: bool, optional: Sinks
) -> Iterator[tuple[Sinks, StateSaver]]:
    """Open the sinks and the checkpoint saver of a run, and print the preview and notes."""
    if not job.world.is_main:
        yield Sinks(), NullSaver()
        return
    about = {
        "recipe": flatten(recipe),
        "versions": versions(),
        "plain": list(plain_state_dict(job.task.model)),
        "network": network_facts(resolved(recipe, job.task.data), job.task),
    }
    with (
        ProgressBar(progress.step, job.stop, quiet) as bar,
        closing(Metrics(folder / "metrics.jsonl", progress.step)) as metrics,
        closing(CheckpointSaver(folder, recipe.checkpoint.keep, about, before=metrics.flush)) as saver,
    ):
        if not quiet and progress.step < job.stop:
            values = flatten(resolved(recipe, job.task.data))
            for line in preview(values, job, progress.step):
                bar.say(line)
        for note in _notes(job):
            bar.say(note)
        if metrics.missing:
            tell(f"metrics.jsonl was damaged: {metrics.missing} of the steps before {progress.step} have no line")
        yield Sinks([metrics, bar, optional]), saver


def _notes(job: Job) -> Iterator[str]:
    """Yield notes about the data to print before training starts."""
    yield from (f"left out: {problem}" for problem in job.task.data.skipped)
    yield from job.task.data.notes
    if job.stream.remainder:
        yield f"each epoch leaves out {job.stream.remainder} images, different ones each time"
