"""What a run prints: lines about itself before its first step, then how far it has come."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any, TextIO

import torch

from conadv.core.splitbn import plain_state_dict
from conadv.last_words import say_line
from conadv.printing import duration, readable
from conadv.ranks.launch import own_rank

from .build import Job

_FEW = 100  # steps, in which a network learns little
_PAUSE = 5.0  # seconds, at least, between two lines
_SHARE = 0.02  # of the time so far, at least: a run of days prints hundreds of lines, not tens of thousands


def tell(text: str) -> None:
    """Print a line on standard error, from rank 0 only."""
    if own_rank() == 0:
        say_line(text)


def counted(number: int, what: str) -> str:
    """Such as 1 rank, 1,200 steps."""
    return f"{number:,} {what}" + "s" * (number != 1)


def preview(job: Job, start: int) -> Iterator[str]:
    """Yield lines about the model, the data, the method and the ranks of a run from step `start` on, and notes."""
    task, stream, member, recipe = job.task, job.stream, job.member, job.task.recipe
    channels, height, width = task.shape
    plain = plain_state_dict(task.model)
    parameters = sum(parameter.numel() for name, parameter in task.model.named_parameters() if name in plain)
    twins = f", epsilon {readable('epsilon', recipe.attack.epsilon)}" if task.twins is not None else ""
    delay = f", delay {recipe.delay}" if recipe.delay else ""
    steps = f"steps {start + 1:,} to {job.stop:,}" if start else counted(job.stop, "step")
    device = f"{task.device.type} with {counted(torch.get_num_threads(), 'thread')}"
    if task.device.type == "cuda":
        device = torch.cuda.get_device_name(task.device)
    yield f"model   {recipe.model}, {parameters:,} parameters"
    yield (
        f"data    {len(task.data.train):,} images of {height} × {width} × {channels}, "
        f"{len(task.data.train.classes):,} classes; {len(task.data.test):,} to test"
    )
    yield f"method  {recipe.method}{twins}{delay}; {recipe.optimizer.name}, peak rate {recipe.optimizer.lr:g}"
    yield (
        f"run     {steps} of {counted(stream.batch_size, 'image')} on {counted(member.world.size, 'rank')} "
        f"({member.layout}), {device}, chunks of {stream.chunk_size}"
    )
    yield from (f"left out: {problem}" for problem in task.data.skipped)
    yield from task.data.notes
    if recipe.data.path and job.stop < _FEW and not recipe.pretrained:
        few = f"{counted(job.stop, 'step')} of {counted(stream.batch_size, 'image')}: a network from random weights"
        yield f"{few} needs some hundreds; raise --epochs, lower --batch-size, or try --model timm:NAME --pretrained"


class ProgressLines:
    """A metric sink that prints how far a run has come, every few seconds at first and less often in a long run."""

    def __init__(self, stop: int, quiet: bool, stream: TextIO | None = None) -> None:
        self._stop, self._quiet, self._stream = stop, quiet, stream or sys.stderr
        self._last_line = time.monotonic()
        self._first: tuple[int, float] | None = None  # the first step of this process, and its time

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Print a training step, which counts from 0, and the accuracy if the step was evaluated."""
        done, now = step + 1, time.monotonic()
        self._first = first, began = self._first or (done, now)
        if done == self._stop or now - self._last_line > max(_PAUSE, _SHARE * (now - began)):
            attackers = f"  attackers {metrics['attackers']:.0f}" if "attackers" in metrics else ""
            text = f"loss {metrics['loss']:.4f}  lr {metrics['lr']:.4g}{attackers}"
            if done not in (first, self._stop):  # the pace is that after the first step
                text += f"  {duration((self._stop - done) * (now - began) / (done - first))} left"
            self.say(f"step {done}/{self._stop}  {text}")
        if accuracies := [f"{name} {value:.2f} %" for name, value in metrics.items() if name.endswith("_top1")]:
            self.say(f"step {done}/{self._stop}  {', '.join(accuracies)}")

    def say(self, text: str) -> None:
        """Print a line."""
        self._last_line = time.monotonic()
        if not self._quiet:
            print(text, file=self._stream, flush=True)
