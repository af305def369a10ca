"""together: the same numbers as separate passes, fewer passes, and a refusal where it could not be the same."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from conadv import PGD, Batch, ConAdv, Queue, Recycled, Vanilla, split_batchnorm
from conadv.core.catalog import METHODS
from settings import SETTINGS, Setting, small_batches, small_cnn

EXACT = {"rtol": 0, "atol": 1e-12}
every_method = pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)


def batches(views: bool, count: int = 4) -> list[Any]:
    """Batches of 8 images, with an augmented view of each image if asked for."""
    other = small_batches(count, seed=7)
    pairs = zip(small_batches(count), other, strict=True)
    return [Batch(images, labels, augmented if views else None) for (images, labels), (augmented, _) in pairs]


def trained(
    setting: Setting, together: bool, *, views: bool = False, by_loss: bool = False, **options: Any
) -> tuple[dict[str, Tensor], list[Tensor]]:
    """The state of a model after some steps, and the losses of each step."""
    main, *adv = METHODS[setting.method].branches
    model = split_batchnorm(small_cnn(), (main, *(["aug"] if views else []), *adv))
    method = setting.make(model, PGD(8 / 255), seed=3, together=together, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for now, ahead in method.feed(batches(views)):
        optimizer.zero_grad()
        if by_loss:
            total = method.loss(now, ahead)
            total.backward()
            losses.append(total.detach())
        else:
            losses += list(method(now, ahead))
        optimizer.step()
    return model.state_dict(), losses


def assert_same(one: Any, other: Any) -> None:
    (state, losses), (other_state, other_losses) = one, other
    torch.testing.assert_close(state, other_state, **EXACT)
    torch.testing.assert_close(losses, other_losses, **EXACT)


@pytest.mark.parametrize("views", [False, True], ids=["one view", "two views"])
@pytest.mark.parametrize("chunk_size", [None, 4])
@every_method
def test_the_numbers_are_those_of_separate_passes(setting, chunk_size, views):
    options = {"chunk_size": chunk_size, "views": views}
    assert_same(trained(setting, True, **options), trained(setting, False, **options))


@pytest.mark.parametrize("setting", [each for each in SETTINGS if each.method != "sam"], ids=lambda each: each.name)
def test_so_are_those_of_a_loss_that_the_caller_backpropagates(setting):
    options = {"chunk_size": 4, "views": True, "by_loss": True}
    assert_same(trained(setting, True, **options), trained(setting, False, **options))


@pytest.mark.parametrize("make", [ConAdv, Recycled])
@pytest.mark.parametrize("chunk_size", [None, 2])
def test_with_twins_of_a_part_of_the_batch(make, chunk_size):
    def run(together: bool) -> dict[str, Tensor]:
        model = split_batchnorm(small_cnn())
        options = {"twin_share": "1/4", "chunk_size": chunk_size, "seed": 3, "together": together}
        method = make(model, F.cross_entropy, PGD(8 / 255, random_start=0), **options)
        for batch in small_batches(3):
            method(batch)
        return {name: weight.grad for name, weight in model.named_parameters()}

    torch.testing.assert_close(run(True), run(False), **EXACT)


@pytest.mark.parametrize("share", [1, "1/2"])
def test_the_twins_of_recycled_are_generated_again_bit_by_bit(share):
    """As a resumed run does. With few images, products of matrices round differently for another number of them."""
    model = split_batchnorm(small_cnn())
    attack = PGD(8 / 255, direction="raw", random_start=0)
    method = Recycled(model, F.cross_entropy, attack, twin_share=share, chunk_size=2, seed=3, together=True)
    first, second = small_batches(2)
    method(first)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    method(second)
    twins = [method.handoff.take().images for _ in range(len(method.handoff))]
    model.load_state_dict(weights)
    method.resume(2)
    method.prime(second, 1)
    again = [method.handoff.take().images for _ in range(len(method.handoff))]
    assert len(again) == len(twins) == 4 * Fraction(share)
    assert all(torch.equal(one, other) for one, other in zip(twins, again, strict=True))


class Checkpointed(nn.Module):
    """Runs its layers again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.net = small_cnn()

    def forward(self, images: Tensor) -> Tensor:
        outputs: Tensor = checkpoint(self.net, images, use_reentrant=False)
        return outputs


@pytest.mark.parametrize("by_loss", [False, True])
def test_activation_checkpointing_runs_each_part_through_its_branch_again(by_loss):
    results = []
    for make, together in ((Checkpointed, True), (Checkpointed, False)):
        model = split_batchnorm(make())
        method = ConAdv(model, F.cross_entropy, PGD(8 / 255, random_start=0), chunk_size=4, together=together)
        for batch in small_batches(2):
            if by_loss:
                method.loss(batch).backward()
            else:
                method(batch)
        results.append((model.state_dict(), {name: weight.grad for name, weight in model.named_parameters()}))
    torch.testing.assert_close(*results, **EXACT)


