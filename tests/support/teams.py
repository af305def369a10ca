"""What the ranks of a `conadv.Team` do in tests: a user's own loop, in any layout, and the same loop in one process."""

from __future__ import annotations

import json
import os
from hashlib import sha256
from itertools import count
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import conadv
from conadv.ranks.sampler import TeamSampler
from conadv.roles import Role
from support.settings import RHO, small_batches, small_cnn

BATCH, CHUNK, EPOCHS, STEPS = 16, 2, 2, 3  # steps per epoch
SEED = 5


def data() -> TensorDataset:
    images, labels = zip(*small_batches(STEPS, BATCH), strict=True)
    return TensorDataset(torch.cat(images), torch.cat(labels))


def make(name: str, model: nn.Module, factory: Any, **options: Any) -> Any:
    """A method, by `factory` (a team's or the class itself)."""
    attack = [] if name in ("Vanilla", "Sam") else [conadv.PGD(8 / 255)]
    return factory(model, F.cross_entropy, *attack, **({"rho": RHO} if name == "Sam" else {}), **options)


def network() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = conadv.split_batchnorm(small_cnn())
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    # A parameter that no loss reached has no state, or that of zero gradients.
    buffers = (optimizer.state[p].get("momentum_buffer", torch.zeros_like(p)) for p in model.parameters())
    moments = {f"momentum.{place}": buffer.detach() for place, buffer in enumerate(buffers)}
    return {**model.state_dict(), **moments}


def epochs(
    method: Any,
    optimizer: torch.optim.Optimizer,
    sampler: TeamSampler,
    first: int = 0,
    start: int = 0,
    stop: int = 0,
    leave: int = 0,
    skip: int = -1,
) -> int:
    """A loop that anyone might write; returns the epoch in which it was stopped, after `stop` steps."""
    loader = DataLoader(data(), batch_sampler=sampler)
    epoch = first
    for epoch in range(first, EPOCHS):
        sampler.set_epoch(epoch, start if epoch == first else 0)
        for now, ahead in method.feed(loader):
            optimizer.zero_grad()
            method(now, ahead)
            if method.step % STEPS != skip:
                optimizer.step()
            if method.step in (stop, leave):
                break
        if method.step == stop:
            break
    return epoch


def alone(name: str, options: dict[str, Any], leave: int = 0, skip: int = -1) -> dict[str, Tensor]:
    """The loop in one process and without a team; its epoch is left after `leave` steps, one update of each is."""
    model, optimizer = network()
    method = make(name, model, getattr(conadv, name), chunk_size=CHUNK, seed=SEED, **options)
    epochs(method, optimizer, TeamSampler(data(), BATCH, slice(0, BATCH), SEED), leave=leave, skip=skip)
    return tensors(model, optimizer)


def train(
    layout: str | None,
    name: str,
    options: dict[str, Any],
    out: str,
    stop: int = 0,
    resume: str = "",
    existing: bool = False,
    leave: int = 0,
    skip: int = -1,
) -> str:
    """The loop in a team, perhaps stopped after `stop` steps, or resumed; the digest of its weights.

    An epoch is left after `leave` steps, for the next one. The update of step `skip` of each epoch is left out.
    """
    if existing:
        torch.distributed.init_process_group("gloo")
    with conadv.Team(layout, batch_size=BATCH, chunk_size=CHUNK, seed=SEED, timeout=30) as team:
        digest = _loop(team, name, options, out, stop, resume, leave, skip)
    if existing:
        assert torch.distributed.is_initialized()
        torch.distributed.destroy_process_group()
    return digest


def train_without_feed() -> str:
    """What is said to a rank whose batches come from the loader itself."""
    with conadv.Team("clean | adv", batch_size=BATCH, chunk_size=CHUNK, timeout=30) as team:
        method = make("Recycled", network()[0], lambda *words: team.method(conadv.Recycled, *words))
        try:
            method(next(iter(DataLoader(data(), batch_sampler=team.sampler(data())))))
        except ValueError as error:
            return str(error)
    return ""


def _loop(
    team: conadv.Team, name: str, options: dict[str, Any], out: str, stop: int, resume: str, leave: int, skip: int
) -> str:
    model, optimizer = network()
    if not team.world.is_main:  # all get the weights of rank 0
        nn.init.zeros_(model[0].weight)
    method = make(name, model, lambda *words, **fields: team.method(getattr(conadv, name), *words, **fields), **options)
    first = start = 0
    if resume:
        saved = torch.load(resume, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        start, first = method.load_state_dict(saved["method"]), saved["epoch"]
    epoch = epochs(method, optimizer, team.sampler(data()), first, start, stop, leave, skip)
    if method.step == stop:
        state = {"method": method.state_dict(), "model": model.state_dict(), "optimizer": optimizer.state_dict()}
        if team.world.is_main:
            torch.save({**state, "epoch": epoch + (stop % STEPS == 0)}, out)
        return ""
    found = safetensors.torch.save({name: tensor.contiguous() for name, tensor in tensors(model, optimizer).items()})
    if team.world.is_main:
        Path(out).write_bytes(found)
    # A rank that only attacks gets weights with the next call.
    return sha256(found).hexdigest() if team.place.role != Role.ATTACK else ""


def train_endlessly(folder: str) -> None:
    """A team that trains until something ends it; rank 0 writes a line per step."""
    with conadv.Team("clean | adv | attack", batch_size=BATCH, chunk_size=CHUNK, timeout=6) as team:
        model, optimizer = network()
        other = os.environ.get("TEAM_ATTACK") == str(team.world.rank)
        method = team.method(conadv.ConAdv, model, F.cross_entropy, conadv.PGD(0.5 if other else 0.25))
        loader = DataLoader(data(), batch_sampler=team.sampler(data()))
        for _ in count():
            for now, ahead in method.feed(loader):
                if method.step == 4 and os.environ.get("TEAM_FAULT") == str(team.world.rank):
                    raise ValueError("this image cannot be read")
                optimizer.zero_grad()
                method(now, ahead)
                optimizer.step()
                if team.world.is_main:
                    Path(folder).mkdir(exist_ok=True)
                    with Path(folder, "metrics.jsonl").open("a") as file:
                        file.write(json.dumps({"step": method.step}) + "\n")
