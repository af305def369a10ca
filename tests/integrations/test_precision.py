"""Half precision: near the steps of the plain loop in float64, and attacks run in it too."""

from __future__ import annotations

import pytest
import torch

from conadv import PGD, plain_state_dict
from support.frameworks import NAMES, expected, make, prepared, sgd
from support.settings import small_batches

each = pytest.mark.parametrize("name", NAMES)


@each
def test_float16_autocast_with_a_scaler(name: str) -> None:
    model = prepared(name).float()
    optimizer, method = sgd(model), make(name, model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    for images, labels in small_batches(3):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = method.loss((images.float(), labels))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    reference = expected(name, [[(0, batch)] for batch in small_batches(3)])
    torch.testing.assert_close(plain_state_dict(model.double()), reference.state_dict(), rtol=0, atol=0.005)


@each
@pytest.mark.parametrize("precision", ["bf16-mixed", "64-true"])
@pytest.mark.filterwarnings("ignore")
def test_fabric_attacks_in_its_own_precision(name: str, precision: str) -> None:
    """Every forward pass, also those of attacks, which call the model inside Fabric's wrapper."""
    fabric = pytest.importorskip("lightning.fabric", reason="lightning is not installed: make integrations")
    own = fabric.Fabric(accelerator="cpu", devices=1, precision=precision)
    model, seen = prepared(name).float(), set()
    model[0].register_forward_hook(lambda layer, inputs, outputs: seen.add(outputs.dtype))
    model, optimizer = own.setup(model, sgd(model))
    method = make(name, model, PGD(8 / 255))
    for images, labels in small_batches(2):
        optimizer.zero_grad()
        own.backward(method.loss((images if "64" in precision else images.float(), labels)))
        optimizer.step()
    assert seen == {torch.float64 if "64" in precision else torch.bfloat16}
