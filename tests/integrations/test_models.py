"""`--model timm:NAME` and `torchvision:NAME`: the library's own model, with new weights, and one line for mistakes."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from conadv import cli
from conadv.task.models import build_model
from support import tiny

MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.3, 0.25)


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket.socket, "connect", refuse)


def make(library: Any, reference: str, classes: int) -> torch.nn.Module:
    """The model as its library documents it."""
    name = reference.partition(":")[2]
    if reference.startswith("timm"):
        return library.create_model(name, num_classes=classes)
    return library.models.get_model(name, weights=None, num_classes=classes)


@pytest.mark.parametrize("reference", ["timm:resnet10t", "timm:vit_tiny_patch16_224", "torchvision:squeezenet1_1"])
@pytest.mark.filterwarnings("ignore")
def test_the_model_is_that_of_its_library(reference: str) -> None:
    library = pytest.importorskip(reference.partition(":")[0])
    torch.manual_seed(0)
    own = build_model(reference, 7, 3, mean=MEAN, std=STD).eval()
    torch.manual_seed(1)
    other = make(library, reference, 7)
    other.load_state_dict(own.state_dict())  # strictly: the normalization has no keys
    images = torch.rand(2, 3, 224, 224)
    normalized = (images - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)
    with torch.no_grad():
        torch.testing.assert_close(own(images), other.eval()(normalized))
    assert torch.is_tensor(own.train()(images))


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_our_large_resnets_have_the_keys_and_shapes_of_torchvision(name: str) -> None:
    torchvision = pytest.importorskip("torchvision")
    with torch.device("meta"):
        own, other = build_model(name, 7, 3, mean=MEAN, std=STD), torchvision.models.get_model(name, num_classes=7)
    shapes = [{key: value.shape for key, value in model.state_dict().items()} for model in (own, other)]
    assert shapes[0] == shapes[1]


@pytest.mark.filterwarnings("ignore")
def test_a_run_trains_it_and_its_export_loads_in_it(tmp_path: Path) -> None:
    timm = pytest.importorskip("timm")
    run, exported = tmp_path / "run", tmp_path / "model.safetensors"
    words = tiny.words(model="timm:resnet10t", precision="float32", max_steps=2, data__image_size=32)
    assert cli.main(["train", *words, "--run-dir", str(run), "--quiet"]) == 0
    assert cli.main(["export", str(run), str(exported)]) == 0
    model = timm.create_model("resnet10t", num_classes=10, in_chans=1)
    model.load_state_dict(safetensors.torch.load_file(exported))


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("timm:resnt50", "timm has no classification model 'resnt50': the nearest are "),
        ("timm:hf-hub:timm/resnet50", "timm has no classification model 'hf-hub:timm/resnet50'"),
        ("torchvision:fasterrcnn_resnet50_fpn", "torchvision has no classification model"),
        (
            "torchvision:resnet18",
            "torchvision:resnet18 needs images with 3 channels, not 1: choose a timm model",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_mistakes_are_one_line(reference: str, message: str) -> None:
    pytest.importorskip(reference.partition(":")[0])
    with pytest.raises(ValueError, match=r"^[^\n]*$") as caught:
        build_model(reference, 7, 1)
    assert message in str(caught.value)
