"""Is the robust accuracy of a run real? Another library, AutoAttack, a black box, and radii that no network withstands.

    conadv export runs/robust/runs/CELL CELL.safetensors
    python studies/robust/checks.py CELL CELL.safetensors [--images 1000] [--autoattack]

If gradients were masked, PGD would be too weak: accuracy would stay above 0 at large radii, or the black box would
beat it.
"""

from __future__ import annotations

import argparse
import json
import warnings
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor, nn

from conadv.config import load_recipe
from conadv.task.evaluate import AutoAttack, count_robust, robust_attack
from conadv.task.stream import evaluation_batches
from conadv.trainer.build import Task, build_task
from conadv.trainer.evaluation import sampled

HERE = Path(__file__).parent
RADII = (0, 2, 4, 8, 16, 32, 64, 128)  # of 255
EPSILON, STEPS, RESTARTS = 8 / 255, 20, 2


def load(cell: str, weights: Path) -> Task:
    """Build the network and the data of a finished cell, and load the weights that `conadv export` wrote."""
    rows = [json.loads(line) for line in (HERE / "results.jsonl").read_text(encoding="utf-8").splitlines()]
    (overrides,) = (row["overrides"] for row in rows if row["cell"] == cell)
    task = build_task(load_recipe("robust", overrides), torch.device("cpu"))
    loaded = task.model.load_state_dict(safetensors.torch.load_file(weights), strict=False)
    assert not loaded.unexpected_keys
    task.model.eval()
    return task


def foolbox_top1(model: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> float:
    """The accuracy under PGD of foolbox with the same radius, steps and number of random starts."""
    with warnings.catch_warnings():  # its blurring attack imports from where scipy has moved away
        warnings.simplefilter("ignore", DeprecationWarning)
        import foolbox

    attack = foolbox.attacks.LinfPGD(rel_stepsize=2.5 / STEPS, steps=STEPS)
    wrapped = foolbox.PyTorchModel(model, bounds=(0, 1), device="cpu")
    right, count = 0, 0
    for raw, labels in batches:
        images = raw.float() / 255
        robust = model(images).argmax(1) == labels
        for _ in range(RESTARTS):
            robust &= ~attack(wrapped, images, labels, epsilons=EPSILON)[2]
        right, count = right + int(robust.sum()), count + len(labels)
    return 100 * right / count


class Square:
    """The black box of AutoAttack alone: random search, without gradients."""

    def __call__(self, model: nn.Module, loss: object, images: Tensor, labels: Tensor, seed: int) -> Tensor:
        import pyautoattack

        attack = pyautoattack.AutoAttack(
            model, norm="Linf", eps=EPSILON, seed=seed % 2**31, version="custom", attacks=["square"]
        )
        attack.square.n_queries = 1000
        changed: Tensor = attack.run_standard_evaluation(images, labels, batch_size=len(images))[0]
        return changed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cell", help="its name in results.jsonl")
    parser.add_argument("weights", type=Path)
    parser.add_argument("--images", type=int, default=1000, help="test images, a fixed sample")
    parser.add_argument("--autoattack", action="store_true", help="also AutoAttack, which takes half an hour")
    given = parser.parse_args()
    torch.manual_seed(0)
    task = load(given.cell, given.weights)
    chosen = sampled(len(task.data.test), given.images).tolist()
    batches = [(batch[0], batch[1]) for batch in evaluation_batches(task.data.test, 250, task.augment.fit, 0, chosen)]

    def top1(attack: object, restarts: int = 1) -> float:
        robust, count = count_robust(task.model, batches, attack, restarts=restarts)  # type: ignore[arg-type]
        return round(100 * robust / count, 2)

    found: dict[str, object] = {"cell": given.cell, "images": len(chosen)}
    found["pgd_by_radius"] = {radius: top1(robust_attack(radius / 255, STEPS)) for radius in RADII}
    found["pgd"] = top1(robust_attack(EPSILON, STEPS), RESTARTS)
    found["foolbox"] = round(foolbox_top1(task.model, batches), 2)
    found["square"] = top1(Square())
    if given.autoattack:
        found["autoattack"] = top1(AutoAttack(EPSILON))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
