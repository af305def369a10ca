"""Twins through the main branch: against a plain loop with unsplit BatchNorm, and what is refused."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conadv import PGD, ConAdv, Recycled, plain_state_dict, split_batchnorm
from support.settings import small_batches, small_cnn

EPSILON, RATE = 0.03, 0.2
MAIN = PGD(EPSILON, random_start=0, branch="main")
Pair = tuple[Tensor, Tensor]


def attacked(model: nn.Module, pair: Pair) -> Pair:
    """The twins of a batch by signed gradients, with a copy of the model so that its statistics stay."""
    images, labels = pair
    leaf = images.clone().requires_grad_()
    F.cross_entropy(copy.deepcopy(model)(leaf), labels).backward()
    assert leaf.grad is not None
    return (images + EPSILON * leaf.grad.sign()).clamp(0, 1), labels


def reference(batches: list[Pair], delay: int, of_the_batch_before: bool) -> nn.Module:
    """Plain SGD on plain BatchNorm: half of the loss is that of the images, half that of the twins."""
    model = small_cnn()
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    versions = [copy.deepcopy(model)]  # of the weights, oldest first
    before = attacked(model, batches[0])
    for pair in batches:
        twins = before if of_the_batch_before else attacked(versions[max(0, len(versions) - 1 - delay)], pair)
        before = attacked(model, pair)
        optimizer.zero_grad()
        statistics = copy.deepcopy(model)
        loss = F.cross_entropy(model(pair[0]), pair[1]) / 2 + F.cross_entropy(model(twins[0]), twins[1]) / 2
        loss.backward()
        optimizer.step()
        statistics(pair[0])  # the running statistics are those of the images alone
        model.load_state_dict({**model.state_dict(), **dict(statistics.named_buffers())})
        versions.append(copy.deepcopy(model))
    return model


@pytest.mark.parametrize("branches", [("main",), ("main", "adv")])
@pytest.mark.parametrize("kind", ["disadv", "conadv", "conadv-2", "recycled"])
@pytest.mark.parametrize("own_backward", [False, True])
def test_it_takes_the_steps_of_a_plain_loop(kind: str, branches: tuple[str, ...], own_backward: bool) -> None:
    batches, delay = small_batches(5), {"conadv": 1, "conadv-2": 2}.get(kind, 0)
    model = split_batchnorm(small_cnn(), branches)
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    if kind == "recycled":
        method: Recycled | ConAdv = Recycled(model, F.cross_entropy, MAIN, twin_branch="main")
    else:
        method = ConAdv(model, F.cross_entropy, MAIN, delay=delay, twin_branch="main")
    for batch in batches:
        optimizer.zero_grad()
        if own_backward:
            method.loss(batch).backward()
        else:
            method(batch)
        optimizer.step()
    method.state_dict()  # ends the last step of a loss
    wanted = reference(batches, delay, kind == "recycled").state_dict()
    for name, tensor in plain_state_dict(model).items():
        if own_backward and "running" in name:
            continue  # moved with the next call
        assert torch.allclose(tensor.double(), wanted[name].double(), atol=1e-12), name


def test_what_does_not_fit_is_refused() -> None:
    model = split_batchnorm(small_cnn(), ("main",))
    with pytest.raises(ValueError, match="twin_branch 'aug'"):
        Recycled(model, F.cross_entropy, MAIN, twin_branch="aug")
    with pytest.raises(ValueError, match=r'PGD\(\.\.\., branch="main"\)'):
        ConAdv(model, F.cross_entropy, PGD(EPSILON), twin_branch="main")
    with pytest.raises(ValueError, match=r"plain BatchNorm layer: call conadv.split_batchnorm\(model, branches="):
        Recycled(small_cnn(), F.cross_entropy, MAIN, twin_branch="main")
    with pytest.raises(ValueError, match="only the branches main"):
        Recycled(model, F.cross_entropy, MAIN)


@pytest.mark.parametrize("kind", [ConAdv, Recycled])
def test_a_state_of_the_other_branch_is_refused(kind: type[ConAdv] | type[Recycled]) -> None:
    made = [kind(split_batchnorm(small_cnn()), F.cross_entropy, MAIN, twin_branch=name) for name in ("adv", "main")]
    with pytest.raises(ValueError, match="it has twin_branch adv instead of main"):
        made[1].load_state_dict(made[0].state_dict())
    made[1].load_state_dict(made[1].state_dict())
