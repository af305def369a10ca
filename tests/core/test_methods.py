"""The methods at work in one's own loop: feeding, priming, precision, randomness, and every way to misuse them."""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import conadv
from conadv import PGD, ConAdv, Recycled, Vanilla, split_batchnorm
from conadv.core.batch import Chunked, cut
from support.settings import (
    Setting,
    adversarial_methods,
    every_method,
    image_methods,
    small_batches,
    small_cnn,
    train,
)

ATTACK = PGD(8 / 255, random_start=0)
Batch = tuple[Tensor, ...]
pytestmark = pytest.mark.filterwarnings("ignore:gradients are accumulated")  # many of these steps update nothing


def make_model(seed: int = 0) -> nn.Sequential:
    return split_batchnorm(small_cnn(seed))


def same_weights(one: nn.Module, other: nn.Module) -> bool:
    state = other.state_dict()
    return all(torch.equal(value, state[key]) for key, value in one.state_dict().items())


# --- feeding -----------------------------------------------------------------------------------------------------


def test_batches_may_have_different_sizes() -> None:
    """Most loaders end an epoch with a smaller batch; its twins are its own."""
    batches = [*small_batches(2, size=8), *small_batches(1, size=4, seed=2), *small_batches(1, size=8, seed=3)]
    for delay, chunk_size in itertools.product((0, 1, 2), (None, 4)):
        sizes: list[int] = []

        def loss(outputs: Tensor, labels: Tensor, sizes: list[int] = sizes) -> Tensor:
            if torch.is_grad_enabled():  # else it is asked whether it is a mean
                sizes.append(len(labels))
            return F.cross_entropy(outputs, labels)

        model = make_model()
        method = ConAdv(model, loss, PGD(8 / 255, direction="noise"), delay=delay, chunk_size=chunk_size)
        train(method, model, batches)
        # Clean and adv, chunk by chunk; the noise asks no loss.
        expected = [8, 8, 8, 8, 4, 4, 8, 8] if chunk_size is None else [4] * 14
        assert sizes == expected


# --- what a step is ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("setting", [Setting("", "vanilla"), Setting("", "conadv", 0), Setting("", "recycled")])
def test_a_batch_may_come_chunk_by_chunk(setting: Setting) -> None:
    batches, states = small_batches(4), []
    for given in (batches, [Chunked(4, cut(conadv.Batch(*batch), 2)) for batch in batches]):
        model = make_model()
        train(setting.make(model, chunk_size=2), model, given)
        states.append(model)
    assert same_weights(*states)


@every_method
def test_losses_are_means_without_a_graph(setting: Setting) -> None:
    model = make_model()
    method = setting.make(model, chunk_size=2)
    images, labels = small_batches(1)[0]
    chunks = list(zip(images.chunk(4), labels.chunk(4), strict=True))
    plain = small_cnn()
    expected = sum(float(F.cross_entropy(plain(x).detach(), y)) for x, y in chunks) / 4
    for now, ahead in method.feed([(images, labels)] * 3):
        losses = method(now, ahead)  # of this step alone
    assert not losses.clean.requires_grad and not losses.adv.requires_grad
    assert float(losses.clean) == pytest.approx(expected, abs=1e-6)
    if setting.method != "vanilla":
        assert float(losses.adv) > float(losses.clean), "the adversary saw these very weights"
    elif setting.method == "vanilla":
        assert float(losses.adv) == 0


# --- what comes in -----------------------------------------------------------------------------------------------


@every_method
def test_bytes_are_fractions_of_the_pixel_range(setting: Setting) -> None:
    generator = torch.Generator().manual_seed(5)
    raw = [
        (torch.randint(256, (8, 2, 6, 6), generator=generator, dtype=torch.uint8), labels)
        for _, labels in small_batches(4)
    ]
    scaled = [(images.double() / 255, labels) for images, labels in raw]
    kept = [images.clone() for images, _ in raw]
    one, other = make_model(), make_model()
    train(setting.make(one, chunk_size=4), one, raw)
    train(setting.make(other, chunk_size=4), other, scaled)
    assert same_weights(one, other)
    assert all(torch.equal(images, before) for (images, _), before in zip(raw, kept, strict=True))


