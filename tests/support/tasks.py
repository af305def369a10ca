"""What the rank processes of tests do: functions that every process can import."""

from __future__ import annotations

import io
import pickle
import runpy
import signal
import time
from contextlib import chdir, nullcontext, redirect_stdout
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import psutil
import pytest
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.distributed import distributed_c10d

from conadv import Vanilla, cli
from conadv.config import recipe_of_run
from conadv.core.splitbn import pending_statistics, split_batchnorm
from conadv.core.twins import StaleWeights
from conadv.ranks.agreement import from_main
from conadv.ranks.launch import own_rank, world_size
from conadv.ranks.layout import Layout
from conadv.ranks.member import Member, StepError
from conadv.ranks.world import joined, own_device
from conadv.roles import Role
from conadv.trainer import train as training
from conadv.trainer.build import build_job, build_task, check_fit
from conadv.trainer.checkpoint import gather
from conadv.trainer.loop import Progress, run
from conadv.trainer.stop import Interrupted, StopRequest
from support import tiny


def take_steps(changes: dict[str, Any], out: str) -> str:
    """Train as a recipe says; rank 0 writes the state to a file, and each returns the digest of its weights."""
    recipe = tiny.recipe(**changes)
    layout = check_fit(recipe, world_size())
    task = build_task(recipe, own_device())
    with joined(recipe.timeout, main=layout.learners()[0]) as world:
        job = build_job(task, layout, world, start=0)
        run(job, Progress(), StopRequest())
        job.member.share_weights()  # else a rank that only attacks has those of its last step
        state = gather(task.model, job.optimizer, StaleWeights(task.model, 0)).tensors
        if world.is_main:
            Path(out).write_bytes(safetensors.torch.save(state))
        if job.member.only_attacks:
            assert not job.optimizer.state, "it learns nothing"
        if job.member.place.role in (Role.CLEAN, Role.ATTACK) and not world.is_main:
            assert not job.member.stale.versions, "it needs no stale weights"
    shared = {name: tensor for name, tensor in state.items() if not name.startswith("optimizer.")}
    return sha256(safetensors.torch.save(shared)).hexdigest()


def share_weights() -> list[float]:
    """Weights of several types and layouts that differ from rank to rank, until rank 0 shares its own."""
    with joined(30) as world:
        torch.manual_seed(world.rank)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).to(memory_format=torch.channels_last)
        model.append(nn.Linear(3, 1).double())
        model[1].num_batches_tracked += world.rank
        world.broadcast_tensors([*model.parameters(), *model.buffers()])
        return [float(number) for tensor in model.state_dict().values() for number in tensor.flatten()]


def count_messages(method: str, layout: str, delay: int) -> tuple[int, int]:
    """The most twins that a rank keeps in memory after a step, and how many are left at the end of a run."""
    changes = {"method": method, "layout": layout, "batch_size": 16, "epochs": 4}
    recipe = tiny.recipe(**changes, **({"delay": delay} if method == "conadv" else {}))
    plan, task = check_fit(recipe, world_size()), build_task(recipe, own_device())
    with joined(30, main=plan.learners()[0]) as world:
        job = build_job(task, plan, world, start=0)
        most = 0
        for now, ahead in job.feed(0):
            job.member.step(now, ahead)
            most = max(most, _in_memory(job.member))
            job.optimizer.step()
            job.optimizer.zero_grad()
        job.member.drain()
        return most, _in_memory(job.member)


def _in_memory(member: Member) -> int:
    """The number of messages with twins."""
    return len(member.post.twins._sent) + len(member.post.twins._coming)


def step_with_oddity(oddity: str) -> str:
    """What a step says in which rank 1 has a number that is not finite."""

    def loss(outputs: Tensor, labels: Tensor) -> Tensor:
        value = outputs.sum()
        if world.rank == 1 and oddity == "loss":
            return value * float("nan")
        if world.rank == 1 and oddity == "gradient":
            return value + (model[0].weight * 0).sqrt().sum()
        return value

    with joined(30) as world:
        model = split_batchnorm(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)).double(), ("main",))
        layout = Layout.fit(None, Vanilla.duties, world.size)
        member = Member(world, layout, model, Vanilla(model, loss, chunk_size=4), chunks=world.size)
        if world.rank == 1 and oddity == "statistics":
            pending_statistics(model)[0][0] = float("nan")
        try:
            member.step((torch.rand(4, 2).double(), torch.zeros(4, dtype=torch.long)), None).read()
        except StepError as error:
            return str(error)
    return ""


