"""Promise: attackers of a pool change the speed of a run, never its result, whoever is killed or joins."""

from __future__ import annotations

import os
import random
import signal
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

import psutil
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import conadv
from support.ranks import Pool as Ranks
from support.waiting import until

STEPS = 12


@pytest.fixture(scope="module")
def cluster():
    """Ray on this machine, started once: that is what takes long."""
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112  # by default 15, with which attackers starve on a busy machine
    with conadv.ray.Pool(network, attackers=0) as pool:
        yield pool


def network() -> nn.Module:
    torch.manual_seed(1)
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.1), nn.Flatten()]
    return conadv.split_batchnorm(nn.Sequential(*layers, nn.Linear(512, 5)))


def make_model():
    """A copy of `network` that is pickled by value: attackers do not import the tests."""

    def made() -> nn.Module:
        layers = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.1), nn.Flatten()]
        return conadv.split_batchnorm(nn.Sequential(*layers, nn.Linear(512, 5)))

    return made


def batches(steps: int, rank: int = 0):
    made = torch.Generator().manual_seed(5 + rank)
    return [(torch.rand(8, 3, 8, 8, generator=made), torch.randint(5, (8,), generator=made)) for _ in range(steps)]


def started(pool: conadv.ray.Pool) -> conadv.ray.Pool:
    """Wait until all attackers of a pool have started."""
    until(lambda: len(pool._ready()) == len(pool._actors), seconds=200)
    return pool


def kill_one(pool: conadv.ray.Pool, chance: random.Random) -> bool:
    """End the process of an attacker that has started."""
    if not pool._ready():
        return False
    actor = pool._actors[chance.choice(pool._ready())]
    try:
        os.kill(pool._ray.get(actor.ready.remote(), timeout=60), signal.SIGKILL)
    except pool._ray.exceptions.RayError:  # was killed before, and not noticed yet
        return False
    return True


def train(pool=None, each=lambda t: None, steps=STEPS, rank=0, wrap=lambda model: model, **settings):
    """The weights after some steps, and where their twins came from."""
    model = network()
    wrapped = wrap(model)
    method = conadv.ConAdv(wrapped, F.cross_entropy, conadv.PGD(8 / 255), seed=3, twins=pool, **settings)
    optimizer = torch.optim.SGD(wrapped.parameters(), 0.1, momentum=0.9)
    counts: Counter[str] = Counter()
    for t, (now, ahead) in enumerate(method.feed(batches(steps, rank))):
        each(t)
        optimizer.zero_grad()
        method(now, ahead)
        optimizer.step()
        if pool is not None:
            counts.update({name: int(value) for name, value in pool.metrics().items() if name.startswith("twins")})
    return model.state_dict(), method.state_dict(), counts


def assert_equal(one, other) -> None:
    for mine, theirs in zip(one[:2], other[:2], strict=True):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def disturb(pool: conadv.ray.Pool, chance: random.Random, happened: Counter[str]) -> Callable[[int], None]:
    """What happens before a step: attackers are killed and join at random, and are counted."""

    def each(t: int) -> None:
        if chance.random() < 0.3:
            happened["kills"] += kill_one(pool, chance)
        if chance.random() < 0.2:
            pool.add()
            happened["joins"] += 1
            if chance.random() < 0.5:
                started(pool)

    return each


def with_losses(seed: int, attackers: int, steps: int = STEPS, **settings) -> Counter[str]:
    """Train with attackers that are killed and join at random steps, and compare; count what happened."""
    chance, happened = random.Random(seed), Counter()
    with conadv.ray.Pool(make_model(), attackers, wait=chance.choice([0.0, 20.0])) as pool, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "an attacker was lost|no attacker is left|an attacker could not start")
        started(pool)
        pooled = train(pool, disturb(pool, chance, happened), steps, **settings)
    assert_equal(pooled, train(steps=steps, **settings))
    return happened + pooled[2]


