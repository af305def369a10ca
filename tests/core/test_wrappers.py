"""What people put around a model: its plain state and its layers are found inside, nested in any order.

Fabric's wrapper is tested where Fabric is, in tests/integrations.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from conadv import PGD, plain_state_dict, route, split_batchnorm
from support.settings import SETTINGS, Setting, small_batches, small_cnn, train

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "compile": lambda model: torch.compile(model, backend="eager"),  # type: ignore[return-value]
    "ddp": DistributedDataParallel,
    "dp": DataParallel,
    "averaged": AveragedModel,
}
NESTED = [*itertools.permutations(WRAPPERS, 1), *itertools.permutations(WRAPPERS, 2), tuple(WRAPPERS)]
nested = pytest.mark.parametrize("names", NESTED, ids="-".join)


@pytest.fixture(autouse=True)
def process_group_of_one(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    dist.destroy_process_group()


def wrapped(names: tuple[str, ...], model: nn.Module) -> nn.Module:
    for name in names:
        model = WRAPPERS[name](model)
    return model


@nested
def test_the_plain_state_loads_strictly_in_the_plain_model(names: tuple[str, ...]) -> None:
    model = wrapped(names, split_batchnorm(small_cnn(seed=1)))
    plain = small_cnn(seed=2)
    plain.load_state_dict(plain_state_dict(model), strict=True)
    torch.testing.assert_close(plain.state_dict(), small_cnn(seed=1).state_dict(), rtol=0, atol=0)


@nested
def test_images_are_routed_and_attacked_inside(names: tuple[str, ...]) -> None:
    model = split_batchnorm(small_cnn())
    with torch.no_grad():
        model[4].adv.weight.mul_(2)
    outer = wrapped(names, copy.deepcopy(model))
    images, labels = small_batches(1)[0]
    attack = PGD(8 / 255, random_start=0)
    assert torch.equal(attack(outer, F.cross_entropy, images, labels), attack(model, F.cross_entropy, images, labels))
    for branch in ("main", "adv"):
        with route(model, branch), route(outer, branch):
            torch.testing.assert_close(outer(images), model(images), rtol=0, atol=1e-12)


@pytest.mark.parametrize("names", [("ddp", "compile"), ("compile", "ddp")], ids="-".join)
@pytest.mark.parametrize("setting", SETTINGS[1:], ids=lambda setting: setting.name)
def test_a_method_takes_the_same_steps(setting: Setting, names: tuple[str, ...]) -> None:
    models = [split_batchnorm(small_cnn()) for _ in range(2)]
    for model, outer in ((models[0], models[0]), (models[1], wrapped(names, models[1]))):
        method = setting.make(outer, PGD(8 / 255, 3 / 255, random_start=0.5), chunk_size=4, seed=3)
        train(method, model, small_batches(4))
    torch.testing.assert_close(models[1].state_dict(), models[0].state_dict(), rtol=0, atol=1e-12)


class Versioned(nn.Module):
    """As torchvision's MNASNet: a checkpoint without its metadata is not loaded."""

    _version = 2

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.net = small_cnn(seed)

    def _load_from_state_dict(self, state, prefix, local_metadata, *rest) -> None:  # type: ignore[no-untyped-def]
        assert local_metadata.get("version") == 2
        super()._load_from_state_dict(state, prefix, local_metadata, *rest)


def test_the_plain_state_keeps_the_metadata(tmp_path: Path) -> None:
    split, plain = split_batchnorm(Versioned(1)), Versioned(2)
    torch.save(plain_state_dict(split), tmp_path / "model.pt")
    state = torch.load(tmp_path / "model.pt")
    plain.load_state_dict(state, strict=True)
    assert state._metadata == plain.state_dict()._metadata  # type: ignore[attr-defined]
    split.load_state_dict(plain.state_dict(), strict=True)


def test_sharded_parameters_are_gathered() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, plain = split_batchnorm(small_cnn(seed=1)), small_cnn(seed=1)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    assert type(model[0].weight).__name__ == "DTensor"
    state = plain_state_dict(model)
    assert {type(value) for value in state.values()} == {Tensor}
    torch.testing.assert_close(state, plain.state_dict(), rtol=0, atol=0)
    with pytest.raises(ValueError, match="FSDP would not exchange the new branches: split the model, then wrap it"):
        split_batchnorm(fully_shard(small_cnn(), mesh=init_device_mesh("cpu", (1,))))
