"""Other ways to sum gradients do what they say. No time is asserted."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from conadv.core.batchnorm.splitbn import pending_statistics
from conadv.core.parts import Losses
from conadv.study.bench.alternate import silent
from conadv.study.bench.workload import Workload
from reduction import Averaged, SummedAfter, measure

TINY = Workload("resnet8", width=4, chunk_size=6, image_size=8)
LOSSES = Losses(torch.tensor(1.0), torch.tensor(0.5))


@pytest.mark.slow
def test_both_are_compared_with_ours_on_two_ranks() -> None:
    found = measure(TINY, 2, silent)
    assert [result.name for result in found.results] == ["vanilla-2-after/vanilla-2", "vanilla-2-ddp/vanilla-2"]
    assert all(result.spread.median > 0 for result in found.results)


class Doubling:
    """Stands in for a world of two ranks that have the same numbers."""

    device = torch.device("cpu")

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.mul_(2)


def test_one_sum_after_the_backward_pass_reaches_gradients_and_statistics() -> None:
    model, reference = TINY.build("vanilla"), TINY.build("vanilla")
    reduction = SummedAfter(model, Doubling())
    images, labels = TINY.pixels()
    for network in (model, reference):
        pending_statistics(network)[0].fill_(1.5)
    reduction.zero_grad()
    F.cross_entropy(model(images), labels).backward()
    F.cross_entropy(reference(images), labels).backward()
    statistics = [part.clone() for part in pending_statistics(model)]
    assert reduction.finish(LOSSES)
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, 2 * theirs.grad)
    for mine, before in zip(pending_statistics(model), statistics, strict=True):
        torch.testing.assert_close(mine, 2 * before)
    reduction.zero_grad()
    assert all(not parameter.grad.any() for parameter in model.parameters())


def test_what_distributed_data_parallel_leaves_to_do() -> None:
    model = TINY.build()
    reduction = Averaged(model)
    reduction.zero_grad()
    model.get_parameter("conv1.weight").grad = torch.ones_like(model.get_parameter("conv1.weight"))
    reduction.zero_grad()
    assert not model.get_parameter("conv1.weight").grad.any()
    assert reduction.finish(LOSSES)
    assert not reduction.finish(Losses(torch.tensor(torch.nan), torch.tensor(0.0)))
