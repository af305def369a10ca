"""Split BatchNorm: outside of a route the layer that it was, inside of one a layer with several branches."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from conadv import plain_state_dict, route, split_batchnorm
from conadv.core.splitbn import update_running_stats
from support.settings import small_batches, small_cnn

SHAPES = {nn.BatchNorm1d: (6, 3, 5), nn.BatchNorm2d: (6, 3, 4, 5), nn.BatchNorm3d: (4, 3, 2, 3, 2)}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"affine": False},
    {"track_running_stats": False},
    {"momentum": None},
    {"momentum": 0.3, "eps": 0.1},
    {"affine": False, "track_running_stats": False},
    {"momentum": 0.0},
]
every_kind = pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d])
every_option = pytest.mark.parametrize("options", OPTIONS, ids=str)


def make_layer(kind: type[_BatchNorm], **options: Any) -> _BatchNorm:
    layer = kind(3, **options).double()
    if layer.affine:
        nn.init.uniform_(layer.weight, 0.5, 1.5)
        nn.init.uniform_(layer.bias)
    return layer


def images_for(kind: type[_BatchNorm], seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(SHAPES[kind], generator=generator, dtype=dtype) * 2 + 1


def through(model: nn.Module, images: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Outputs, and gradients of the input and the weights."""
    leaf = images.clone().requires_grad_()
    outputs = model(leaf)
    weights = [p for p in model.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(outputs.sin().sum(), [leaf, *weights], allow_unused=True)
    return outputs.detach(), gradients[0], [g for g in gradients[1:] if g is not None]


def assert_same_model(plain: nn.Module, split: nn.Module) -> None:
    state, expected = plain_state_dict(split), plain.state_dict()
    assert list(state) == list(expected)
    torch.testing.assert_close(state, expected, rtol=1e-12, atol=1e-12)


# --- outside of a route ------------------------------------------------------------------------------------------


@every_kind
@every_option
def test_outside_of_a_route_it_is_the_layer_that_it_was(kind: type[_BatchNorm], options: dict[str, Any]) -> None:
    plain = make_layer(kind, **options)
    split = split_batchnorm(copy.deepcopy(plain))
    for step, training in enumerate([True, True, False, True, False]):
        images = images_for(kind, seed=step)
        expected, got = through(plain.train(training), images), through(split.train(training), images)
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
        assert_same_model(plain, split)


@every_kind
def test_a_wrong_number_of_dimensions_is_refused_as_before(kind: type[_BatchNorm]) -> None:
    wrong = torch.zeros(2, 3, 4) if kind is not nn.BatchNorm1d else torch.zeros(2, 3, 4, 5)
    with pytest.raises(ValueError, match="expected"):
        split_batchnorm(nn.Sequential(kind(3)))(wrong)


# --- branches ----------------------------------------------------------------------------------------------------


@every_kind
@every_option
@pytest.mark.parametrize("branches", [("main", "adv"), ("main", "aug", "adv")], ids=len)
def test_each_branch_is_a_layer_of_its_own(
    kind: type[_BatchNorm], options: dict[str, Any], branches: tuple[str, ...]
) -> None:
    plain = make_layer(kind, **options)
    apart = {branch: copy.deepcopy(plain) for branch in branches}
    split = split_batchnorm(nn.Sequential(plain), branches)
    for step in range(3):
        for number, branch in enumerate(branches):
            images = images_for(kind, seed=10 * step + number)
            with route(split, branch):
                got = through(split, images)
            torch.testing.assert_close(got, through(apart[branch], images), rtol=1e-12, atol=1e-12)
    split.eval()
    for branch in branches:
        images = images_for(kind, seed=99)
        with route(split, branch):
            torch.testing.assert_close(split(images), apart[branch].eval()(images), rtol=1e-12, atol=1e-12)


def test_branches_start_as_copies_but_untrained() -> None:
    model = small_cnn()
    model(small_batches(1)[0][0])
    layer = split_batchnorm(model)[1]
    for name in ("weight", "bias", "running_mean", "running_var"):
        assert torch.equal(getattr(layer.adv, name), getattr(layer, name))
        assert getattr(layer.adv, name).data_ptr() != getattr(layer, name).data_ptr()
    assert int(layer.num_batches_tracked) == 1 and int(layer.adv.num_batches_tracked) == 0


def test_nested_and_shared_layers() -> None:
    class Shared(nn.Module):
        """One layer under two names, and used twice in a pass."""

        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Sequential(nn.ModuleDict({"deep": nn.Sequential(nn.BatchNorm2d(3))}))
            self.second = self.first[0]["deep"][0]

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.second(self.first[0]["deep"](x) ** 2)
            return y

    plain = Shared().double()
    split = split_batchnorm(copy.deepcopy(plain))
    assert split.first[0]["deep"][0] is split.second
    for number in range(2):
        images = images_for(nn.BatchNorm2d, seed=number)
        torch.testing.assert_close(through(split, images), through(plain, images), rtol=1e-12, atol=1e-12)
    assert_same_model(plain, split)
    plain.load_state_dict(plain_state_dict(split), strict=True)
    split.load_state_dict(plain.state_dict(), strict=True)


# --- statistics --------------------------------------------------------------------------------------------------


def test_nothing_moves_before_the_end_of_a_step_or_without_tracking() -> None:
    split = split_batchnorm(small_cnn())
    before = copy.deepcopy(split.state_dict())
    images = small_batches(1)[0][0]
    with route(split, "adv", tracking="step"):
        split(images)
    torch.testing.assert_close(split.state_dict(), before, rtol=0, atol=0)
    update_running_stats(split)
    moved = copy.deepcopy(split.state_dict())
    assert not torch.equal(moved["1.adv.running_mean"], before["1.adv.running_mean"])
    update_running_stats(split)  # nothing is pending any more
    with route(split, "main", tracking="off"):
        split(images)
    update_running_stats(split)
    torch.testing.assert_close(split.state_dict(), moved, rtol=0, atol=0)


def test_routes_nest_and_end_with_an_error() -> None:
    split = split_batchnorm(nn.Sequential(make_layer(nn.BatchNorm2d)))
    with torch.no_grad():
        split[0].adv.weight.fill_(0)
        split[0].adv.bias.fill_(7)
    images = images_for(nn.BatchNorm2d)

    def through_adv() -> bool:
        return bool((split(images) == 7).all())

    with route(split, "adv"):
        assert through_adv()
        with route(split, "main"):
            assert not through_adv()
        with pytest.raises(ZeroDivisionError), route(split, "main"):
            _ = 1 / 0
        assert through_adv()
    assert not through_adv()


def test_a_branch_that_was_never_trained_is_an_error_when_evaluated() -> None:
    split = split_batchnorm(small_cnn())
    images = small_batches(1)[0][0]
    split(images)
    split.eval()
    split(images)  # main may be evaluated
    for _ in range(2):
        with pytest.raises(ValueError, match="the adv branch was never trained"), route(split, "adv"):
            pytest.fail("there is nothing to evaluate")
        split.load_state_dict(plain_state_dict(split))  # no more after it was loaded from a plain checkpoint
    with pytest.raises(ValueError, match="the adv branch was never trained"), route(split, "adv", statistics="running"):
        pytest.fail("there is nothing to evaluate")
    with route(split, "adv", statistics="batch"):
        split(images)
    with route(split.train(), "adv"):
        split(images)
    with route(split.eval(), "adv"):
        split(images)


# --- SyncBatchNorm -----------------------------------------------------------------------------------------------


def test_a_synchronized_layer_alone_is_a_batchnorm() -> None:
    plain = nn.SyncBatchNorm.convert_sync_batchnorm(small_cnn())
    split = split_batchnorm(copy.deepcopy(plain))
    images = small_batches(1)[0][0]
    for training in (True, False):
        expected = small_cnn().train(training)
        torch.testing.assert_close(split.train(training)(images), expected(images), rtol=0, atol=1e-12)
        split.load_state_dict(plain.state_dict(), strict=True)
    plain.load_state_dict(plain_state_dict(split), strict=True)


# --- errors ------------------------------------------------------------------------------------------------------


def test_an_unknown_branch_is_refused() -> None:
    split = split_batchnorm(small_cnn())
    with pytest.raises(ValueError, match=r"no branch 'aug': split it with split_batchnorm"), route(split, "aug"):
        pytest.fail("there is no such branch")


@pytest.mark.parametrize("branches", [(), ("adv", "main"), ("main", "adv", "aug"), ("main", "other")])
def test_unknown_branches_are_refused(branches: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=r"branches \(.*\): take \('main',\) or"):
        split_batchnorm(small_cnn(), branches)


def test_splitting_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="split already: call split_batchnorm once"):
        split_batchnorm(split_batchnorm(small_cnn()))