def test_killed_and_new_attackers_change_nothing(cluster):
    """One of two is killed, then the other; a new one joins, and delivers."""
    with conadv.ray.Pool(make_model(), attackers=2, wait=60) as pool:
        started(pool)

        def each(t: int) -> None:
            if t in (3, 6):
                assert kill_one(pool, random.Random(t))
            if t == 9:
                pool.add()
                started(pool)

        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            pooled = train(pool, each, chunk_size=2)
        assert pool.metrics()["twins_pool"] == 4
        assert pool.metrics()["attackers"] == 1
    assert sum("an attacker was lost" in str(one.message) for one in told) >= 1
    assert sum("no attacker is left" in str(one.message) for one in told) == 1
    assert pooled[2]["twins_pool"] >= 4 * 5
    assert_equal(pooled, train(chunk_size=2))


def test_only_loopback_listens(cluster):
    """Ray listens on 127.0.0.1 only: what its processes have open, as the kernel shows it."""
    listening = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            command = " ".join(process.cmdline())
            if "/ray/" in command or "ray::" in command:
                found = process.net_connections("tcp")
                listening += [one.laddr.ip for one in found if one.status == psutil.CONN_LISTEN]
    assert len(listening) >= 3  # its servers, so that an empty list is not taken for a good one
    assert set(listening) <= {"127.0.0.1", "::ffff:127.0.0.1", "::1"}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("chunk_size", [8, 2])
@pytest.mark.parametrize("delay", [1, 2, 3])
@pytest.mark.parametrize("attackers", [0, 1, 2, 3])
def test_random_kills_and_joins_change_nothing(cluster, attackers, delay, chunk_size):
    happened = with_losses(100 * attackers + 10 * delay + chunk_size, attackers, delay=delay, chunk_size=chunk_size)
    assert happened["twins_pool"] + happened["twins_here"] == STEPS * 8 // chunk_size
    print(f"happened: {dict(happened)}")  # pytest -s: the counts of docs/log.md


def ddp_learner(attackers: int | None, seed: int, steps: int) -> tuple[dict[str, torch.Tensor], Counter[str]]:
    """One of several DDP ranks, with its part of the attackers or without any."""
    torch.distributed.init_process_group("gloo")
    try:
        return _learn_on_a_rank(attackers, seed, steps)
    finally:
        torch.distributed.destroy_process_group()


def _learn_on_a_rank(attackers: int | None, seed: int, steps: int) -> tuple[dict[str, torch.Tensor], Counter[str]]:
    rank = torch.distributed.get_rank()
    settings = {"rank": rank, "wrap": DistributedDataParallel, "chunk_size": 2, "delay": 1 + seed % 3, "steps": steps}
    if attackers is None:
        return train(**settings)[0], Counter()
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112
    happened: Counter[str] = Counter()
    with conadv.ray.Pool(make_model(), attackers, wait=60) as pool, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "an attacker was lost|no attacker is left|an attacker could not start")
        started(pool)
        torch.distributed.barrier()
        disturbing = disturb(pool, random.Random(2 * seed + rank), happened)
        weights, _, counts = train(pool, disturbing, **settings)
        torch.distributed.barrier()
    return weights, happened + counts


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_two_ddp_learners_with_a_pool_change_nothing(pool, seed):
    for happened in learners_with_losses(pool, seed):
        assert happened["twins_pool"] > 0
        print(f"happened: {dict(happened)}")


def learners_with_losses(pool: Ranks, seed: int, steps: int = STEPS) -> list[Counter[str]]:
    """Train on two ranks whose attackers are killed and join, and compare; what happened on each rank."""
    alone = pool.run(2, ddp_learner, None, seed, steps)
    pooled = pool.run(2, ddp_learner, 3, seed, steps)
    for (mine, _), (theirs, _) in zip(alone, pooled, strict=True):
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    return [happened for _, happened in pooled]