def test_outputs_that_are_structures_are_split():
    class Dict(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = small_cnn()

        def forward(self, images: Tensor) -> dict[str, Any]:
            outputs = self.net(images)
            return {"logits": outputs, "hidden": (outputs * 2, None)}

    def loss(outputs: Any, labels: Tensor) -> Tensor:
        return F.cross_entropy(outputs["logits"] + outputs["hidden"][0], labels)

    found = []
    for together in (True, False):
        model = split_batchnorm(Dict())
        ConAdv(model, loss, PGD(8 / 255, random_start=0), together=together)(small_batches(1)[0])
        found.append({name: weight.grad for name, weight in model.named_parameters()})
    torch.testing.assert_close(*found, **EXACT)


class Changed(nn.Module):
    """A network with one more step, which a joint pass cannot take."""

    def __init__(self, change: Callable[[Tensor], Any], **layers: nn.Module) -> None:
        super().__init__()
        self.net = small_cnn()
        self.change = change
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, images: Tensor) -> Any:
        return self.change(self.net(images))


def tokens_in_the_batch() -> nn.Module:
    """BatchNorm over tokens that were moved into the batch dimension."""
    layers = (nn.Flatten(0, 1), nn.Flatten(1), nn.BatchNorm1d(36), nn.Unflatten(0, (-1, 2)), nn.Flatten())
    return nn.Sequential(*layers, nn.Linear(72, 5)).double()


REFUSED = {
    "dropout": (lambda: nn.Sequential(small_cnn(), nn.Dropout(0.5)), "draws random numbers"),
    "mixes the batch": (lambda: Changed(lambda y: y - y.mean(0)), "the model mixes the images of a batch"),
    "permutes the batch": (lambda: Changed(lambda y: y.flip(0)), "the model mixes the images of a batch"),
    "another batch dimension": (tokens_in_the_batch, "cannot be told apart: drop together"),
    "a loss of its own": (lambda: Changed(lambda y: {"logits": y, "aux": y.mean()}), r"a tensor of shape \(\)"),
    "an object": (lambda: Changed(lambda y: iter([y])), "returns tuple_?iterator|returns list_iterator"),
    "spectral norm": (
        lambda: nn.Sequential(small_cnn(), nn.utils.parametrizations.spectral_norm(nn.Linear(5, 5).double())),
        "moves with each pass",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_for_which_it_is_not_the_same_is_refused_and_left_as_it_was(name):
    make, words = REFUSED[name]
    torch.manual_seed(0)
    model = split_batchnorm(make())
    before = {key: value.clone() for key, value in model.state_dict().items()}

    def loss(outputs: Any, labels: Tensor) -> Tensor:
        logits = outputs["logits"] if isinstance(outputs, dict) else outputs
        return F.cross_entropy(logits if isinstance(logits, Tensor) else next(logits), labels)

    method = ConAdv(model, loss, PGD(8 / 255, random_start=0), handoff=Queue(), delay=0, together=True)
    with pytest.raises(ValueError, match=words) as error:
        method(small_batches(1)[0])
    assert "\n" not in str(error.value) and str(error.value).startswith("together=True")
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_what_cannot_be_joined_is_refused():
    model = split_batchnorm(small_cnn(), ("main", "aug"))
    with pytest.raises(ValueError, match="joins images only"):
        Vanilla(model, F.cross_entropy, together=True, input_name="input")
    images, labels = small_batches(1)[0]
    with pytest.raises(ValueError, match=r"main \(8, 2, 6, 6\) and aug \(8, 2, 4, 4\)"):
        Vanilla(model, F.cross_entropy, together=True)(Batch(images, labels, images[..., :4, :4]))


def test_a_layer_with_a_forward_pass_of_its_own_is_split_by_part():
    class Own(nn.BatchNorm2d):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 2

    found = []
    for together in (True, False):
        model = split_batchnorm(small_cnn(norm=Own))
        method = ConAdv(model, F.cross_entropy, PGD(8 / 255, random_start=0), chunk_size=4, together=together)
        method(small_batches(1)[0])
        found.append((model.state_dict(), {name: weight.grad for name, weight in model.named_parameters()}))
    torch.testing.assert_close(*found, **EXACT)


def test_one_part_is_not_affected():
    """A rank or a chunk that learns from one kind of images, with a model that a joint pass would not suit."""
    found = []
    for together in (True, False):
        model = Changed(lambda outputs: outputs - outputs.mean(0))
        Vanilla(model, F.cross_entropy, together=together)(small_batches(1)[0])
        found.append({name: weight.grad for name, weight in model.named_parameters()})
    torch.testing.assert_close(*found, rtol=0, atol=0)
