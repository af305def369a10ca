"""One exchange a step: sums over the ranks, and what all of them know after it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from conadv.core.splitbn import pending_statistics, route, split_batchnorm
from conadv.core.step import Losses
from conadv.ranks.buckets import bucket_bytes, grouped
from conadv.ranks.collectives import World
from conadv.ranks.gradients import Exchange
from conadv.task.models import build_model
from support import tasks

ALONE = World(0, 1, torch.device("cpu"))
FINE = Losses(torch.tensor(1.0), torch.tensor(2.0))


def small_model() -> nn.Sequential:
    return split_batchnorm(nn.Sequential(nn.Conv2d(1, 2, 1, bias=False), nn.BatchNorm2d(2)))


def test_alone_gradients_and_losses_stay_as_they_are():
    model = small_model()
    exchange = Exchange(model, ALONE, share=1.0)
    exchange.zero_grad()
    (3 * model[0].weight.sum()).backward()
    outcome = exchange.finish(FINE)
    assert torch.equal(model[0].weight.grad, torch.full_like(model[0].weight, 3.0))
    assert (outcome.clean_loss, outcome.adv_loss, outcome.culprits, outcome.stop) == (1.0, 2.0, None, 0)


def test_gradients_begin_each_step_at_zero():
    model = small_model()
    exchange = Exchange(model, ALONE, share=1.0)
    for _ in range(2):
        exchange.zero_grad()
        model[0].weight.sum().backward()
        exchange.finish(FINE)
    assert torch.equal(model[0].weight.grad, torch.ones_like(model[0].weight))


def test_gradients_have_the_layout_in_memory_of_their_parameters():
    model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    Exchange(model, ALONE, share=1.0).zero_grad()
    images = torch.rand(2, 3, 5, 5)
    model(images).square().sum().backward()
    assert model.weight.grad.stride() == model.weight.stride()
    expected = torch.autograd.grad(model(images).square().sum(), model.weight)[0]
    assert torch.equal(model.weight.grad, expected)


def test_gradients_are_in_the_order_in_which_a_backward_pass_leaves_them():
    """So that the first sums start while it continues."""
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    exchange = Exchange(model, World(0, 2, torch.device("cpu")), share=0.5)
    exchange.zero_grad()
    assert [parameter.grad.storage_offset() for parameter in model.parameters()] == [7, 4, 1, 0]


def test_alone_a_model_may_use_other_parameters_in_each_step():
    model = nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)])
    exchange = Exchange(model, ALONE, share=1.0)
    for used in (1, 2, 1):
        exchange.zero_grad()
        sum(layer.weight.sum() for layer in list(model)[:used]).backward()
        assert exchange.finish(FINE).culprits is None
        assert model[1].weight.grad.item() == (used == 2)


def test_a_frozen_parameter_has_no_gradient():
    model = nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    exchange = Exchange(model, ALONE, share=1.0)
    exchange.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    exchange.finish(FINE)
    assert model.bias.grad is None
    assert model.weight.grad is not None


@pytest.mark.parametrize("last", [0, 2])
@pytest.mark.parametrize("change", ["", "clear", "zero", "clear late", "zero late", "clip"])
def test_gradients_that_a_caller_changes_are_summed_as_they_were_or_refused(change, last, pool):
    """In a later step the sums have started during the backward pass. Rank 1 alone reaches the third layer."""
    results = pool.run(2, tasks.change_gradients, change, last)
    if change in ("zero late", "clip"):
        says = (
            "the gradients were changed before the sum over the ranks: clear them before the backward pass, and clip "
            "or unscale them after team.all_reduce()"
        )
        assert results == [(says, 0.0)] * 2
    else:
        assert results == [("", 2 + 2 + 1)] * 2


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("what", ["loss", "gradient", "statistics of a BatchNorm layer"])
def test_a_number_that_is_not_finite_is_noticed_wherever_it_is(what, bad):
    model = small_model()
    exchange = Exchange(model, ALONE, share=1.0)
    exchange.zero_grad()
    (model[0].weight[0].sum() * (bad if what == "gradient" else 1.0)).backward()
    if what.startswith("statistics"):
        pending_statistics(model)[1][-2] = bad
    losses = Losses(torch.tensor(1.0), torch.tensor(bad if what == "loss" else 2.0))
    assert exchange.finish(losses).culprits == {0: what}


def test_discarded_statistics_are_forgotten():
    model = small_model()
    exchange = Exchange(model, ALONE, share=1.0)
    with route(model, "main", tracking="step"):
        model(torch.rand(4, 1, 2, 2))
    assert any(part.any() for part in pending_statistics(model))
    exchange.discard()
    assert not any(part.any() for part in pending_statistics(model))


def test_a_bucket_holds_parameters_of_one_type_up_to_its_size():
    sizes = [
        (2**18, torch.float32),
        (10, torch.float32),
        (10, torch.float64),
        (2**20, torch.float64),
        (1, torch.float64),
    ]
    parameters = [nn.Parameter(torch.zeros(size, dtype=dtype)) for size, dtype in sizes]
    groups = grouped(parameters, 2**20)
    assert [[len(parameter) for parameter in group] for group in groups] == [[2**18], [10], [10], [2**20], [1]]
    assert [parameter for group in groups for parameter in group] == parameters


@pytest.mark.parametrize("size", [2, 3, 6])
def test_gradients_and_losses_are_summed_over_the_ranks(size, pool):
    results = pool.run(size, tasks.exchange_steps, 3)
    for step in range(3):
        first = sum(1 + rank + step for rank in range(size))
        clean = sum(1 + rank for rank in range(size)) / size
        for result in results:
            assert result[step] == pytest.approx([first, 10 * first, 0, clean, step], abs=1e-12)


@pytest.mark.parametrize(
    ("oddities", "culprits"),
    [
        ({1: "loss"}, {1: "loss"}),
        ({2: "gradient"}, {2: "gradient"}),
        ({0: "statistics"}, {0: "statistics of a BatchNorm layer"}),
        ({0: "gradient", 2: "loss"}, {0: "gradient", 2: "loss"}),
        ({0: "overflow", 1: "overflow"}, {}),
        ({}, None),
    ],
)
def test_what_is_not_finite_on_one_rank_is_known_to_all(oddities, culprits, pool):
    assert pool.run(3, tasks.exchange_oddities, oddities, {}) == [(culprits, 0)] * 3


@pytest.mark.parametrize(
    ("signals", "stop"), [({1: 15}, 15), ({2: 2}, 2), ({0: 2, 1: 2, 2: 2}, 2), ({0: 15, 2: 2}, 15)]
)
def test_who_was_asked_to_stop_is_known_to_all(signals, stop, pool):
    assert pool.run(3, tasks.exchange_oddities, {}, signals) == [(None, stop)] * 3


def test_a_gradient_that_comes_too_late_for_the_sum_is_an_error(pool):
    with pytest.raises(AssertionError, match="uses other parameters in this step than in the first one"):
        pool.run(2, tasks.use_other_parameters)


def test_a_run_leaves_no_process_group_behind(pool, tmp_path):
    changes = {"method": "conadv", "layout": "clean+adv | attack"}
    assert pool.run(2, tasks.threads_left_by_training, changes, str(tmp_path / "state")) == [0, 0]


def test_buckets_are_sized_for_the_device():
    """A sum takes longer to start on a GPU: ResNet-50's 102 MB in 25 MiB each, as DistributedDataParallel has them."""
    with torch.device("meta"):
        weights = list(build_model("resnet50", classes=1000, in_channels=3).parameters())
    total = sum(4 * weight.numel() for weight in weights)
    for kind, room in (("cuda", 25 * 2**20), ("cpu", 2**20)):
        groups = grouped(weights[::-1], bucket_bytes(torch.device(kind)))
        sizes = [sum(4 * weight.numel() for weight in group) for group in groups]
        assert all(size <= room or len(group) == 1 for size, group in zip(sizes, groups, strict=True))
        # More than half of each bucket and its neighbour is used.
        assert len(groups) <= 2 * total / room + 1
        assert len(groups) >= min(total / room, 20)