@every_method
def test_a_model_may_work_in_place_on_its_input(setting: Setting) -> None:
    class Centred(nn.Module):
        def __init__(self, in_place: bool) -> None:
            super().__init__()
            self.model = make_model()
            self.in_place = in_place

        def forward(self, images: Tensor) -> Tensor:
            outputs: Tensor = self.model(images.sub_(0.5) if self.in_place else images - 0.5)
            return outputs

    one, other = Centred(in_place=True), Centred(in_place=False)
    train(setting.make(one, chunk_size=4), one, small_batches(4))
    train(setting.make(other, chunk_size=4), other, small_batches(4))
    assert same_weights(one, other)


@image_methods
def test_two_views_of_the_same_images(setting: Setting) -> None:
    """Images and their augmented view share the clean part of the loss, each through a branch of its own."""
    branches = ("main", "aug", "adv") if setting.adversarial else ("main", "aug")
    model = split_batchnorm(small_cnn(), branches)
    method = setting.make(model, PGD(0, random_start=0), adv_weight=0.4)
    images, labels = small_batches(1)[0]
    augmented = images.flip(3)
    weights = {"main": 0.3, "aug": 0.3, "adv": 0.4} if setting.adversarial else {"main": 0.5, "aug": 0.5}
    losses = [method(*pair) for pair in method.feed([conadv.Batch(images, labels, augmented)])]
    expected, by_branch = 0, {}
    for branch, weight in weights.items():
        plain = small_cnn()
        loss = F.cross_entropy(plain(augmented if branch == "aug" else images), labels)
        (weight * loss).backward()
        expected = expected + plain[0].weight.grad
        by_branch[branch] = (float(loss.detach()), plain[1])
    torch.testing.assert_close(model[0].weight.grad, expected, rtol=0, atol=1e-12)
    for branch, (_, layer) in by_branch.items():
        owner = model[1] if branch == "main" else model[1].get_submodule(branch)
        torch.testing.assert_close(owner.weight.grad, layer.weight.grad, rtol=0, atol=1e-12)
        torch.testing.assert_close(owner.running_mean, layer.running_mean, rtol=0, atol=1e-12)
    assert float(losses[0].clean) == pytest.approx((by_branch["main"][0] + by_branch["aug"][0]) / 2, abs=1e-6)


@every_method
def test_frozen_weights_stay_as_they_are(setting: Setting) -> None:
    """Fine-tuning: the first layers need no gradient, their input does."""
    model = make_model()
    for parameter in (*model[0].parameters(), *model[1].parameters()):
        parameter.requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    train(setting.make(model), model, small_batches(3))
    assert torch.equal(model[0].weight, before["0.weight"]) and model[0].weight.grad is None
    assert not torch.equal(model[7].weight, before["7.weight"])


# --- randomness and precision ------------------------------------------------------------------------------------


@every_method
def test_with_a_seed_nothing_depends_on_what_ran_before(setting: Setting) -> None:
    attack = PGD(8 / 255, 4 / 255, random_start=0.5)

    def weights(seed: int, disturbance: int) -> nn.Module:
        model = nn.Sequential(nn.Dropout(0.2), make_model(), nn.Dropout(0.4))
        torch.manual_seed(disturbance)
        before = torch.get_rng_state()
        train(setting.make(model, attack, chunk_size=4, seed=seed), model, small_batches(4))
        assert torch.equal(torch.get_rng_state(), before)
        return model

    assert same_weights(weights(1, 1), weights(1, 2))
    assert not same_weights(weights(1, 1), weights(2, 1))


@every_method
def test_steps_and_branches_draw_numbers_of_their_own(setting: Setting) -> None:
    """The same images, weights and seed: only dropout tells the losses apart."""
    model = nn.Sequential(make_model(), nn.Dropout(0.5))
    losses = train(setting.make(model, PGD(0), seed=1), model, small_batches(1) * 3, lr=0)
    kinds = 2 if setting.adversarial else 1
    assert len({float(loss) for step in losses for loss in step[:kinds]}) == 3 * kinds