# --- back and forth ----------------------------------------------------------------------------------------------


def test_checkpoints_go_both_ways_strictly() -> None:
    trained = split_batchnorm(small_cnn(seed=1), ("main", "aug", "adv"))
    images = small_batches(1)[0][0]
    for branch in ("main", "adv", "aug"):
        with route(trained, branch):
            trained(images)
    plain = small_cnn(seed=2)
    plain.load_state_dict(plain_state_dict(trained), strict=True)
    torch.testing.assert_close(plain.eval()(images), trained.eval()(images), rtol=0, atol=1e-12)

    checkpoint = plain.state_dict()
    keys = list(checkpoint)
    fresh = split_batchnorm(small_cnn(seed=3))
    fresh.load_state_dict(checkpoint, strict=True)
    assert list(checkpoint) == keys, "the checkpoint stays as it was"
    assert_same_model(plain, fresh)
    assert torch.equal(fresh[1].adv.running_mean, plain[1].running_mean)
    assert fresh[1].adv.running_mean.data_ptr() != fresh[1].running_mean.data_ptr()

    same = split_batchnorm(small_cnn(seed=4), ("main", "aug", "adv"))
    same.load_state_dict(trained.state_dict(), strict=True)
    torch.testing.assert_close(same.state_dict(), trained.state_dict(), rtol=0, atol=0)

    with pytest.raises(RuntimeError, match="Unexpected key"):
        plain.load_state_dict(trained.state_dict(), strict=True)
    broken = trained.state_dict()
    del broken["1.adv.weight"]
    with pytest.raises(RuntimeError, match="Missing key"):
        same.load_state_dict(broken, strict=True)


