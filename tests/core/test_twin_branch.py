"""Twins through the main branch, beside the images or alone (robust training): against loops with plain BatchNorm."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conadv import PGD, ConAdv, Recycled, plain_state_dict, split_batchnorm
from conadv.core.splitbn import Statistics
from support.settings import small_batches, small_cnn

EPSILON, SIZE, RATE = 8 / 255, 3 / 255, 0.2
MAIN = PGD(EPSILON, SIZE, random_start=0, branch="main")
Pair = tuple[Tensor, Tensor]


def attacked(model: nn.Module, pair: Pair, steps: int = 1, running: bool = False) -> Pair:
    """PGD from the images along signed gradients, on a copy of the model, so that its statistics stay."""
    model, (images, labels) = copy.deepcopy(model).train(not running), pair
    twins = images
    for _ in range(steps):
        leaf = twins.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(F.cross_entropy(model(leaf), labels), leaf)
        twins = (twins + SIZE * gradient.sign()).clamp(images - EPSILON, images + EPSILON).clamp(0, 1)
    return twins, labels


def plain_loop(delay: int, weight: float, of_the_batch_before: bool, steps: int, running: bool) -> nn.Module:
    """Plain SGD on plain BatchNorm; `weight` of the loss is that of the twins, the rest that of the images."""
    model = small_cnn()
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    versions: list[nn.Module] = []  # of the weights, oldest first
    before = attacked(model, small_batches(1)[0])
    for pair in small_batches(5):
        versions.append(copy.deepcopy(model))
        stale = versions[max(0, len(versions) - 1 - delay)]
        twins = before if of_the_batch_before else attacked(stale, pair, steps, running)
        before = attacked(model, pair)
        optimizer.zero_grad()
        for part, (images, labels) in ((1 - weight, pair), (weight, twins)):
            if part:
                (part * F.cross_entropy(model(images), labels)).backward()
        optimizer.step()
        counted = copy.deepcopy(versions[-1])  # the running statistics are those of the images, unless there are none
        counted(twins[0] if weight == 1 else pair[0])
        model.load_state_dict({**model.state_dict(), **dict(counted.named_buffers())})
    return model


@pytest.mark.parametrize("branches", [("main",), ("main", "adv")])
@pytest.mark.parametrize("own_backward", [False, True])
@pytest.mark.parametrize(
    ("kind", "delay", "weight", "steps", "statistics"),
    [
        ("conadv", 0, 0.5, 1, "batch"),
        ("conadv", 1, 0.5, 1, "batch"),
        ("conadv", 2, 0.5, 1, "batch"),
        ("recycled", 1, 0.5, 1, "batch"),
        ("conadv", 0, 1, 1, "batch"),
        ("conadv", 0, 1, 1, "running"),
        ("conadv", 1, 1, 1, "batch"),
        ("conadv", 2, 1, 3, "batch"),
        ("conadv", 2, 1, 3, "running"),
    ],
)
def test_it_takes_the_steps_of_a_plain_loop(
    kind: str,
    delay: int,
    weight: float,
    steps: int,
    statistics: Statistics,
    own_backward: bool,
    branches: tuple[str, ...],
) -> None:
    model = split_batchnorm(small_cnn(), branches)
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    attack = PGD(EPSILON, SIZE, steps, random_start=0, branch="main", statistics=statistics)
    if kind == "recycled":
        method: Recycled | ConAdv = Recycled(model, F.cross_entropy, attack, twin_branch="main")
    else:
        method = ConAdv(model, F.cross_entropy, attack, delay=delay, adv_weight=weight, twin_branch="main")
    for batch in small_batches(5):
        optimizer.zero_grad()
        if own_backward:
            method.loss(batch).backward()
        else:
            method(batch)
        optimizer.step()
    wanted = plain_loop(delay, weight, kind == "recycled", steps, statistics == "running").state_dict()
    torch.testing.assert_close(plain_state_dict(model), wanted, rtol=0, atol=1e-12)  # the running statistics, too


@pytest.mark.parametrize("chunk_size", [None, 4])
def test_robust_training_passes_each_image_once_to_attack_and_once_to_learn(chunk_size: int | None) -> None:
    model = split_batchnorm(small_cnn(), ("main",))
    seen: list[int] = []
    method = ConAdv(model, F.cross_entropy, MAIN, adv_weight=1, twin_branch="main", chunk_size=chunk_size)
    model[0].register_forward_hook(lambda _, images, __: seen.append(len(images[0])))
    losses = method(small_batches(1)[0])
    assert sum(seen) == 2 * 8
    assert losses.clean == 0 < losses.adv


@pytest.mark.parametrize("delay", [0, 2])
def test_an_attack_with_running_statistics_starts_from_those_of_a_new_branch(delay: int) -> None:
    model, (batch, *_) = split_batchnorm(small_cnn()), small_batches(1)
    attack = PGD(EPSILON, SIZE, random_start=0, statistics="running")
    wanted = attacked(small_cnn(), batch, running=True)[0]
    torch.testing.assert_close(attack(model, F.cross_entropy, *batch), wanted, rtol=0, atol=1e-12)
    method = ConAdv(model, F.cross_entropy, attack, delay=delay)
    for batch in small_batches(3):
        assert method(batch).adv > 0


def test_what_does_not_fit_is_refused() -> None:
    model, split = split_batchnorm(small_cnn(), ("main",)), split_batchnorm(small_cnn())
    with pytest.raises(ValueError, match="twin_branch 'aug'"):
        Recycled(model, F.cross_entropy, MAIN, twin_branch="aug")
    with pytest.raises(ValueError, match=r'PGD\(\.\.\., branch="main"\)'):
        ConAdv(model, F.cross_entropy, PGD(EPSILON), twin_branch="main")
    with pytest.raises(ValueError, match=r'adv_weight 1 learns from twins only.*twin_branch="main"'):
        ConAdv(split, F.cross_entropy, PGD(EPSILON), adv_weight=1)
    with pytest.raises(ValueError, match=r"adv_weight 1 learns from twins only.*twin_share=1"):
        ConAdv(split, F.cross_entropy, MAIN, adv_weight=1, twin_branch="main", twin_share=0.5, chunk_size=4)
    method = ConAdv(split, F.cross_entropy, PGD(EPSILON))
    method.adv_weight = 1.0
    with pytest.raises(ValueError, match="adv_weight 1 learns from twins only"):
        method(small_batches(1)[0])


@pytest.mark.parametrize("kind", [ConAdv, Recycled])
def test_a_state_of_the_other_branch_is_refused(kind: type[ConAdv] | type[Recycled]) -> None:
    made = [kind(split_batchnorm(small_cnn()), F.cross_entropy, MAIN, twin_branch=name) for name in ("adv", "main")]
    with pytest.raises(ValueError, match="it has twin_branch adv instead of main"):
        made[1].load_state_dict(made[0].state_dict())
    made[1].load_state_dict(made[1].state_dict())
