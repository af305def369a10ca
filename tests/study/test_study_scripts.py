"""The scripts beside the studies: what each computes, against the same computed apart. And the studies' own rules, and
the table that the guide quotes."""

from __future__ import annotations

import json
import runpy
from collections import defaultdict
from pathlib import Path
from statistics import fmean, stdev

import pytest
import torch
import torch.nn.functional as F

from conadv import PGD, split_batchnorm
from conadv.core.batchnorm.splitbn import routed
from settings import small_cnn

RESULTS = Path(__file__).parents[2] / "docs" / "results"


def test_half_of_the_loss_is_that_of_a_quarter_of_the_chunks() -> None:
    torch.manual_seed(0)
    uneven = runpy.run_path(str(RESULTS / "cifar10-cost" / "uneven_weights.py"))["UnevenVanilla"]
    model = split_batchnorm(small_cnn(), ("main",))
    images, labels = torch.rand(16, 2, 6, 6, dtype=torch.float64), torch.arange(16) % 3
    method = uneven(model, F.cross_entropy, chunk_size=4, seed=1)
    losses = [F.cross_entropy(model(images[at : at + 4]), labels[at : at + 4]) for at in range(0, 16, 4)]
    weight = model[0].weight
    gradients = torch.stack([torch.autograd.grad(loss, weight)[0] for loss in losses])
    wanted = [gradients.mean(0) / 2 + one / 2 for one in gradients]  # one of the four chunks has the other half
    method((images, labels))
    assert weight.grad is not None
    distances = [float((weight.grad - gradient).abs().max()) for gradient in wanted]
    assert min(distances) < 1e-12
    assert sorted(distances)[1] > 1e-6


def test_the_steps_from_conadv_to_recycled_end_at_its_twins() -> None:
    torch.manual_seed(0)
    script = runpy.run_path(str(RESULTS / "cifar10-500" / "recycled_parts.py"))
    model = split_batchnorm(small_cnn())
    for layer in model.modules():
        if hasattr(layer, "adv"):
            torch.nn.init.normal_(layer.adv.weight)  # so that the two branches differ
    images, labels = torch.rand(8, 2, 6, 6, dtype=torch.float64), torch.arange(8) % 3
    leaf = images.clone().requires_grad_()
    with routed(model, "main", tracking="off"):
        F.cross_entropy(model(leaf), labels).backward()
    assert leaf.grad is not None
    recycled = (images + 0.03 * leaf.grad.sign()).clamp(0, 1)
    from_image = script["ThroughMain"](0.03, random_start=0)(model, F.cross_entropy, images, labels)
    assert torch.allclose(from_image, recycled, atol=1e-12)
    assert not torch.allclose(PGD(0.03, random_start=0)(model, F.cross_entropy, images, labels), recycled, atol=1e-3)


def test_a_random_start_of_recycled_keeps_its_twins_in_the_ball() -> None:
    start = runpy.run_path(str(RESULTS / "cifar10-500" / "recycled_parts.py"))["RandomStart"]
    images, gradient = torch.full((4, 3, 5, 5), 0.5), torch.ones(4, 3, 5, 5)
    moved = start(0.1, random_start=1).along(images, gradient, seed=3) - images
    assert moved.min() > -1e-6 and moved.max() < 0.1 + 1e-6  # a start in the ball, a step, and cut off at the ball
    assert 0.3 < (moved > 0.0999).float().mean() < 0.7  # half of the starts are above the image


def test_the_reference_crops_and_flips() -> None:
    torch.manual_seed(0)
    script = runpy.run_path(str(RESULTS / "cifar10-batch" / "reference.py"))
    size, padding = script["SIZE"], script["PADDING"]
    images = torch.rand(64, 3, size, size)
    padded = F.pad(images, [padding] * 4)
    places = range(2 * padding + 1)
    seen = []
    for image, result in zip(padded, script["augmented"](images), strict=True):
        crops = {(y, x): image[:, y : y + size, x : x + size] for y in places for x in places}
        seen += [(at, flip) for at, crop in crops.items() for flip in (0, 1) if _equal(crop, result, flip)]
    assert len(seen) == 64  # each is one crop
    assert len({at for at, _ in seen}) > 15 and {flip for _, flip in seen} == {0, 1}


@pytest.mark.parametrize(
    ("study", "grids"),
    [
        ("cifar10-batch", 26),  # six methods at four batch sizes, and DisAdv at two
        ("cifar10-data", 7),  # two methods in four settings, one of which was not tuned
    ],
)
def test_the_rates_of_a_study_are_the_best_ones_and_inside_their_grids(study: str, grids: int) -> None:
    tuned: dict[tuple[str, int], dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    final = defaultdict(set)
    for line in (RESULTS / study / "results.jsonl").read_text().splitlines():
        result = json.loads(line)
        values, arm = result["values"], (result["arm"], result["values"]["batch_size"])
        if values["data.path"] == "runs/cifar10-tuning":
            tuned[arm][values["optimizer.lr"]].append(result["summary"]["test_top1"])
        else:
            final[arm].add(values["optimizer.lr"])
    assert len(tuned) == grids
    for arm, accuracies in tuned.items():
        best = max(accuracies, key=lambda rate: fmean(accuracies[rate]))
        assert final[arm] == {best}, arm
        assert min(accuracies) < best < max(accuracies), arm


def test_the_guide_quotes_the_accuracies_by_batch_size() -> None:
    found = defaultdict(list)
    for line in (RESULTS / "cifar10-batch" / "results.jsonl").read_text().splitlines():
        result = json.loads(line)
        if result["values"]["data.path"] != "runs/cifar10-tuning":
            found[result["arm"], result["values"]["batch_size"]].append(result["summary"]["test_top1"])
    page = (RESULTS.parent / "measured.md").read_text()
    head, _, *rows = page[page.index("| batch | 125 |") :].split("\n\n")[0].splitlines()
    batches = [int(cell.replace(",", "")) for cell in head.strip("| ").split(" | ")[1:]]
    assert len(rows) == 7
    for row in rows:
        arm, *quoted = row.strip("| ").split(" | ")
        several = [found[arm, batch] for batch in batches]
        assert quoted == [f"{fmean(one):.1f} ± {stdev(one):.1f}" if one else "–" for one in several], arm


def _equal(crop: torch.Tensor, result: torch.Tensor, flip: int) -> bool:
    return torch.equal(crop.flip(2) if flip else crop, result)
