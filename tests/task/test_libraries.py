"""Models of other libraries, for which small stand-ins are here, and weights to start from: theirs, or in a file."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import safetensors.torch
import torch
from torch import nn

from conadv import cli
from conadv.config import load_recipe
from conadv.task.libraries import build_pretrained
from conadv.task.models import build_model
from conadv.trainer.build import build_task, network_facts
from support import tiny

SMALL = partial(build_model, "resnet8", in_channels=3, width=4)


def saved(path: Path, model: nn.Module, **changes: torch.Tensor) -> str:
    safetensors.torch.save_file({**model.state_dict(), **changes}, path)
    return str(path)


def test_a_file_gives_all_weights_and_says_so(tmp_path: Path) -> None:
    trained = SMALL(classes=5)
    model, line = build_pretrained(partial(SMALL, classes=5), saved(tmp_path / "a.safetensors", trained), 5)
    assert tiny.equal(model.state_dict(), trained.state_dict())
    assert line == f"pretrained: {tmp_path / 'a.safetensors'}"


def test_for_other_classes_the_last_layer_is_new(tmp_path: Path) -> None:
    trained, path = SMALL(classes=5).double(), tmp_path / "a.safetensors"
    torch.manual_seed(7)
    new = SMALL(classes=3).state_dict()
    torch.manual_seed(7)
    model, line = build_pretrained(partial(SMALL, classes=3), saved(path, trained), 3)
    expected = {**trained.float().state_dict(), "fc.weight": new["fc.weight"], "fc.bias": new["fc.bias"]}
    assert tiny.equal(model.state_dict(), expected)
    assert line == f"pretrained: {path}, except fc.bias, fc.weight: new, for 3 classes"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"width": 8}, r"size mismatch for conv1\.weight: .*; choose the model and the width"),
        ({"name": "resnet14"}, r"Missing key\(s\) in state_dict: \"layer1\.1\.conv1\.weight\", .*; choose the model"),
        ({}, r"a\.safetensors are of another model: .* Unexpected key\(s\) in state_dict: \"extra\""),
    ],
)
def test_weights_of_another_model_are_refused_in_one_line(tmp_path: Path, change: dict, message: str) -> None:
    extra = {} if change else {"extra": torch.zeros(1)}
    path = saved(tmp_path / "a.safetensors", SMALL(classes=5), **extra)
    options = {"name": "resnet8", "in_channels": 3, "width": 4, "classes": 5, **change}
    with pytest.raises(ValueError, match=r"^[^\n]*$") as caught:
        build_pretrained(partial(build_model, **options), path, 5)
    caught.match(message)


@pytest.mark.parametrize("content", [None, b"", b"no weights", bytes(100)])
def test_what_is_no_safetensors_file_is_named(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "a.safetensors"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"^pretrained {path}: not a safetensors file that can be read \([^\n]*\)$"):
        build_pretrained(partial(SMALL, classes=5), str(path), 5)


class Net(nn.Module):
    """A model of a library: `stem` and `head`."""

    def __init__(self, classes: int, value: float, channels: int = 3) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(channels, 2, 1), nn.Linear(2, classes)
        for parameter in self.parameters():
            nn.init.constant_(parameter, value)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.stem(images).mean(dim=(2, 3)))


TRAINED, NEW = 3.0, 1.0


def fake_timm() -> SimpleNamespace:
    """timm adapts the head and the channels itself."""

    def create_model(name: str, pretrained: bool, num_classes: int, in_chans: int) -> nn.Module:
        if pretrained and name == "untrained":
            raise RuntimeError("No pretrained weights exist for untrained.\nMore.")
        return Net(num_classes, TRAINED if pretrained else NEW, in_chans)

    return SimpleNamespace(
        is_model=["net", "untrained"].__contains__,
        list_models=lambda: ["net"],
        create_model=create_model,
        get_pretrained_cfg=lambda name: SimpleNamespace(mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25)),
    )


def fake_torchvision() -> SimpleNamespace:
    """torchvision refuses another number of classes together with weights."""

    def get_model(name: str, weights: str | None, num_classes: int | None = None) -> nn.Module:
        if weights and (name == "untrained" or num_classes is not None):
            raise ValueError("no such weights")
        return Net(num_classes or 1000, TRAINED if weights else NEW)

    names = ["net", "untrained", "googlenet"]
    return SimpleNamespace(models=SimpleNamespace(list_models=lambda module: names, get_model=get_model))


@pytest.fixture(autouse=True)
def libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", fake_timm())
    monkeypatch.setitem(sys.modules, "torchvision", fake_torchvision())


@pytest.mark.parametrize("name", ["timm:net", "torchvision:net"])
@pytest.mark.parametrize("classes", [7, 1000])
def test_the_weights_of_a_library(name: str, classes: int) -> None:
    build = partial(build_model, name, classes, 3)
    model, line = build_pretrained(build, True, classes)
    assert line.startswith("pretrained: the weights of its library")
    assert model.stem.weight.mean().item() == TRAINED
    assert build().stem.weight.mean().item() == NEW
    assert len(model.head.bias) == classes
    if name.startswith("torchvision"):
        assert model.head.bias[0].item() == (TRAINED if classes == 1000 else NEW)


@pytest.mark.parametrize(("pretrained", "mean", "std"), [(True, 0.5, 0.25), (False, 0.485, 0.229)])
def test_the_weights_of_timm_get_images_normalized_as_in_their_training(
    pretrained: bool, mean: float, std: float
) -> None:
    data = {"data__name": "synthetic", "data__image_size": 8, "precision": "float32", "method": "vanilla"}
    recipe = tiny.recipe(model="timm:net", pretrained=pretrained, **data)
    trained, evaluated = (build_task(recipe, torch.device("cpu"), trains) for trains in (True, False))
    facts = network_facts(evaluated)
    assert (facts["mean"][0], facts["std"][0]) == (mean, std)
    for task in (trained, evaluated):
        normalize = task.model.get_submodule("normalize_pixels")
        assert (normalize.mean[0].item(), normalize.std[0].item()) == pytest.approx((mean, std))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("timm:untrained", "timm:untrained cannot be built with its weights for 3 channels: .*No pretrained weights"),
        ("torchvision:untrained", "torchvision has no weights for untrained here: ValueError: no such weights"),
        ("torchvision:googlenet", "torchvision has no classification model 'googlenet'"),
        ("resnet8", "there are no pretrained weights for 'resnet8': choose timm:NAME or torchvision:NAME, or give"),
        ("support.tiny:pooled", "there are no pretrained weights for 'support.tiny:pooled'"),
    ],
)
def test_without_weights_of_a_library_it_is_one_line(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=r"^[^\n]*$") as caught:
        build_pretrained(partial(build_model, name, 7, 3), True, 7)
    caught.match(message)


@pytest.mark.parametrize("library", ["timm", "torchvision"])
def test_a_library_that_is_not_installed(
    library: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    message = f"{library} is not installed: pip install {library}"
    with pytest.raises(ValueError, match=f"^{message}$"):
        build_model(f"{library}:resnet18", 7, 3)
    assert cli.main(["train", "digits", "--model", f"{library}:resnet18", "--run-dir", str(tmp_path / "run")]) == 2
    assert capsys.readouterr().err.strip().endswith(message)
    assert not (tmp_path / "run").exists()


def test_a_file_may_name_a_library_but_no_code_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text('model = "timm:resnet18"\n')
    assert load_recipe(str(path)).model == "timm:resnet18"
    for field, flag in (('model = "{}"', "--model"), ('data.path = "{}"', "--data.path")):
        path.write_text(field.format("package.module:callable"))
        with pytest.raises(ValueError, match=f"names code to import, which a file may not: .* pass {flag} "):
            load_recipe(str(path))
    path.write_text('data.path = "hf:mnist"')
    assert load_recipe(str(path), {"model": "resnet8"}).data.path == "hf:mnist"
