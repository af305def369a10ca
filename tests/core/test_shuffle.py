"""Twins learnt in other chunks than they were attacked in: against gradients computed apart, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conadv import PGD, Batch, ConAdv, Recycled, split_batchnorm
from conadv.core.batch import regrouped
from support.settings import small_cnn

EPSILON, CHUNK, CHUNKS = 0.03, 4, 4
ATTACK = PGD(EPSILON, random_start=0)
KINDS = {"disadv": (ConAdv, {"delay": 0}), "recycled": (Recycled, {})}


def numbered(batches: int) -> list[Batch]:
    """Batches whose first pixel of an image is its number, in steps that no attack can cross, to recognize twins."""
    generator = torch.Generator().manual_seed(3)
    size = CHUNK * CHUNKS
    found = torch.rand(batches, size, 2, 6, 6, generator=generator, dtype=torch.float64)
    found[:, :, 0, 0, 0] = torch.arange(size) / size
    return [Batch(images, torch.arange(size) % 5) for images in found]


class Spy:
    """Notes the numbers of the images of every forward pass."""

    def __init__(self, model: nn.Module) -> None:
        self.passes: list[list[int]] = []
        model.register_forward_pre_hook(self._note)

    def _note(self, module: nn.Module, inputs: tuple[Tensor]) -> None:
        self.passes.append((inputs[0][:, 0, 0, 0] * CHUNK * CHUNKS).round().int().tolist())


def made(kind: str, **options: Any) -> tuple[nn.Module, Any, Spy]:
    model, (make, own) = split_batchnorm(small_cnn()), KINDS[kind]
    common = {"chunk_size": CHUNK, "seed": 5, **own, **options}
    return model, make(model, F.cross_entropy, ATTACK, **common), Spy(model)


def gradient(model: nn.Module, images: Tensor, labels: Tensor, by: Tensor | None = None) -> list[Tensor]:
    loss = F.cross_entropy(model(images), labels)
    return list(torch.autograd.grad(loss, list(model.parameters()) if by is None else [by]))


def attacked(images: Tensor, labels: Tensor) -> Tensor:
    """The twins of a batch, chunk by chunk, by signed gradients through a network of its own."""
    twins = []
    for own, right in zip(images.split(CHUNK), labels.split(CHUNK), strict=True):
        leaf = own.clone().requires_grad_()
        (along,) = gradient(small_cnn(), leaf, right, leaf)
        twins.append((own + EPSILON * along.sign()).clamp(0, 1))
    return torch.cat(twins)


def groups_of(passes: list[list[int]]) -> list[list[int]]:
    """The passes whose images are not those of one chunk: with so many images, none stays together by chance."""
    return [own for own in passes if len({number // CHUNK for number in own}) > 1]


@pytest.mark.parametrize("own_backward", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_is_that_of_the_regrouped_twins_computed_apart(kind: str, own_backward: bool) -> None:
    model, method, spy = made(kind, shuffle_twins=CHUNKS)
    batches = numbered(2)
    for batch in batches:  # the weights stay as they are: there is no optimizer
        model.zero_grad()
        spy.passes.clear()
        if own_backward:
            method.loss(batch).backward()
        else:
            method(batch)
    learnt = groups_of(spy.passes)
    assert sorted(number for own in learnt for number in own) == list(range(CHUNK * CHUNKS)), (
        "every twin is learnt once"
    )
    of = batches[0] if kind == "recycled" else batches[1]
    twins = attacked(of.images, of.labels)
    chunks = zip(batches[1].images.split(CHUNK), of.labels.split(CHUNK), strict=True)
    shared = small_cnn()
    clean = [gradient(shared, *chunk) for chunk in chunks]
    adv = [gradient(shared, twins[numbers], of.labels[numbers]) for numbers in learnt]
    found = dict(model.named_parameters())
    for place, (name, _) in enumerate(shared.named_parameters()):
        halves = [sum(own[place] for own in some) / CHUNKS / 2 for some in (clean, adv)]
        grads = [found[key].grad for key in found if key.replace(".adv.", ".") == name]
        wanted = [halves[0] + halves[1]] if len(grads) == 1 else halves  # BatchNorm has a branch for each half
        torch.testing.assert_close(grads, wanted, rtol=0, atol=1e-12)


def test_groups_stay_apart_and_the_order_is_a_function_of_seed_and_step() -> None:
    def learnt(group: int, seed: int, steps: int = 2) -> list[list[list[int]]]:
        found = []
        _, method, spy = made("disadv", shuffle_twins=group, seed=seed)
        for batch in numbered(steps):
            spy.passes.clear()
            method(batch)
            found.append(groups_of(spy.passes))
        return found

    first, second = learnt(2, 5)
    assert first != second and learnt(2, 5) == [first, second] and learnt(2, 6) != [first, second]
    halves = [sorted(first[0] + first[1]), sorted(first[2] + first[3])]
    assert halves == [list(range(8)), list(range(8, 16))]
    _, method, spy = made("disadv")
    method(numbered(1)[0])
    assert not groups_of(spy.passes), "by default every chunk stays together"


def test_labels_of_any_structure_stay_with_their_images() -> None:
    parts = [
        Batch(torch.full((2, 1), at), {"a": torch.tensor([at, at + 1]), "b": (torch.full((2,), at),)}) for at in (0, 2)
    ]
    one, two = regrouped(parts, torch.tensor([3, 0, 2, 1]))
    assert one.images.flatten().tolist() == [2, 0] and two.images.flatten().tolist() == [2, 0]
    assert one.labels["a"].tolist() == [3, 0] and two.labels["b"][0].tolist() == [2, 0]
    with pytest.raises(ValueError, match="shorter"):
        regrouped([parts[0], Batch(parts[1].images, parts[1].labels["a"])], torch.arange(4))
    with pytest.raises(ValueError, match="one entry per image"):
        regrouped([Batch(torch.zeros(2, 1), torch.zeros(()))] * 2, torch.arange(4))


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match=r"shuffle_twins 0: .*1 \(none\) or more"):
        made("recycled", shuffle_twins=0)
    _, method, _ = made("recycled", shuffle_twins=3)
    with pytest.raises(ValueError, match="shuffle_twins 3 does not divide the chunks with twins"):
        method(numbered(1)[0])
    plain, other = (made("recycled", shuffle_twins=group)[1] for group in (1, 2))
    with pytest.raises(ValueError, match="shuffle_twins"):
        plain.load_state_dict(other.state_dict())
