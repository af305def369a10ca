"""Recycled on several lanes: the clean gradient is scaled back to that of an attack, as a raw step needs it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conadv import PGD, Batch, Recycled, Role, split_batchnorm
from conadv.roles import Place
from support.settings import small_batches, small_cnn

EPSILON, STEP = 0.3, 0.7


def expected_twins(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """One raw step along the gradient of the loss summed over the images of a chunk, by autograd alone."""
    leaf = images.clone().requires_grad_()
    loss = F.cross_entropy(model(leaf), labels, reduction="sum")
    (gradient,) = torch.autograd.grad(loss, leaf)
    moved = images + (STEP * gradient).clamp(-EPSILON, EPSILON)
    return moved.clamp(0, 1)


@pytest.mark.parametrize("total", [2, 4, 8])
@pytest.mark.parametrize("adv_weight", [0.5, 0.2])
@pytest.mark.parametrize("apart", [True, False], ids=["apart", "from the clean pass"])
def test_a_raw_step_has_the_length_of_the_gradient_of_the_images_on_any_number_of_lanes(total, adv_weight, apart):
    plain = small_cnn()
    (images, labels) = small_batches(1)[0]
    wanted = [expected_twins(plain, images[at : at + 4], labels[at : at + 4]) for at in (0, 4)]
    method = Recycled(
        split_batchnorm(small_cnn()),
        F.cross_entropy,
        PGD(EPSILON, STEP, direction="raw"),
        adv_weight=adv_weight,
        chunk_size=4,
    )
    step = method._step
    step.join(Place(Role.CLEAN | Role.ADV, total=total, first_chunk=0, chunks=2))
    method((images, labels))  # the weights stay as they are: there is no optimizer
    left = [twin.images for twin in method.twins.items()]
    if apart:
        left = [method.twin(0, k, chunk).images for k, chunk in enumerate(step.chunks(Batch(images, labels)))]
    for found, twins in zip(left, wanted, strict=True):
        torch.testing.assert_close(found, twins, rtol=0, atol=1e-12)
    moved = (wanted[0] - images[:4]).abs()
    assert 0 < float(moved.mean()) < EPSILON / 2, "a step that the ball cuts off would hide a wrong length"
