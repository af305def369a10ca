"""adv_weight 1, robust training: against a plain loop on adversarial examples, with unsplit BatchNorm."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conadv import PGD, ConAdv, plain_state_dict, split_batchnorm
from conadv.core.splitbn import Statistics
from support.settings import small_batches, small_cnn

EPSILON, SIZE, RATE = 8 / 255, 3 / 255, 0.2


def attacked(model: nn.Module, images: Tensor, labels: Tensor, steps: int, running: bool) -> Tensor:
    """PGD from the image along signed gradients, on a copy of the model, so that its statistics stay."""
    model, twins = copy.deepcopy(model).train(not running), images
    for _ in range(steps):
        leaf = twins.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(F.cross_entropy(model(leaf), labels), leaf)
        twins = (twins + SIZE * gradient.sign()).clamp(images - EPSILON, images + EPSILON).clamp(0, 1)
    return twins


def robust_loop(delay: int, steps: int, running: bool) -> nn.Module:
    """Plain adversarial training of a plain model, with the attack on the weights of `delay` steps ago."""
    model = small_cnn()
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    versions: list[nn.Module] = []
    for images, labels in small_batches(5):
        versions.append(copy.deepcopy(model))
        twins = attacked(versions[max(0, len(versions) - 1 - delay)], images, labels, steps, running)
        optimizer.zero_grad()
        F.cross_entropy(model(twins), labels).backward()
        optimizer.step()
    return model


@pytest.mark.parametrize("statistics", ["batch", "running"])
@pytest.mark.parametrize("own_backward", [False, True])
@pytest.mark.parametrize(("delay", "steps"), [(0, 1), (1, 1), (2, 3)])
def test_it_is_a_plain_loop_on_adversarial_examples(
    delay: int, steps: int, own_backward: bool, statistics: Statistics
) -> None:
    model = split_batchnorm(small_cnn(), ("main",))
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    attack = PGD(EPSILON, SIZE, steps, random_start=0, branch="main", statistics=statistics)
    method = ConAdv(model, F.cross_entropy, attack, delay=delay, adv_weight=1, twin_branch="main")
    for batch in small_batches(5):
        optimizer.zero_grad()
        if own_backward:
            method.loss(batch).backward()
        else:
            method(batch)
        optimizer.step()
    wanted = robust_loop(delay, steps, statistics == "running").state_dict()
    for name, tensor in plain_state_dict(model).items():  # the running statistics among them
        torch.testing.assert_close(tensor, wanted[name], rtol=0, atol=1e-12, msg=name)


@pytest.mark.parametrize("chunk_size", [None, 4])
def test_a_step_passes_each_image_once_to_attack_and_once_to_learn(chunk_size: int | None) -> None:
    model = split_batchnorm(small_cnn(), ("main",))
    seen: list[int] = []
    method = ConAdv(
        model, F.cross_entropy, PGD(EPSILON, branch="main"), adv_weight=1, twin_branch="main", chunk_size=chunk_size
    )
    model[0].register_forward_hook(lambda _, images, __: seen.append(len(images[0])))
    losses = method(small_batches(1)[0])
    assert sum(seen) == 2 * 8
    assert losses.clean == 0 < losses.adv


def test_what_would_leave_the_evaluated_branch_untrained_is_refused() -> None:
    both, main = PGD(EPSILON), PGD(EPSILON, branch="main")
    with pytest.raises(ValueError, match=r'adv_weight 1 learns from twins only.*twin_branch="main"'):
        ConAdv(split_batchnorm(small_cnn()), F.cross_entropy, both, adv_weight=1)
    with pytest.raises(ValueError, match=r"adv_weight 1 learns from twins only.*twin_share=1"):
        ConAdv(split_batchnorm(small_cnn()), F.cross_entropy, main, adv_weight=1, twin_branch="main", twin_share=0.5)
    method = ConAdv(split_batchnorm(small_cnn()), F.cross_entropy, both)
    with pytest.raises(ValueError, match="adv_weight 1 learns from twins only"):
        method.adv_weight = 1.0
    assert method.adv_weight == 0.5


@pytest.mark.parametrize("delay", [0, 2])
def test_an_attack_with_running_statistics_starts_from_those_of_a_new_branch(delay: int) -> None:
    model = split_batchnorm(small_cnn())
    images, labels = small_batches(1)[0]
    wanted = attacked(small_cnn(), images, labels, 1, running=True)
    attack = PGD(EPSILON, SIZE, random_start=0, statistics="running")
    torch.testing.assert_close(attack(model, F.cross_entropy, images, labels), wanted, rtol=0, atol=1e-12)
    method = ConAdv(model, F.cross_entropy, attack, delay=delay)
    for batch in small_batches(3):
        assert method(batch).adv > 0
