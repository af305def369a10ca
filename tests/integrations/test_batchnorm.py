"""BatchNorm of real models: timm's and torchvision's train by a method as they would by themselves."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conadv import PGD, ConAdv, plain_state_dict, split_batchnorm

timm = pytest.importorskip("timm", reason="timm is not installed: its models are not tested")
torchvision = pytest.importorskip("torchvision", reason="torchvision is not installed: its models are not tested")


CLASSES = 5
# The smallest model with BatchNorm of every family (module) of timm that has one.
FAMILIES = [
    "halonet_h1", "test_byobnet", "convmixer_768_32", "cpubone_nano", "cs3darknet_focus_s", "densenet121", "dla46x_c",
    "dpn48b", "efficientformer_l1", "efficientformerv2_s0", "test_efficientnet", "efficientvim_m1", "efficientvit_b0",
    "efficientvit_m0", "fasternet_t0", "fastvit_t8", "ghostnet_050", "hardcorenas_b", "hgnetv2_b0", "hrnet_w18_small",
    "iformer_t", "inception_next_atto", "inception_resnet_v2", "inception_v3", "inception_v4", "lcnetv2_small",
    "levit_192", "lowformer_b0", "coatnet_nano_cc_224", "mobilenetv3_small_050", "mobilevit_xxs", "nasnetalarge",
    "nextvit_small", "pnasnet5large", "regnety_002", "repghostnet_050", "repvit_m1", "res2next50", "resnest14d",
    "test_resnet", "resnetv2_18", "rexnet_100", "selecsls42", "legacy_seresnet18", "shvit_s1", "skresnet18",
    "starnet_s050", "swiftformer_xs", "tiny_vit_5m_224", "tresnet_m_448", "vgg11_bn", "visformer_tiny", "volo_d1_224",
    "ese_vovnet19b_slim_dw", "xception", "xception41p", "xcit_nano_12_p8_384",
]  # fmt: skip


def without_dropout(model: nn.Module) -> nn.Module:
    """Two passes of a step would drop other values; the gradients are to be compared exactly."""
    for module in model.modules():
        for name in ("p", "drop_prob", "drop_rate", "drop_path_rate"):
            if isinstance(vars(module).get(name), float):
                setattr(module, name, 0.0)
    return model


def batch_for(model: nn.Module, size: int, count: int = 2) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    images = torch.rand(count, 3, size, size, generator=generator, dtype=torch.float64)
    return images, torch.randint(CLASSES, (count,), generator=generator)


def assert_trains_as_by_itself(model: nn.Module, batch: tuple[Tensor, Tensor]) -> nn.Module:
    """Epsilon 0 without a random start: twins are the images, so the step follows the gradient of the plain loss.

    Returns the model, which was split, after one step.
    """
    start = copy.deepcopy(model.train().state_dict())
    F.cross_entropy(model(batch[0]), batch[1]).backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    moved = copy.deepcopy(model.state_dict())
    model.load_state_dict(start)
    model.zero_grad()

    split_batchnorm(model)
    branched = {name.replace(".adv.", ".") for name, _ in model.named_parameters() if ".adv." in name}
    method = ConAdv(model, F.cross_entropy, PGD(0.0, random_start=0), delay=0)
    method(batch, batch)
    for name, gradient in gradients.items():
        halves = [name, ".adv.".join(name.rsplit(".", 1))] if name in branched else [name]
        got = sum(model.get_parameter(half).grad for half in halves)
        scale = max(1.0, float(gradient.abs().max()))
        torch.testing.assert_close(got, gradient, rtol=0, atol=1e-10 * scale, msg=lambda text, name=name: name + text)
    for key, value in plain_state_dict(model).items():
        torch.testing.assert_close(value, moved[key], rtol=1e-10, atol=1e-10)
    return model


def smallest_size(name: str) -> tuple[nn.Module, int]:
    """A model for images as small as it takes them, in float64."""
    for options, size in (({"img_size": 64}, 64), ({}, 32), ({}, 64), ({}, 128), ({}, None)):
        try:
            torch.manual_seed(0)
            model = timm.create_model(name, pretrained=False, num_classes=CLASSES, **options).double()
            size = size or model.default_cfg["input_size"][-1]
            with torch.no_grad():
                model.eval()(torch.zeros(1, 3, size, size, dtype=torch.float64))
            return without_dropout(model), size
        except (TypeError, RuntimeError, AssertionError, ValueError):
            continue
    raise AssertionError(f"{name} takes no size")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_of_timm_trains_as_by_itself(name: str) -> None:
    model, size = smallest_size(name)
    plain = copy.deepcopy(model).to("meta")
    assert_trains_as_by_itself(model, batch_for(model, size))
    plain.load_state_dict({key: value.to("meta") for key, value in plain_state_dict(model).items()}, strict=True)


@pytest.mark.parametrize(
    ("library", "name", "size"),
    [
        ("timm", "test_resnet", 32),
        ("timm", "test_efficientnet", 32),
        ("timm", "test_byobnet", 32),
        ("torchvision", "mobilenet_v3_small", 64),
        ("torchvision", "mnasnet0_5", 64),  # a state without its metadata would not load in it
        ("torchvision", "shufflenet_v2_x0_5", 64),
    ],
)
def test_small_models_train_as_by_themselves(library: str, name: str, size: int) -> None:
    make = timm.create_model if library == "timm" else torchvision.models.get_model
    model = without_dropout(make(name, num_classes=CLASSES).double())
    plain = copy.deepcopy(model)
    assert_trains_as_by_itself(model, batch_for(model, size))
    plain.load_state_dict(plain_state_dict(model), strict=True)


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("name", ["test_resnet", "test_efficientnet", "densenet"])
def test_checkpointing_changes_nothing(name: str, delay: int) -> None:
    states = []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        if name == "densenet":  # it computes parts of its layers again, BatchNorm among them
            model = timm.models.densenet.DenseNet(4, (2, 3), num_classes=CLASSES, memory_efficient=checkpointing)
        else:
            model = timm.create_model(name, num_classes=CLASSES)
            model.set_grad_checkpointing(checkpointing)
        model = split_batchnorm(model.double().train())
        method = ConAdv(model, F.cross_entropy, PGD(8 / 255), delay=delay, chunk_size=3, seed=1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        images, labels = batch_for(model, 32, count=6)
        for now, ahead in method.feed([(images, labels), (images.flip(0), labels), (images.flip(3), labels)]):
            optimizer.zero_grad()
            method(now, ahead)
            optimizer.step()
        states.append(model.state_dict())
    torch.testing.assert_close(states[1], states[0], rtol=0, atol=0)