def ask_main_for_long(seconds: float, timeout: float) -> bytes:
    """What a rank gets of work on rank 0 that takes longer than any rank waits for another."""

    def work() -> bytes:
        time.sleep(seconds)
        return b"found"

    with joined(timeout) as world:
        return from_main(world, work)


def collectives(data: bytes) -> tuple[bytes, bool, float]:
    """What each rank gets from the others when the leading one has `data`."""
    with joined(30) as world:
        received = world.broadcast(data if world.is_main else b"")
        some = world.any(world.rank == 1)
        total = world.all_reduce(torch.tensor([float(world.rank)]))
        world.barrier()
        return received, some and not world.any(False), float(total)


class _StopAfter:
    """Somebody who asks to stop while so many steps have been taken since the start; 0: never."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._asked = 0

    @property
    def signal(self) -> int | None:
        self._asked += 1
        return signal.SIGTERM if self._asked == self._steps else None

    def obey_by(self, obey: Any) -> None:
        """It asks only between steps, so that nothing ends the process before."""


def train(folder: str, resume: bool, changes: dict[str, Any], stop_after: int = 0, asked: int = 0) -> int:
    """`conadv train` in this process, whose rank may be asked to stop; the exit status.

    `asked`: the number of the rank among those that learn.
    """
    ranks = _learners(changes.get("layout"), world_size())
    steps = stop_after if own_rank() == ranks[asked % len(ranks)] else 0
    fields = {key.replace("__", "."): str(value) for key, value in changes.items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "listening", lambda *_: nullcontext(_StopAfter(steps)))
        try:
            if resume:
                own = "support.tiny:net"
                code = {"model": own} if own in Path(folder, "config.toml").read_text() else {}
                recipe = recipe_of_run(folder, {**code, **fields})
                training.train_recipe(recipe, None, Path(folder), quiet=True)
            else:
                training.train_recipe(tiny.recipe(**changes), Path(folder), None, quiet=True)
        except Interrupted as stop:
            return stop.exit_status
    return 0


def _learners(layout: str | None, size: int) -> list[int]:
    return Layout.fit(None if layout == "none" else layout, world_size=size).learners()


def run_script(path: str, folder: str) -> str:
    """What a script prints in this process, with the folder as its working directory."""
    with chdir(folder), redirect_stdout(io.StringIO()) as said:
        runpy.run_path(path, run_name="__main__")
    return said.getvalue()


def train_late(folder: str, resume: bool, changes: dict[str, Any], stop_after: int = 0, asked: int = 0) -> int:
    """The same where the outcome of a step is read one step late, as on GPUs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            training, "build_job", lambda *arguments, **more: replace(build_job(*arguments, **more), late=True)
        )
        return train(folder, resume, changes, stop_after, asked)


def train_in_two_parts(folder: str, changes: dict[str, Any], stop_after: int) -> int:
    """`conadv train` as torchrun repeats it: stopped the first time, and to its end the second."""
    return train(folder, False, changes, 0 if Path(folder).exists() else stop_after)


def train_without_pickle(folder: str, changes: dict[str, Any]) -> int:
    """`conadv train` where every way to unpickle something fails."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("something was unpickled")

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in ((pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (torch, "load")):
            patch.setattr(owner, name, refuse)
        patch.setattr(distributed_c10d, "_tensor_to_object", refuse)
        return cli.main(["train", *tiny.words(**changes), "--run-dir", folder, "--quiet"])


def listening_addresses(environment: dict[str, str]) -> list[str]:
    """Where this process listens while it trains, beside where it listened before."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        before = _listening()
        recipe = tiny.recipe(epochs=1)
        task = build_task(recipe, own_device())
        with joined(recipe.timeout) as world:
            job = build_job(task, check_fit(recipe, world.size), world, start=0)
            run(job, Progress(), StopRequest())
            return sorted(address.ip for _, address in _listening() - before)


def _listening() -> set[tuple[int, Any]]:
    """The descriptor and the address of each socket of this process that listens."""
    found = psutil.Process().net_connections("tcp")
    return {(one.fd, one.laddr) for one in found if one.status == psutil.CONN_LISTEN}
