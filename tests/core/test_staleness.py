"""Staleness against a reference written apart: plain networks, weights kept by hand, PGD by hand, all in float64."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conadv import StaleWeights, split_batchnorm
from settings import Setting, adversarial_methods, small_batches, small_cnn

EPSILON, CHUNKS, SHARE = 8 / 255, 4, 0.3
State = dict[str, Tensor]


def plain(state: State, branch: str) -> nn.Module:
    """A network without branches that has the weights of one."""
    model = small_cnn()
    model.load_state_dict({name: state.get(_name(name, branch), state[name]) for name in model.state_dict()})
    return model


def _name(plain_name: str, branch: str) -> str:
    layer, _, rest = plain_name.partition(".")
    return f"{layer}.adv.{rest}" if branch == "adv" else plain_name


def attacked(state: State, branch: str, images: Tensor, labels: Tensor) -> Tensor:
    leaf = images.clone().requires_grad_()
    F.cross_entropy(plain(state, branch)(leaf), labels, reduction="sum").backward()
    assert leaf.grad is not None
    return (images + EPSILON * leaf.grad.sign()).clamp(0, 1)


def gradient(state: State, branch: str, images: Tensor, labels: Tensor) -> tuple[float, State]:
    """The loss, and the gradient by the names of the network with branches."""
    model = plain(state, branch)
    loss = F.cross_entropy(model(images), labels)
    loss.backward()
    return loss.item(), {
        _name(name, branch) if _name(name, branch) in state else name: own.grad.clone()
        for name, own in model.named_parameters()
    }


def flat(names: list[str], *terms: tuple[float, State]) -> Tensor:
    sizes = {name: own for _, gradients in terms for name, own in gradients.items()}
    total = {name: sum(weight * own[name] for weight, own in terms if name in own) for name in sizes}
    return torch.cat([total[name].flatten() for name in names if name in total])


def reference(setting: Setting, history: list[State], batches: list[tuple[Tensor, Tensor]]) -> dict[str, float]:
    now = history[-1]
    recycled = setting.method == "recycled"
    old = history[max(len(history) - 1 - setting.delay, 0)]
    images, labels = batches[-2 if recycled else -1]
    branch = "main" if recycled else "adv"
    names = [name for name, _ in split_batchnorm(small_cnn()).named_parameters()]
    distances, agreements, losses, fresh_gradients, stale_gradients = [], [], [], [], []
    for x, y in zip(images.chunk(CHUNKS), labels.chunk(CHUNKS), strict=True):
        stale, fresh = attacked(old, branch, x, y), attacked(now, branch, x, y)
        distances += [float((a - b).norm()) for a, b in zip(stale, fresh, strict=True)]
        agreements.append(float(((stale - x).sign() == (fresh - x).sign()).double().mean()))
        clean = (1 - SHARE, gradient(now, "main", x, y)[1])
        (stale_loss, of_stale), (fresh_loss, of_fresh) = (gradient(now, "adv", twin, y) for twin in (stale, fresh))
        losses.append((stale_loss, fresh_loss))
        stale_gradients.append(flat(names, clean, (SHARE, of_stale)))
        fresh_gradients.append(flat(names, clean, (SHARE, of_fresh)))
    g, g_stale = torch.stack(fresh_gradients), torch.stack(stale_gradients)
    drift = float(torch.cat([(now[name] - old[name]).flatten() for name in names]).norm())
    metrics = {
        "stale_distance": sum(distances) / len(distances),
        "stale_agreement": sum(agreements) / CHUNKS,
        "weight_drift": drift,
        "stale_loss": sum(one for one, _ in losses) / CHUNKS,
        "fresh_loss": sum(one for _, one in losses) / CHUNKS,
        "gradient_norm": float(g.mean(0).norm()),
        "stale_gradient_norm": float(g_stale.mean(0).norm()),
        "gradient_error": float((g - g_stale).mean(0).norm()),
        "gradient_variance": float(g.var(0).sum() / CHUNKS),
    }
    return metrics | ({"lemma1_constant": max(distances) / drift} if drift else {})


@adversarial_methods
def test_every_number_is_that_of_the_reference(setting: Setting) -> None:
    batches = small_batches(4, size=12)
    model = split_batchnorm(small_cnn())
    method = setting.make(model, adv_weight=SHARE, chunk_size=3, seed=0)
    stale = StaleWeights(model, setting.delay)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    history: list[State] = []
    for number, (now, ahead) in enumerate(method.feed(batches)):
        history.append(copy.deepcopy(model.state_dict()))
        optimizer.zero_grad()
        method(now, ahead)
        if number < len(batches) - 1:
            stale.keep()
            optimizer.step()
    step = len(batches) - 1
    kept = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    staleness = method.staleness()
    images, labels = batches[staleness.batch_of(step)]
    chunks = enumerate(zip(images.chunk(CHUNKS), labels.chunk(CHUNKS), strict=True))
    metrics = staleness.measure(chunks, step, stale).metrics(staleness.drift(stale))
    assert metrics == pytest.approx(reference(setting, history, batches), rel=1e-10, abs=1e-13)
    assert all(torch.equal(kept[name], parameter.grad) for name, parameter in model.named_parameters())
    assert (metrics["stale_agreement"] < 1) == (setting.delay > 0)


def test_chunks_without_twins_are_left_out() -> None:
    model = split_batchnorm(small_cnn())
    method = Setting("conadv", "conadv").make(model, chunk_size=3, seed=0)
    shared = type(method)(model, F.cross_entropy, method.attack, twin_share="1/4", chunk_size=3, seed=0)
    ((images, labels),) = small_batches(1, size=12)
    chunks = list(enumerate(zip(images.chunk(CHUNKS), labels.chunk(CHUNKS), strict=True)))
    alone = [method.staleness().measure([chunk], 0, StaleWeights(model, 0)) for chunk in chunks]
    some = shared.staleness().measure(chunks, 0, StaleWeights(model, 0))
    assert int(some.numbers[0]) == 1
    assert any(torch.equal(some.gradient, one.gradient) for one in alone)
    assert "gradient_variance" not in some.metrics(0.0)
