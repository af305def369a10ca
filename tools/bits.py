"""Train every method in many small settings of one process, and print a digest of the weights and losses of each.

    git worktree add ../before v0.2 && PYTHONPATH=../before/src python tools/bits.py > before.txt
    python tools/bits.py > after.txt && diff before.txt after.txt

A refactor must not change a bit. It takes about half a minute, and uses public names only.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import conadv

EPSILON = 8 / 255
STEPS = 7
# Arguments of each method; the attack of ConAdv goes through the branch of its twins.
METHODS: dict[str, Callable[..., Any]] = {
    "vanilla": lambda model, **common: conadv.Vanilla(model, F.cross_entropy, **common),
    "disadv": lambda model, **options: _conadv(model, delay=0, **options),
    "conadv": lambda model, **options: _conadv(model, delay=1, **options),
    "conadv-3": lambda model, **options: _conadv(model, delay=3, steps=2, **options),
    "recycled": lambda model, **options: conadv.Recycled(model, F.cross_entropy, conadv.PGD(EPSILON), **options),
    "sam": lambda model, **common: conadv.Sam(model, F.cross_entropy, **common),
}
WITHOUT_TWINS = ("vanilla", "sam")


def _conadv(model: nn.Module, twin_branch: str = "adv", steps: int = 1, **options: Any) -> conadv.ConAdv:
    attack = conadv.PGD(EPSILON, EPSILON / steps, steps=steps, branch=twin_branch)
    return conadv.ConAdv(model, F.cross_entropy, attack, twin_branch=twin_branch, **options)


def settings() -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """A method, its arguments, and how its loop is: by loss, accumulated, with dropout, with a third view."""
    loops = [
        {"by_loss": by_loss, "accumulate": accumulate, "dropout": dropout, "views": views}
        for by_loss, accumulate, dropout, views in itertools.product((False, True), (1, 2), (False, True), (2, 3))
    ]
    for name, chunk_size, loop in itertools.product(METHODS, (None, 4), loops):
        common = {"chunk_size": chunk_size, "seed": 5}
        if name in WITHOUT_TWINS:
            if not (name == "sam" and loop["by_loss"]):
                yield name, common, loop
            continue
        for share, branch, weight in itertools.product(("1", "1/2"), ("adv", "main"), (0.3, 0.5, 1)):
            if share != "1" and chunk_size is None:
                continue  # a share is one of the chunks
            if weight < 1 or (branch == "main" and share == "1" and name != "recycled"):
                yield name, {**common, "twin_share": share, "twin_branch": branch, "adv_weight": weight}, loop


def network(dropout: bool, views: int) -> nn.Module:
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.Dropout(0.3) if dropout else nn.Identity(),
        nn.Conv2d(8, 12, 3, stride=2),
        nn.BatchNorm2d(12),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(108, 5),
    )
    return conadv.split_batchnorm(model, ("main", "aug", "adv") if views == 3 else ("main", "adv"))


def batches() -> list[tuple[Tensor, Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)

    def images() -> Tensor:
        return torch.rand(16, 3, 8, 8, generator=generator)

    return [(images(), torch.randint(5, (16,), generator=generator), images()) for _ in range(STEPS)]


def digest(name: str, options: dict[str, Any], loop: dict[str, Any]) -> str:
    """Train in one setting, and hash the final state and the losses of every step."""
    model = network(loop["dropout"], loop["views"])
    torch.manual_seed(11)
    method = METHODS[name](model, **options)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    found = hashlib.sha256()
    for number, (images, labels, view) in enumerate(batches(), 1):
        batch = conadv.Batch(images, labels, view if loop["views"] == 3 else None)
        if loop["by_loss"]:
            (method.loss(batch) / loop["accumulate"]).backward()
        else:
            method(batch)
        for loss in method.losses:
            found.update(loss.numpy().tobytes())
        if number % loop["accumulate"] == 0:
            optimizer.step()
            optimizer.zero_grad()
    for key, value in model.state_dict().items():
        found.update(key.encode() + value.numpy().tobytes())
    return found.hexdigest()


if __name__ == "__main__":
    torch.set_num_threads(1)
    for setting in settings():
        print(*setting, digest(*setting))
