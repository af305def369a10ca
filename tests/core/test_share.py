"""Twins of a part of the batch: which one, with what weight, and at what cost."""

from __future__ import annotations

import itertools
from collections import Counter
from fractions import Fraction

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conadv import PGD, ConAdv, Recycled, split_batchnorm
from conadv.core.twins import as_share, is_chosen
from support.settings import small_batches, small_cnn


@pytest.mark.parametrize("share", ["1/4", "1/3", "2/3", "1/2", "1"])
def test_every_group_of_chunks_has_its_share_and_all_have_their_turn(share: str) -> None:
    twins = as_share(share)
    some, of = twins.numerator, twins.denominator
    turns: Counter[int] = Counter()
    for batch, group in itertools.product(range(200), range(3)):
        chosen = [is_chosen(twins, 7, batch, 0, of * group + place) for place in range(of)]
        assert sum(chosen) == some
        turns.update(place for place, has in enumerate(chosen) if has)
    expected = 600 * some / of
    assert all(abs(turns[place] - expected) < 5 * expected**0.5 for place in range(of))


@pytest.mark.parametrize(
    ("given", "expected"), [(0.25, Fraction(1, 4)), ("1/3", Fraction(1, 3)), (1, Fraction(1)), (0.4, Fraction(2, 5))]
)
def test_shares_are_read_as_fractions(given: float, expected: Fraction) -> None:
    assert as_share(given) == expected


@pytest.mark.parametrize("share", [0, -1, 1.5, "1/0", "inf", float("inf"), float("nan"), "a half"])
def test_shares_outside_of_the_batch_are_refused(share: float | str) -> None:
    with pytest.raises(ValueError, match=r"twin_share .*: a share of the batch"):
        as_share(share)


def test_a_share_of_a_batch_without_chunks_is_refused() -> None:
    with pytest.raises(ValueError, match=r"twin_share 0\.25: a part of the chunks of each batch, so pass chunk_size"):
        Recycled(split_batchnorm(small_cnn()), F.cross_entropy, PGD(0.1), twin_share=0.25)


def test_a_share_that_does_not_divide_the_chunks_says_what_fits() -> None:
    method = ConAdv(split_batchnorm(small_cnn()), F.cross_entropy, PGD(0.1), twin_share="1/3", chunk_size=2)
    with pytest.raises(ValueError, match="take a number of chunks that 3 divides"):
        method(small_batches(1)[0])


def gradients(model: nn.Module) -> list[Tensor]:
    return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in (model[0].weight, model[7].weight)]


@pytest.mark.parametrize("as_loss", [True, False])
def test_the_loss_takes_the_mean_over_the_twins(as_loss: bool) -> None:
    """By definition: (1 - w)·clean + w·mean over the twins, of copies of the model in plain PyTorch."""
    model = split_batchnorm(small_cnn())
    attack = PGD(0, random_start=0)  # the twins are the images that were chosen
    method = ConAdv(model, F.cross_entropy, attack, delay=0, twin_share="1/4", adv_weight=0.3, chunk_size=2, seed=1)
    images, labels = small_batches(1)[0]
    seen: list[tuple[Tensor, Tensor]] = []
    take = method.twins.take
    method.twins.take = lambda *asked: seen.append(twin := take(*asked)) or twin  # type: ignore[method-assign]
    if as_loss:
        method.loss((images, labels)).backward()
    else:
        method((images, labels))
    assert len(seen) == 1 and len(seen[0].images) == 2
    reference = small_cnn()
    for x, y in zip(images.split(2), labels.split(2), strict=True):
        (0.7 * F.cross_entropy(reference(x), y) * len(x) / 8).backward()
    (0.3 * F.cross_entropy(reference(seen[0].images), seen[0].labels)).backward()
    torch.testing.assert_close(gradients(model), gradients(reference), rtol=0, atol=1e-12)
    reported = F.cross_entropy(small_cnn()(seen[0].images), seen[0].labels).detach()
    torch.testing.assert_close(method.losses.adv, reported)


@pytest.mark.parametrize("as_loss", [True, False])
def test_recycled_learns_from_a_share_of_the_last_batch(as_loss: bool) -> None:
    model = split_batchnorm(small_cnn())
    method = Recycled(model, F.cross_entropy, PGD(0), twin_share="1/2", chunk_size=2, seed=1)
    batches = small_batches(4)
    learnt: list[int] = []
    passes = method._step.adversarial
    method._step.adversarial = lambda twin, k, weight: learnt.append(k) or passes(twin, k, weight)  # type: ignore
    for number, batch in enumerate(batches):
        twins = method.state_dict() if number else {}
        kept = {name: tensor for name, tensor in twins.items() if name.endswith("images")}
        if number:
            shown = torch.cat(list(kept.values()))
            assert len(shown) == 4
            assert all(any(torch.equal(one, image) for image in batches[number - 1][0]) for one in shown)
        if as_loss:
            method.loss(batch).backward()
        else:
            method(batch)
        source = max(0, number - 1)  # twins are learnt in the places of the chunks that they are of
        assert learnt == [k for k in range(4) if method._step.has_twin(source, k)]
        learnt.clear()
