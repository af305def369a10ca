"""Our attack against foolbox's, and a step of DisAdv against one written with foolbox.

    python benchmarks/attack.py --json

Foolbox computes gradients of the images and of the weights, ours of the images alone. Called as its manual says, it
also checks whether the attack succeeded, which is one more forward pass.
"""

from __future__ import annotations

import warnings
from dataclasses import replace

import torch.nn.functional as F
from torch import Tensor, nn

from alternate import alternate, arguments, compare, one_core, report
from step import ATTACK, Step, chunk, method_step, network, sgd

with warnings.catch_warnings():  # foolbox imports from where scipy has moved things away from
    warnings.simplefilter("ignore", DeprecationWarning)
    import foolbox

THEIRS = foolbox.attacks.LinfPGD(abs_stepsize=ATTACK.epsilon, steps=1, random_start=False)


def attacks(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Step]:
    """The same step from the same images by both, with running statistics, as foolbox needs."""
    images, labels = batch
    ours = replace(ATTACK, branch="main", statistics="running")
    wrapped = foolbox.PyTorchModel(model, bounds=(0, 1))
    return {
        "foolbox-unchecked": lambda: THEIRS.run(wrapped, images, labels, epsilon=ATTACK.epsilon),
        "pgd": lambda: ours(model, F.cross_entropy, images, labels),
        "foolbox": lambda: THEIRS(wrapped, images, labels, epsilons=ATTACK.epsilon),
    }


def naive_step(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Step:
    """The step without this library: attack in eval mode, drop its gradients, learn from both."""
    optimizer, (images, labels) = sgd(model), batch

    def step() -> None:
        model.eval()
        _, twins, _ = THEIRS(foolbox.PyTorchModel(model, bounds=(0, 1)), images, labels, epsilons=ATTACK.epsilon)
        model.train()
        optimizer.zero_grad()
        loss = 0.5 * F.cross_entropy(model(images), labels) + 0.5 * F.cross_entropy(model(twins), labels)
        loss.backward()
        optimizer.step()

    return step


def main() -> None:
    given = arguments(__doc__ or "", rounds=15, model="resnet20", width=16, chunk_size=64, image_size=32)
    batch = chunk(given.chunk_size, given.image_size)
    runs = {
        **attacks(network(given.model, given.width).eval(), batch),
        "disadv": method_step("disadv", network(given.model, given.width), batch),
        "naive": naive_step(network(given.model, given.width), batch),
    }
    with one_core():
        laps = alternate(runs, given.rounds)
    pairs = (("foolbox-unchecked", "pgd"), ("foolbox", "pgd"), ("naive", "disadv"))
    report([compare(laps, *pair) for pair in pairs], given.json, chunk=given.chunk_size)


if __name__ == "__main__":
    main()