def test_a_copy_is_independent_and_whole() -> None:
    split = split_batchnorm(small_cnn())
    images = small_batches(1)[0][0]
    with route(split, "adv", tracking="step"):
        split(images)
    clone = copy.deepcopy(split)
    with torch.no_grad():
        split[1].adv.weight.zero_()
    update_running_stats(clone)
    assert int(clone[1].adv.num_batches_tracked) == 1 and int(split[1].adv.num_batches_tracked) == 0
    assert bool((clone[1].adv.weight != 0).all())
    plain = small_cnn(seed=3).state_dict()
    del split
    gc.collect()
    clone.load_state_dict(plain, strict=True)  # the hook that fills the branches belongs to the copy
    with route(clone, "adv"):
        assert clone(images).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_moves_to_another_dtype(dtype: torch.dtype) -> None:
    plain = small_cnn().to(dtype)
    split = split_batchnorm(small_cnn()).to(dtype)
    images = small_batches(1)[0][0].to(dtype)
    assert torch.equal(split(images), plain(images))
    with route(split, "adv", tracking="step"):
        assert split(images).dtype == dtype
    update_running_stats(split)
    assert {value.dtype for key, value in split.state_dict().items() if "num" not in key} == {dtype}
    torch.testing.assert_close(split[1].adv.running_mean, plain[1].running_mean)


def test_a_model_without_batchnorm_stays_as_it_is() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
    keys = list(model.state_dict())
    assert split_batchnorm(model) is model and list(plain_state_dict(model)) == keys
    with route(model, "adv"):
        model(torch.zeros(2, 3))


def test_a_plain_state_that_is_assigned_leaves_the_branches_apart() -> None:
    split = split_batchnorm(small_cnn())
    split.load_state_dict(small_cnn(seed=1).state_dict(), assign=True)
    main, adv = split[1], split[1].adv
    assert torch.equal(main.weight, adv.weight) and torch.equal(main.running_mean, adv.running_mean)
    with torch.no_grad():
        main.weight += 1
        main.running_mean += 1
    assert not torch.equal(main.weight, adv.weight) and not torch.equal(main.running_mean, adv.running_mean)
