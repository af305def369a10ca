"""Models: published parameter counts, a separate implementation of the forward pass, and bad input."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from conadv.task.libraries import build_from_callable, load_callable
from conadv.task.models import (
    build_model,
    check_output,
    fastest_memory,
)


def build_on_meta(name: str, classes: int, in_channels: int = 3, width: int | None = None) -> nn.Module:
    """A model without memory for its weights: shapes and work can be counted at once."""
    with torch.device("meta"):
        return build_model(name, classes, in_channels, width)


def count_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("name", "classes", "published"),
    [
        # torchvision's documentation, 1000 classes
        ("resnet34", 1000, 21_797_672),
        ("resnet50", 1000, 25_557_032),
        # pytorchcv's table for CIFAR-10, which projects in shortcuts as we do. (He et al. pad with zeros there
        # and need 2,752 parameters less: 0.27M, 0.85M and 1.7M either way.)
        ("resnet20", 10, 272_474),
        ("resnet110", 10, 1_730_714),
    ],
)
def test_parameters_are_as_many_as_published(name: str, classes: int, published: int) -> None:
    assert count_parameters(build_on_meta(name, classes)) == published


def test_the_halved_resnet8_has_a_first_convolution_of_stride_2_and_the_work_of_resnet8() -> None:
    work = {}
    for name in ("resnet8", "resnet8-half"):
        model = build_on_meta(name, 10)
        with FlopCounterMode(display=False) as counter:
            assert model(torch.empty(1, 3, 32, 32, device="meta")).shape == (1, 10)
        work[name] = counter.get_total_flops()
    assert work["resnet8-half"] == pytest.approx(work["resnet8"], rel=0.05)
    assert model.get_submodule("conv1").stride == (2, 2)
    assert model.get_submodule("conv1").out_channels == 32


def forward_written_apart(state: dict[str, Tensor], x: Tensor, large: bool) -> Tensor:
    """A ResNet in eval mode from the names of its weights alone."""

    def normalized(key: str, x: Tensor) -> Tensor:
        mean, var = state[f"{key}.running_mean"], state[f"{key}.running_var"]
        scale = state[f"{key}.weight"] / (var + 1e-5).sqrt()
        return x * scale.view(-1, 1, 1) + (state[f"{key}.bias"] - mean * scale).view(-1, 1, 1)

    def convolved(key: str, x: Tensor, stride: int) -> Tensor:
        weight = state[f"{key}.weight"]
        return F.conv2d(x, weight, stride=stride, padding=weight.shape[-1] // 2)

    x = normalized("bn1", convolved("conv1", x, 2 if large else 1)).clamp(min=0)
    x = F.max_pool2d(x, 3, 2, 1) if large else x
    blocks = sorted({tuple(key.split(".")[:2]) for key in state if key.startswith("layer")})
    for layer, index in blocks:
        block = f"{layer}.{index}"
        stride = 2 if layer != "layer1" and index == "0" else 1
        convolutions = sorted({key.split(".")[2] for key in state if key.startswith(f"{block}.conv")})
        strided = "conv2" if len(convolutions) == 3 else "conv1"
        y = x
        for convolution in convolutions:
            y = convolved(f"{block}.{convolution}", y, stride if convolution == strided else 1)
            y = normalized(f"{block}.bn{convolution[-1]}", y)
            y = y.clamp(min=0) if convolution != convolutions[-1] else y
        if f"{block}.downsample.0.weight" in state:
            x = normalized(f"{block}.downsample.1", convolved(f"{block}.downsample.0", x, stride))
        x = (x + y).clamp(min=0)
    return x.mean(dim=(2, 3)) @ state["fc.weight"].T + state["fc.bias"]


def randomize(model: nn.Module) -> None:
    """Figures that leave no weight or statistic without effect."""
    generator = torch.Generator().manual_seed(3)
    for key, value in model.state_dict().items():
        if value.is_floating_point():
            noise = torch.rand(value.shape, generator=generator, dtype=value.dtype)
            value.copy_(noise + 0.5 if key.endswith(("running_var", "bn1.weight")) else (noise - 0.5) / 2)


@pytest.mark.parametrize(("name", "size"), [("resnet14", 9), ("resnet18", 40), ("resnet50", 40)])
def test_forward_equals_one_written_apart(name: str, size: int) -> None:
    model = build_model(name, 5, 2, width=4).double().eval()
    randomize(model)
    images = torch.rand(3, 2, size, size, dtype=torch.float64)
    state = {key: value.detach() for key, value in model.state_dict().items()}
    expected = forward_written_apart(state, images, large=size == 40)
    torch.testing.assert_close(model(images), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ["resnet8", "resnet50"])
def test_a_block_starts_as_its_shortcut(name: str) -> None:
    model = build_model(name, 4, 3, width=4).double()
    block = model.get_submodule("layer2.0")
    x = torch.randn(3, block.conv1.in_channels, 6, 6, dtype=torch.float64)  # type: ignore[union-attr, arg-type]
    torch.testing.assert_close(block(x), block.downsample(x).clamp(min=0))  # type: ignore[operator]


def test_weights_start_with_the_spread_that_they_should() -> None:
    """Convolutions: the variance of gradients is kept, 2 over what a pixel feeds. The last layer: 0.01."""
    model = build_model("resnet20", 10, 3, width=64)
    spreads = [model.get_parameter(f"{key}.weight").std().item() for key in ("layer3.0.conv1", "fc")]
    assert spreads == pytest.approx([(2 / (9 * 256)) ** 0.5, 0.01], rel=0.05)
    assert not model.get_parameter("fc.bias").any()


def test_normalization_is_the_first_layer() -> None:
    torch.manual_seed(0)
    plain = build_model("resnet8", 10, 3).eval()
    torch.manual_seed(0)
    normalizing = build_model("resnet8", 10, 3, mean=[0.4, 0.5, 0.6], std=[0.2, 0.3, 0.4]).eval()
    images = torch.rand(2, 3, 8, 8)
    mean, std = (torch.tensor(figures).view(3, 1, 1) for figures in ([0.4, 0.5, 0.6], [0.2, 0.3, 0.4]))
    torch.testing.assert_close(normalizing(images), plain((images - mean) / std))
    assert not torch.allclose(normalizing(images), plain(images))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "resnet200"}, "unknown model 'resnet200', did you mean 'resnet20'"),
        ({"name": "my.models:cnn"}, "cannot import 'my.models'"),
    ],
)
def test_bad_arguments_are_named_in_one_line(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        build_model(**{"name": "resnet8", "classes": 10, "in_channels": 3, **arguments})  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


@pytest.fixture
def own_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of the user's in the current folder, which is not on the path."""
    source = """
from torch import nn

def cnn(classes, in_channels, width=4):
    return nn.Sequential(nn.Conv2d(in_channels, width, 3), nn.Flatten(), nn.LazyLinear(classes))

class Small(nn.Sequential):
    def __init__(self, *, in_channels, classes):
        super().__init__(nn.Flatten(), nn.Linear(in_channels, classes))

class Zoo:
    small = Small

def no_arguments():
    return nn.Identity()

def nothing(classes, in_channels):
    return None

def raises(classes, in_channels):
    raise TypeError("mine")

number = 3
"""
    (tmp_path / "own_models.py").write_text(source)
    (tmp_path / "own_broken.py").write_text("def (:\n")
    (tmp_path / "own_raising.py").write_text("raise RuntimeError('first line\\nsecond line')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry != ""])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    for name in ("own_models", "own_broken", "own_raising"):
        monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.mark.usefixtures("own_models")
def test_an_own_model_is_called_with_classes_and_channels() -> None:
    model = build_from_callable("own_models:cnn", 7, 2)
    assert model(torch.zeros(1, 2, 5, 5)).shape == (1, 7)
    small = build_from_callable("own_models:Zoo.small", classes=7, in_channels=2)
    assert small(torch.zeros(1, 2, 1, 1)).shape == (1, 7)
    assert load_callable("own_models:Small") is type(small)


@pytest.mark.usefixtures("own_models")
def test_the_current_folder_hides_nothing_that_is_installed() -> None:
    Path("json.py").write_text("dumps = 3\n")
    import json

    assert load_callable("json:dumps") is json.dumps
    assert sys.path.count(str(Path.cwd())) == 1
    assert sys.path[-1] == str(Path.cwd())


@pytest.mark.usefixtures("own_models")
@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("own_models:", "write package.module:callable"),
        ("no_such_package.models:cnn", "cannot import 'no_such_package.models'.*No module named"),
        ("own_broken:cnn", "cannot import 'own_broken'.*SyntaxError"),
        ("own_raising:cnn", "cannot import 'own_raising'.*RuntimeError: first line$"),
        (".relative:cnn", "cannot import '.relative'"),
        ("own_models:Zoo.large", "has no 'Zoo.large'"),
        ("own_models:number", "is of type int: name a function"),
        ("own_models:no_arguments", r"must accept \(classes=..., in_channels=...\)"),
        ("own_models:nothing", "returned a value of type NoneType"),
    ],
)
def test_a_reference_that_makes_no_model_is_named_in_one_line(reference: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        build_from_callable(reference, 10, 3)
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("own_models")
def test_an_error_inside_a_callable_is_the_users_to_see() -> None:
    with pytest.raises(TypeError, match="mine"):
        build_from_callable("own_models:raises", 10, 3)


class Restless(nn.Module):
    """Everything that a forward pass may leave behind: a count, statistics, and drawn random numbers."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.bn = nn.BatchNorm2d(3)
        self.dropout = nn.Dropout(0.5)
        self.fc = nn.Linear(3, outputs)
        self.register_buffer("passes", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(self.passes, Tensor)
        assert not self.training
        self.passes += 1
        x = F.batch_norm(x, self.bn.running_mean, self.bn.running_var, training=True)
        y: Tensor = self.fc(self.dropout(x).mean(dim=(2, 3)))
        return y + torch.rand(1)


@pytest.mark.parametrize("outputs", [10, 9])
def test_checking_the_output_leaves_no_trace(outputs: int) -> None:
    model = Restless(outputs)
    model.bn.eval()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    randomness = torch.get_rng_state()
    if outputs == 10:
        check_output(model, (3, 8, 8), 10)
    else:
        with pytest.raises(ValueError, match=r"\(2, 9\), but 10 classes need \(2, 10\)"):
            check_output(model, (3, 8, 8), 10)
    assert [module.training for module in model.modules()] == [True, False, True, True]
    assert torch.equal(torch.get_rng_state(), randomness)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())


class Two(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Two(), "into a value of type tuple"),
        (nn.Linear(7, 10), r"fails on images of shape \(3, 8, 8\): RuntimeError"),
        (nn.Identity(), r"into \(2, 3, 8, 8\), but 10 classes"),
        (nn.Sequential(nn.Flatten(0), nn.Linear(384, 10)), r"into \(10,\)"),
    ],
)
def test_a_model_that_does_not_fit_the_data_is_named_in_one_line(model: nn.Module, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        check_output(model, (3, 8, 8), 10)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("width", "layout"), [(4, torch.contiguous_format), (16, torch.channels_last)])
def test_narrow_strided_convolutions_are_kept_from_the_layout_that_breaks_them(width, layout):
    model = fastest_memory(build_model("resnet8", classes=10, in_channels=3, width=width), torch.device("cpu"))
    weights = [parameter for parameter in model.parameters() if parameter.dim() == 4 and parameter.shape[2] > 1]
    assert all(weight.is_contiguous(memory_format=layout) for weight in weights)
    strided = [module for module in model.modules() if isinstance(module, nn.Conv2d) and module.kernel_size == (1, 1)]
    outputs = []
    for convolution in strided:
        convolution.register_forward_hook(lambda _, __, output: outputs.append(output))
    model(torch.rand(2, 8, 8, 3).permute(0, 3, 1, 2))  # as data sets keep images
    assert len(outputs) == len(strided) > 0
    assert all(output.is_contiguous(memory_format=layout) for output in outputs)
