"""The attack's numbers: against foolbox, and against gradients computed apart."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conadv import PGD, route, split_batchnorm
from conadv.core.pgd import Norm
from support.settings import CLASSES, small_batches, small_cnn

with warnings.catch_warnings():  # its blurring attack imports from where scipy has moved away
    warnings.simplefilter("ignore", DeprecationWarning)
    import foolbox

EPSILON = 8 / 255
MEAN, STD = (0.45, 0.38), (0.25, 0.5)


def evaluated(model: nn.Module) -> nn.Module:
    """A model with running statistics of its own, in eval mode."""
    with torch.no_grad():
        for images, _ in small_batches(3, seed=9):
            model.train()(images)
    return model.eval()


def input_gradient(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """The gradient of each image, one image at a time: what a sum over the images means."""
    rows = []
    for image, label in zip(images, labels, strict=True):
        leaf = image[None].clone().requires_grad_()
        F.cross_entropy(model(leaf), label[None]).backward()
        assert leaf.grad is not None
        rows.append(leaf.grad[0])
    return torch.stack(rows)


@pytest.mark.parametrize("norm", ["linf", "l2"])
@pytest.mark.parametrize(("steps", "step_size"), [(1, None), (10, EPSILON / 3)])
def test_it_equals_foolbox(norm: Norm, steps: int, step_size: float | None) -> None:
    model = evaluated(small_cnn())
    ((images, labels),) = small_batches(1)
    epsilon = EPSILON if norm == "linf" else 0.5
    size = None if step_size is None else epsilon / 3
    attack = PGD(epsilon, step_size=size, steps=steps, norm=norm, random_start=0, statistics="running")

    oracle = {"linf": foolbox.attacks.LinfPGD, "l2": foolbox.attacks.L2PGD}[norm](
        abs_stepsize=epsilon if size is None else size, steps=steps, random_start=False
    )
    wrapped = foolbox.PyTorchModel(model, bounds=(0, 1))
    _, expected, _ = oracle(wrapped, images, foolbox.criteria.Misclassification(labels), epsilons=epsilon)

    twins = attack(model, F.cross_entropy, images, labels)
    assert not torch.equal(twins, images)
    torch.testing.assert_close(twins, expected, rtol=0, atol=1e-12)


def test_directions_by_hand() -> None:
    images, gradient = torch.full((1, 1, 1, 2), 0.5), torch.tensor([0.03, -0.04]).view(1, 1, 1, 2)

    def moved(**options: object) -> list[float]:
        attack = replace(PGD(0.25, 0.1), **options)  # type: ignore[arg-type]
        return ((attack.along(images, gradient) - images) / 0.1).flatten().tolist()

    assert moved() == pytest.approx([1, -1], abs=1e-5)
    assert moved(norm="l2") == pytest.approx([0.6, -0.8], abs=1e-5)
    assert moved(direction="unit") == pytest.approx([0.6, -0.8], abs=1e-5)
    assert moved(direction="raw") == pytest.approx([0.03, -0.04], abs=1e-5)
    assert moved(norm="l2", direction="sign") == pytest.approx([1, -1], abs=1e-5)
    assert moved(norm="l2", direction="sign", epsilon=0.1) == pytest.approx([2**-0.5, -(2**-0.5)], abs=1e-5)


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_no_gradient_no_step(norm: Norm) -> None:
    images = torch.rand(3, 2, 4, 4)
    assert torch.equal(PGD(0.1, norm=norm).along(images, torch.zeros_like(images)), images)


@pytest.mark.parametrize(
    "attack",
    [
        PGD(EPSILON, random_start=0),
        PGD(EPSILON, 3 / 255, steps=5, random_start=1),
        PGD(0.5, 0.2, steps=4, norm="l2", random_start=1),
        PGD(EPSILON, 0.02, direction="raw", random_start=0),
        PGD(EPSILON, direction="noise", random_start=1),
    ],
    ids=["one", "five", "l2", "raw", "noise"],
)
def test_normalized_images_give_the_same_twins(attack: PGD) -> None:
    mean, std = (torch.tensor(values, dtype=torch.float64) for values in (MEAN, STD))
    normalize, model = nn.Conv2d(2, 2, 1).double(), small_cnn()
    normalize.weight.data, normalize.bias.data = torch.diag(1 / std)[..., None, None], -mean / std
    attack = replace(attack, statistics="batch")
    ((pixels, labels),) = small_batches(1)
    expected = attack(nn.Sequential(normalize, model), F.cross_entropy, pixels, labels)
    twins = replace(attack, mean=MEAN, std=STD)(model, F.cross_entropy, normalize(pixels).detach(), labels)
    seen = twins * std[:, None, None] + mean[:, None, None]
    torch.testing.assert_close(seen, expected, rtol=0, atol=1e-12)


def test_targeted_goes_towards_a_wrong_label_and_keeps_to_it() -> None:
    model = evaluated(small_cnn())
    ((images, labels),) = small_batches(1, size=64)
    images = images * 0.5 + 0.25
    attack = PGD(0.2, 1e-3, direction="raw", random_start=0, targeted=True, statistics="running")
    once = attack(model, F.cross_entropy, images, labels)
    every_label = torch.arange(CLASSES)[:, None].expand(CLASSES, len(images))
    ways = torch.stack([images - 1e-3 * input_gradient(model, images, label) for label in every_label])
    distances = (once - ways).abs().flatten(2).amax(2)  # of each label, of each image
    targets = distances.argmin(0)
    assert float(distances.amin(0).max()) < 1e-12
    assert set(((targets - labels) % CLASSES).tolist()) == {1, 2, 3, 4}, "every label but the right one"

    twice = replace(attack, steps=2)(model, F.cross_entropy, images, labels)
    torch.testing.assert_close(twice, once - 1e-3 * input_gradient(model, once, targets), rtol=0, atol=1e-12)


@pytest.mark.parametrize("probability", [0.0, 0.3, 0.8, 1.0])
@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_random_start_is_drawn_for_each_image(probability: float, norm: Norm) -> None:
    images = torch.full((2000, 1, 2, 2), 0.5)
    attack = PGD(0.1, step_size=0, norm=norm, random_start=probability, direction="noise")
    delta = (attack(nn.Identity(), F.cross_entropy, images, images) - images).flatten(1)
    moved = delta.abs().amax(1) > 0
    assert float(moved.double().mean()) == pytest.approx(probability, abs=0.04)  # four standard deviations
    if probability > 0:
        if norm == "linf":  # uniform in a cube: the mean of |x| is half of its radius
            assert float(delta[moved].abs().mean()) == pytest.approx(0.05, rel=0.05)
        else:  # uniform in a ball of 4 dimensions: the mean radius is 4/5
            assert float(delta[moved].norm(dim=1).mean()) == pytest.approx(0.08, rel=0.05)
        assert float(delta[moved].mean()) == pytest.approx(0, abs=0.004)


def test_the_seed_alone_decides_what_is_random() -> None:
    model = nn.Sequential(small_cnn(), nn.Dropout(0.5))
    ((images, labels),) = small_batches(1)
    attack = PGD(EPSILON, 2 / 255, steps=3, random_start=0.5, targeted=True)

    def twins(seed: int, disturbance: int) -> Tensor:
        torch.manual_seed(disturbance)
        return attack(model, F.cross_entropy, images, labels, seed)

    assert torch.equal(twins(1, 1), twins(1, 2))
    assert not torch.equal(twins(1, 1), twins(2, 1))


def test_without_a_seed_it_is_seed_0() -> None:
    model = small_cnn()
    ((images, labels),) = small_batches(1)
    attack = PGD(EPSILON)
    seeded = attack(model, F.cross_entropy, images, labels, 0)
    assert torch.equal(attack(model, F.cross_entropy, images, labels), seeded)
    noise = PGD(EPSILON, direction="noise")
    assert torch.equal(noise.along(images, images), noise.along(images, images, 0))


def test_noise_is_a_random_sign_and_asks_the_model_nothing() -> None:
    images = torch.full((500, 2, 3, 3), 0.5, dtype=torch.float64)

    def model(_: Tensor) -> Tensor:
        raise AssertionError("the control needs no gradient")

    attack = PGD(EPSILON, direction="noise", random_start=0)
    signs = (attack(model, F.cross_entropy, images, images) - images) / EPSILON  # type: ignore[arg-type]
    torch.testing.assert_close(signs.abs(), torch.ones_like(signs))
    assert float(signs.mean()) == pytest.approx(0, abs=0.05)


@pytest.mark.parametrize("branch", ["main", "adv"])
@pytest.mark.parametrize("statistics", ["batch", "running"])
@pytest.mark.parametrize("training", [True, False])
def test_branch_and_statistics_are_those_of_its_arguments(branch: str, statistics: str, training: bool) -> None:
    model = split_batchnorm(small_cnn())
    ((images, labels),) = small_batches(1)
    images = images * 0.5 + 0.25
    with torch.no_grad():
        for seed, name in enumerate(("main", "adv")):
            with route(model, name):
                model(small_batches(1, seed=seed)[0][0] * (1 + seed))
        for layer in (model[1], model[4]):
            layer.adv.weight.mul_(-1)
    model.train(training)
    attack = PGD(0.2, 1e-3, direction="raw", random_start=0, branch=branch, statistics=statistics)  # type: ignore[arg-type]
    twins = attack(model, F.cross_entropy, images, labels)

    plain = small_cnn().train(statistics == "batch")
    for place in (1, 4):
        owner = model[place].owner(branch)
        plain[place].load_state_dict({name: owner.state_dict()[name] for name in plain[place].state_dict()})
    leaf = images.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(F.cross_entropy(plain(leaf), labels, reduction="sum"), leaf)
    torch.testing.assert_close(twins, images + 1e-3 * gradient, rtol=0, atol=1e-12)


@pytest.mark.parametrize("statistics", ["batch", "running"])
def test_a_plain_batchnorm_follows_statistics_too(statistics: str) -> None:
    plain, split = small_cnn(), split_batchnorm(small_cnn())
    ((images, labels),) = small_batches(1)
    attack = PGD(EPSILON, 0.02, direction="raw", random_start=0, branch="main", statistics=statistics)  # type: ignore[arg-type]
    expected = attack(split, F.cross_entropy, images, labels)
    for model in (plain.train(), plain.eval()):
        torch.testing.assert_close(attack(model, F.cross_entropy, images, labels), expected, rtol=0, atol=1e-12)


def test_a_frozen_layer_keeps_to_its_running_statistics() -> None:
    model = evaluated(small_cnn()).train()
    for layer in (model[1], model[4]):  # type: ignore[index]
        layer.eval()
    ((images, labels),) = small_batches(1)
    attack = PGD(EPSILON, 0.02, direction="raw", random_start=0, branch="adv", statistics="batch")
    expected = replace(attack, statistics="running")(model.eval(), F.cross_entropy, images, labels)
    model.train()
    for layer in (model[1], model[4]):  # type: ignore[index]
        layer.eval()
    assert torch.equal(attack(model, F.cross_entropy, images, labels), expected)
    assert torch.equal(attack(split_batchnorm(model), F.cross_entropy, images, labels), expected)


@pytest.mark.parametrize("shape", [(8, 7), (8, 3, 11), (4, 2, 3, 4, 5)])
@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_images_of_any_dimension(shape: tuple[int, ...], norm: Norm) -> None:
    images = torch.rand(shape, dtype=torch.float64)
    labels = torch.randint(CLASSES, shape[:1])
    model = nn.Sequential(nn.Flatten(), nn.Linear(images[0].numel(), CLASSES)).double()
    channels = [0.5] * shape[1]
    attack = PGD(0.1, 0.03, steps=3, norm=norm)
    assert attack(model, F.cross_entropy, images, labels).shape == shape
    normalized = replace(attack, mean=channels, std=channels)
    assert normalized(model, F.cross_entropy, images * 2 - 1, labels).shape == shape


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epsilon": -0.1}, "epsilon -0.1: a fraction of the pixel range, from 0 to 1, such as 4/255"),
        ({"epsilon": 4}, "epsilon 4: a fraction of the pixel range, from 0 to 1, such as 4/255"),
        ({"epsilon": float("nan")}, "epsilon nan: a fraction"),
        ({"step_size": -1}, "step_size -1: a fraction of the pixel range"),
        ({"step_size": float("inf")}, "step_size inf: a fraction"),
        ({"steps": 0}, "steps 0: take at least 1"),
        ({"random_start": 1.5}, "random_start 1.5: a probability, from 0 to 1"),
        ({"norm": "l1"}, "norm 'l1': linf or l2"),
        ({"direction": "up"}, "direction 'up': sign, unit, raw or noise"),
        ({"mean": (0.5,)}, "mean and std go together: give both or neither"),
        ({"mean": (0.5,), "std": (0.0,)}, r"std \(0.0,\): positive numbers"),
        ({"mean": 0.5, "std": 0.2}, "mean 0.5: one number per channel, such as"),
        ({"mean": "0.5", "std": (1.0,) * 3}, "mean '0.5': one number per channel, such as"),
        ({"statistics": "runing"}, "statistics 'runing': batch or running"),
    ],
)
def test_bad_values_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PGD(**({"epsilon": 0.1} | options))  # type: ignore[arg-type]


def test_a_radius_in_l2_may_be_larger_than_the_range_of_a_pixel() -> None:
    assert PGD(3, norm="l2").epsilon == 3
    with pytest.raises(ValueError, match="epsilon inf"):
        PGD(float("inf"), norm="l2")


def test_mean_and_std_may_be_tensors() -> None:
    mean, std = (0.25, 0.5), (0.5, 0.125)
    shaped = [torch.tensor(mean).view(2, 1, 1), torch.tensor(std)]
    assert PGD(EPSILON, mean=shaped[0], std=shaped[1]) == PGD(EPSILON, mean=mean, std=std)


def test_channels_must_meet_the_images() -> None:
    attack = PGD(EPSILON, mean=(0.5,) * 3, std=(0.2,) * 3)
    ((images, labels),) = small_batches(1)
    with pytest.raises(ValueError, match="mean and std have 3 channels, the images 2"):
        attack(small_cnn(), F.cross_entropy, images, labels)


def test_bytes_are_refused_in_words() -> None:
    ((_, labels),) = small_batches(1)
    with pytest.raises(ValueError, match=r"images of torch.uint8: .*255"):
        PGD(EPSILON)(small_cnn(), F.cross_entropy, torch.zeros(8, 2, 6, 6, dtype=torch.uint8), labels)


def test_mixed_labels_are_refused_only_where_a_wrong_label_is_needed() -> None:
    ((images, labels),) = small_batches(1)
    mixed = F.one_hot(labels, CLASSES).double() * 0.9 + 0.02
    attack = PGD(EPSILON, random_start=0)
    assert not torch.equal(attack(small_cnn(), F.cross_entropy, images, mixed), images)
    with pytest.raises(ValueError, match="targeted needs whole labels"):
        replace(attack, targeted=True)(small_cnn(), F.cross_entropy, images, mixed)


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (-1.0, 1.0), (-1.0, 3.0)])
def test_a_quarter_of_the_range_may_be_overshot(low: float, high: float) -> None:
    """As resampling does."""
    attack = PGD(epsilon=0.1, low=low, high=high)
    room = (high - low) / 4
    attack.check_range(torch.tensor([low - 0.99 * room, high + 0.99 * room]))
    for images in ([low - 1.01 * room, high], [low, high + 1.01 * room]):
        with pytest.raises(ValueError, match="scale them to"):
            attack.check_range(torch.tensor(images))


@pytest.mark.parametrize(("size", "exact"), [(4 / 255, True), (1.5 / 255, False)])
def test_one_step_of_whole_255ths_is_exact_as_bytes(size: float, exact: bool) -> None:
    """Such twins cross between ranks in a quarter of the bytes."""
    assert PGD(size, random_start=0).exact_as_bytes(from_images=False) == exact
    for attack, whole in ((PGD(4 / 255), False), (PGD(4 / 255, grid=True), True), (PGD(4 / 255, norm="l2"), False)):
        assert attack.exact_as_bytes(from_images=False) == whole
        assert attack.exact_as_bytes(from_images=True) == (attack.norm == "linf")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_random_starts_of_16_bit_images_are_finite_and_in_the_ball(norm: Norm, dtype: torch.dtype) -> None:
    images = torch.zeros(16, 3, 32, 32, dtype=dtype)
    starts = PGD(0.25, norm=norm, random_start=1.0, low=None, high=None)._start(images, 3)
    assert starts.dtype == dtype
    assert bool(starts.isfinite().all()) and not torch.equal(starts, images)
    moved = starts.double().flatten(1)
    length = moved.abs().amax(1) if norm == "linf" else moved.norm(dim=1)
    assert float(length.max()) <= 0.25 * 1.02  # the rounding of 16 bits


@pytest.mark.parametrize("epsilon", [4 / 255, 4.99 / 255])
def test_starts_on_the_grid_are_whole_255ths(epsilon: float) -> None:
    images = torch.full((16, 2, 4, 4), 100 / 255, dtype=torch.float64)
    levels = PGD(epsilon, random_start=1.0, grid=True)._start(images, 3) * 255
    torch.testing.assert_close(levels, levels.round(), rtol=0, atol=1e-9)
    assert levels.round().unique().tolist() == list(range(96, 105))
