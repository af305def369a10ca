"""Split BatchNorm under torch.compile: the same numbers through every branch, and a bounded number of graphs."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from conadv import PGD, route, split_batchnorm
from conadv.core.splitbn import update_running_stats
from support.settings import Setting, every_method, small_batches, small_cnn, train

# The compiler looks for `.grad` on whatever it is given; it hides the warning, unless warnings are errors.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_every_branch_gives_the_same_numbers(backend: str) -> None:
    model = split_batchnorm(small_cnn())
    compiled = torch.compile(copy.deepcopy(model), backend=backend, fullgraph=True)
    for images, labels in small_batches(3):
        for branch in ("main", "adv"):
            for one in (model, compiled):
                with route(one, branch, tracking="step"):
                    F.cross_entropy(one(images), labels).backward()
        for one in (model, compiled):
            update_running_stats(one)
    gradients, others = ([own.grad for own in one.parameters()] for one in (model, compiled))
    torch.testing.assert_close(others, gradients, rtol=0, atol=1e-12)
    torch.testing.assert_close(compiled._orig_mod.state_dict(), model.state_dict(), rtol=0, atol=1e-12)
    images = small_batches(1, seed=4)[0][0]
    for branch in ("main", "adv"):
        with route(model.eval(), branch), route(compiled.eval(), branch):
            torch.testing.assert_close(compiled(images), model(images), rtol=0, atol=1e-12)


@every_method
def test_a_method_takes_the_same_steps_with_few_graphs(setting: Setting) -> None:
    model = split_batchnorm(small_cnn())
    compiled: nn.Module = torch.compile(copy.deepcopy(model), backend="eager")  # type: ignore[assignment]
    attack = PGD(8 / 255, 3 / 255, random_start=0.5)
    before = graphs()
    for one in (model, compiled):
        method = setting.make(one, attack, chunk_size=4, seed=1)
        train(method, one, small_batches(2))
        settled = graphs()
        train(method, one, small_batches(4, seed=2))
    torch.testing.assert_close(compiled._orig_mod.state_dict(), model.state_dict(), rtol=0, atol=1e-12)
    assert graphs() == settled, "no graph is made after the first two steps"
    assert 0 < graphs() - before <= 4
