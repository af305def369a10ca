"""The control beside the study by work: what its loss is, computed apart."""

from __future__ import annotations

import runpy
from pathlib import Path

import torch
import torch.nn.functional as F

from conadv import split_batchnorm
from settings import small_cnn

SCRIPT = Path(__file__).parents[2] / "docs" / "results" / "cifar10-cost" / "uneven_weights.py"


def test_half_of_the_loss_is_that_of_a_quarter_of_the_chunks() -> None:
    torch.manual_seed(0)
    uneven = runpy.run_path(str(SCRIPT))["UnevenVanilla"]
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
