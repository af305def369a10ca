"""A method that is created and never called is heard, once; what people rightly do is not, and nothing is left."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import optimizer as hooks
from torch.optim.optimizer import register_optimizer_step_pre_hook

import loops
from conadv import PGD, ConAdv, Place, Vanilla, split_batchnorm
from ranks import Pool
from settings import Setting, every_method, small_batches, small_cnn

UNCALLED = "16 updates of the model went by without a call of its method"


def prepared() -> nn.Module:
    return split_batchnorm(small_cnn())


def conadv(model: nn.Module) -> ConAdv:
    return ConAdv(model, F.cross_entropy, PGD(8 / 255))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01)


def update(model: Callable[[Tensor], Tensor], optimizer: torch.optim.Optimizer, steps: int = 17) -> None:
    """What a loop did before it had a method."""
    images, labels = small_batches(1)[0]
    for _ in range(steps):
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()


def count_hooks(optimizer: torch.optim.Optimizer | None = None) -> int:
    own = 0 if optimizer is None else len(optimizer._optimizer_step_pre_hooks)
    return own + len(hooks._global_optimizer_pre_hooks) + len(hooks._global_optimizer_post_hooks)


@pytest.fixture(autouse=True)
def _nothing_is_left() -> None:
    """Of other tests: the hook of methods that are gone is removed by the next update."""
    gc.collect()
    sgd(nn.Linear(1, 1)).step()
    assert count_hooks() == 0


@every_method
def test_a_method_that_is_never_called_is_heard_once(setting: Setting) -> None:
    method = setting.make(model := prepared())
    optimizer = sgd(model)
    update(model, optimizer, 16)
    with pytest.warns(UserWarning, match=UNCALLED) as heard:
        update(model, optimizer, 1)
    assert [warning.filename for warning in heard] == [__file__]
    assert count_hooks(optimizer) == 0
    update(model, optimizer, 20)
    assert method.step == 0


def test_two_methods_of_one_model_are_heard_once() -> None:
    model = prepared()
    methods = [Vanilla(model, F.cross_entropy), conadv(model)]
    with pytest.warns(UserWarning, match=UNCALLED) as heard:
        update(model, sgd(model), 40)
    assert len(heard) == len(methods) - 1


def test_two_models_are_heard_of_one_by_one() -> None:
    models = [prepared(), prepared()]
    methods = [conadv(model) for model in models]
    for model, _ in zip(models, methods, strict=True):
        with pytest.warns(UserWarning, match=UNCALLED) as heard:
            update(model, sgd(model))
        assert len(heard) == 1
    assert count_hooks() == 0


def test_one_parameter_is_enough() -> None:
    method = conadv(model := prepared())
    with pytest.warns(UserWarning, match=UNCALLED):
        update(model, torch.optim.Adam(model[7].parameters()))
    assert method.step == 0


def test_a_warning_as_an_error_leaves_no_hook_either() -> None:
    method = conadv(model := prepared())
    optimizer = sgd(model)
    update(model, optimizer, 16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match=UNCALLED):
            update(model, optimizer, 1)
    assert count_hooks(optimizer) == 0
    assert method.step == 0


def test_other_hooks_of_optimizers_stay() -> None:
    """PyTorch raises an error if a hook is removed while it iterates over them."""
    model = prepared()
    heard: list[str] = []
    before = register_optimizer_step_pre_hook(lambda *_: heard.append("before"))
    method = conadv(model)
    after = register_optimizer_step_pre_hook(lambda *_: heard.append("after"))
    optimizer = sgd(model)
    own = optimizer.register_step_pre_hook(lambda *_: heard.append("own"))
    try:
        with pytest.warns(UserWarning, match=UNCALLED):
            update(model, optimizer, 20)
        assert heard == ["before", "after", "own"] * 20
        assert count_hooks(optimizer) == 3
    finally:
        for handle in (before, after, own):
            handle.remove()
    assert method.step == 0


# --- what stays quiet --------------------------------------------------------------------------------------------


@every_method
def test_the_first_call_ends_the_watch(setting: Setting) -> None:
    method = setting.make(model := prepared())
    optimizer = sgd(model)
    update(model, optimizer, 10)
    assert count_hooks() == 1
    for now, ahead in method.feed(small_batches(1)):
        method(now, ahead)
    assert count_hooks(optimizer) == 0
    update(model, optimizer, 40)


def test_so_does_a_call_of_another_method_of_the_model() -> None:
    model = prepared()
    later = conadv(model)
    optimizer = sgd(model)
    warm_up = Vanilla(nn.DataParallel(model), F.cross_entropy)
    warm_up(small_batches(1)[0])
    update(model, optimizer, 40)
    created_later = conadv(model)
    for _ in range(3):
        warm_up(small_batches(1)[0])
        update(model, optimizer, 10)
    assert count_hooks() == 0
    assert later.step == created_later.step == 0


def test_an_optimizer_of_another_model_is_none_of_its_business() -> None:
    method = conadv(model := prepared())
    update(other := copy.deepcopy(model), sgd(other), 40)
    assert method.step == 0


def test_a_rank_of_a_layout_is_not_watched() -> None:
    method = Vanilla(model := small_cnn(), F.cross_entropy, place=Place())
    assert count_hooks() == 0
    update(model, sgd(model), 20)
    assert method.step == 0


def test_a_feed_that_was_heard_of_is_not_heard_of_twice() -> None:
    method = conadv(model := prepared())
    optimizer = sgd(model)

    def train() -> None:
        for _ in method.feed(small_batches(20)):
            update(model, optimizer, 1)

    with pytest.warns(UserWarning, match="method.feed") as heard:
        train()
    assert len(heard) == 1


# --- nothing is held, and nothing breaks -------------------------------------------------------------------------


def test_a_method_and_its_model_are_collected() -> None:
    model = prepared()
    method = conadv(model)
    gone = weakref.ref(method._learner), weakref.ref(model)
    optimizer = sgd(model)
    update(model, optimizer, 3)
    del method, model, optimizer
    gc.collect()
    assert [ref() for ref in gone] == [None, None]
    update(other := small_cnn(), optimizer := sgd(other), 1)
    assert count_hooks(optimizer) == 0


def test_copies_and_stored_methods_are_not_watched() -> None:
    method = conadv(prepared())
    copies = [copy.deepcopy(method), pickle.loads(pickle.dumps(method))]
    for other in copies:
        update(model := other._learner.model, sgd(model), 20)
        other(small_batches(1)[0])
    with pytest.warns(UserWarning, match=UNCALLED):
        update(model := method._learner.model, sgd(model), 20)


def test_a_compiled_model_is_heard_of() -> None:
    model = torch.compile(prepared(), backend="eager")
    method = conadv(model)
    with pytest.warns(UserWarning, match=UNCALLED):
        update(model, sgd(model))
    assert method.step == 0


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # of PyTorch itself
def test_a_compiled_update_is_compiled_once_and_stays_quiet() -> None:
    method = conadv(model := prepared())
    optimizer = sgd(model)
    graphs: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    optimizer.step = torch.compile(optimizer.step, backend=backend)  # type: ignore[method-assign]
    update(model, optimizer, 1)
    compiled = len(graphs)
    assert compiled > 0
    update(model, optimizer, 20)
    assert len(graphs) == compiled
    method(small_batches(1)[0])
    assert count_hooks(optimizer) == 0


def heard_on_a_rank(kind: str) -> list[str]:
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    with loops.process_group(), warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        model = prepared()
        if kind == "ddp":
            model = DistributedDataParallel(model)
        method = conadv(model)
        if kind == "fsdp":  # after the method was created: its parameters are others then
            fully_shard(model)
        images, labels = small_batches(1)[0]
        optimizer = sgd(model)
        for _ in range(20):
            optimizer.zero_grad()
            outputs = model(images)
            # FSDP2 needs a loss of all outputs; DDP one of all parameters.
            unused = sum(parameter.sum() * 0 for parameter in model.parameters()) if kind == "ddp" else 0
            (F.cross_entropy(outputs, labels) + unused).backward()
            optimizer.step()
        assert method.step == 0
        assert count_hooks(optimizer) == 0
        return [str(warning.message) for warning in heard]


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_wrapped_and_sharded_models_are_heard_of(kind: str, pool: Pool) -> None:
    for messages in pool.run(2, heard_on_a_rank, kind):
        assert len([message for message in messages if UNCALLED in message]) == 1
