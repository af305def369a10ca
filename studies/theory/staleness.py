"""How far stale twins are from fresh ones: the quantities of the paper's Lemma 1 and Theorem 1, by delay.

    python studies/theory/staleness.py --steps 200 --seeds 3

           ┌► attack with θ_{t-τ} ──► stale twins ┐
images ────┤                                      ├──► distance, signs, loss and gradient at θ_t
           └► attack with θ_t ──────► fresh twins ┘
"""

from __future__ import annotations

from statistics import fmean

import torch
import torch.nn.functional as F
from torch import nn

import conadv
from small_task import Images, arguments, gradient, load, table, train

DELAYS, EVERY = (1, 2, 4, 8), 10


def measure(
    model: nn.Module, old: nn.Module, batch: Images, epsilon: float = 24 / 255, weight: float = 0.5
) -> dict[str, float]:
    """Compare the twins of the weights of then with those of now, on one batch; README.md explains the names."""
    images, labels = batch
    attack = conadv.PGD(epsilon)
    fresh = attack(model, F.cross_entropy, images, labels, seed=0)
    stale = attack(old, F.cross_entropy, images, labels, seed=0)  # the same random start
    distances = (fresh - stale).flatten(1).norm(dim=1)
    _, clean = gradient(model, "main", images, labels)
    stale_loss, of_stale = gradient(model, "adv", stale, labels)
    fresh_loss, of_fresh = gradient(model, "adv", fresh, labels)
    now, then = (torch.cat([own.detach().flatten() for own in one.parameters()]) for one in (model, old))
    drift = float((now - then).norm())
    return {
        "stale_distance": float(distances.mean()),
        "stale_agreement": float(((fresh - images).sign() == (stale - images).sign()).float().mean()),
        "weight_drift": drift,
        "lemma1_constant": float(distances.max()) / drift if drift else float("nan"),
        "stale_loss": stale_loss,
        "fresh_loss": fresh_loss,
        "gradient_norm": float(((1 - weight) * clean + weight * of_fresh).norm()),
        "gradient_error": float((weight * (of_stale - of_fresh)).norm()),
    }


def main() -> None:
    given = arguments((__doc__ or "").splitlines()[0], steps=200, batch_size=250, seeds=3)
    data = load(given.data)
    rows = []
    for delay in DELAYS:
        found = [
            measure(model, old, batch)
            for seed in range(given.seeds)
            for number, (model, old, batch) in enumerate(train(data, delay, given.batch_size, given.steps, seed))
            if number and number % EVERY == 0
        ]
        rows.append({"delay": float(delay), **{name: fmean(one[name] for one in found) for name in found[0]}})
    print(table(rows))


if __name__ == "__main__":
    main()