@every_method
def test_an_autocast_around_several_calls_sees_the_weights_of_each_pass(setting: Setting) -> None:
    """Autocast keeps weights in 16 bits, which must not outlive stale or moved weights."""

    def trained(outside: bool) -> nn.Module:
        model = make_model().float()
        method = setting.make(model, chunk_size=4, autocast=None if outside else torch.bfloat16, seed=1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for now, ahead in method.feed([(images.float(), labels) for images, labels in small_batches(4)]):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=outside):
                method(now, ahead)
            optimizer.step()
        return model

    assert same_weights(trained(outside=True), trained(outside=False))


# --- misuse ------------------------------------------------------------------------------------------------------


@adversarial_methods
def test_an_unsplit_model_is_refused(setting: Setting) -> None:
    half = small_cnn()
    half[1] = split_batchnorm(nn.Sequential(half[1]))[0]
    with pytest.raises(ValueError, match="4 is a plain BatchNorm layer"):
        setting.make(half)
    with pytest.raises(ValueError, match=r"only the branches main: call conadv.split_batchnorm"):
        setting.make(split_batchnorm(small_cnn(), ("main",)))


def test_vanilla_takes_a_plain_model_in_one_chunk_only() -> None:
    Vanilla(small_cnn(), F.cross_entropy)
    with pytest.raises(ValueError, match=r"1 is a plain BatchNorm layer: call conadv.split_batchnorm\("):
        Vanilla(small_cnn(), F.cross_entropy, chunk_size=4)
    for size in (1, 4):
        Vanilla(split_batchnorm(small_cnn(), ("main",)), F.cross_entropy, chunk_size=size)


@every_method
def test_only_recycled_has_a_state_of_each_rank(setting: Setting) -> None:
    about = json.loads(bytes(setting.make(make_model()).state_dict()["about"].tolist()))
    assert (about["rank"] is None) == (setting.method != "recycled")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda model: ConAdv(model, F.cross_entropy, ATTACK, delay=-1), "delay -1: take 0"),
        (lambda model: ConAdv(model, F.cross_entropy, ATTACK, adv_weight=1.5), "adv_weight 1.5: a part of the loss"),
        (lambda model: ConAdv(model, F.cross_entropy, ATTACK, chunk_size=0), "chunk_size 0: take at least 1"),
        (lambda model: Vanilla(model, F.cross_entropy, chunk_size=-4), "chunk_size -4: take at least 1"),
        (lambda model: Recycled(model, F.cross_entropy, ATTACK, adv_weight=1.0), "adv_weight 1.0: from 0 to below 1"),
        (lambda model: Recycled(model, F.cross_entropy, replace(ATTACK, steps=2)), "steps=1, targeted=False"),
        (lambda model: Recycled(model, F.cross_entropy, replace(ATTACK, targeted=True)), "steps=1, targeted=False"),
        (lambda _: PGD(0.1, low=0.5, high=0.5), "two numbers in this order"),
        (lambda _: Vanilla(nn.Flatten(), F.cross_entropy), "a model without parameters"),
    ],
)
def test_bad_values_are_refused(make: Callable[[nn.Module], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(make_model())


@adversarial_methods
def test_only_the_first_images_are_looked_at(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look would wait for the device."""
    looks: list[int] = []
    monkeypatch.setattr(PGD, "check_range", lambda self, images: looks.append(1))
    model = make_model()
    train(setting.make(model), model, small_batches(3))
    assert len(looks) == 1


@pytest.mark.parametrize("kind", [ConAdv, Recycled])
def test_what_is_changed_between_steps_is_checked_as_when_it_was_created(kind: type[ConAdv | Recycled]) -> None:
    method = kind(split_batchnorm(small_cnn()), F.cross_entropy, PGD(0.1, branch="main"), twin_branch="main")
    method.adv_weight, method.attack = 0.25, PGD(0.2, branch="main")
    method(small_batches(1)[0])
    method.adv_weight = 3
    with pytest.raises(ValueError, match="adv_weight 3"):
        method(small_batches(1)[0])
    method.adv_weight = 0.25
    method.attack = PGD(0.2) if kind is ConAdv else PGD(0.2, 0.1, 10)  # through another branch; of several steps
    with pytest.raises(ValueError, match=r"branch|step"):
        method(small_batches(1)[0])
    assert method.step == 1
