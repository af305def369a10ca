"""Mistakes with a method, and what each is answered with: the second table of docs/integrations.md."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from conadv import PGD, ConAdv, Recycled, Sam, split_batchnorm
from support import loops
from support.frameworks import ATTACK, loader, prepared, quiet_ranks, sgd
from support.ranks import Pool
from support.settings import small_batches, small_cnn

WEIGHTS = torch.arange(1.0, 6, dtype=torch.float64)
# What several mistakes are answered with.
PLAIN = (
    "layer 1 is a plain BatchNorm layer: call conadv.split_batchnorm(model) before making the optimizer and the method"
)
NEVER_UPDATED = "the adv branch is never updated: make the optimizer after split_batchnorm"
NO_MEAN = (
    "the loss of two chunks is not the mean of their losses (class weights, or ignored labels?): pass chunk_size=None"
)
UNUSED = (
    "each pass leaves one branch unused, which find_unused_parameters=True cannot handle: set it to False "
    "(Transformers: ddp_find_unused_parameters=False)"
)
UNSYNCHRONIZED = (
    "the weights of the 2 ranks differ: nothing synchronizes their gradients; wrap the model in "
    "DistributedDataParallel after split_batchnorm, and create the method with the wrapped model"
)


@dataclass(frozen=True)
class Refusal:
    """A mistake, and the error or warning that it gives on each of its ranks."""

    mistake: str
    message: str
    make: Callable[[], Any]
    ranks: int = 1
    warns: bool = False
    library: str = "torch"
    heard: int | None = None
    """The only rank that hears it."""

    def __str__(self) -> str:
        return self.mistake


REFUSALS: list[Refusal] = []


def _mistake(mistake: str, message: str, **more: Any) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Add a row whose mistake a function makes."""

    def add(make: Callable[[], Any]) -> Callable[[], Any]:
        REFUSALS.append(Refusal(mistake, message, make, **more))
        return make

    return add


def _conadv(model: nn.Module | None = None, loss: Any = F.cross_entropy, **options: Any) -> ConAdv:
    return ConAdv(split_batchnorm(small_cnn()) if model is None else model, loss, ATTACK, **options)


def _step(method: Any, batch: Any = None) -> Any:
    return method.loss(small_batches(1)[0] if batch is None else batch).backward()


def _learn(method: Any, optimizer: torch.optim.Optimizer, batches: Any, clear: Any = None) -> None:
    """A loop as people write it, in which something may be wrong."""
    for batch in batches:
        (clear or optimizer).zero_grad()
        _step(method, batch)
        optimizer.step()


def _unequal_batches() -> DataLoader[Any]:
    return DataLoader(loader(2).dataset, batch_size=12)


@_mistake(
    "arguments in another order", "a method takes (model, loss, attack) in this order, not (Sequential, PGD, ...)"
)
def _another_order() -> None:
    ConAdv(split_batchnorm(small_cnn()), ATTACK, F.cross_entropy)


@_mistake("epsilon in place of the attack", "attack 0.5: pass an attack, such as conadv.PGD(4/255)")
def _epsilon_as_attack() -> None:
    ConAdv(split_batchnorm(small_cnn()), F.cross_entropy, 0.5)


@_mistake("the class of a loss", "the loss CrossEntropyLoss is a class: pass one of its objects, CrossEntropyLoss()")
def _class_of_a_loss() -> None:
    _conadv(loss=nn.CrossEntropyLoss)


@_mistake(
    "`loss.backward()` after `loss = method(batch)`, which has run the backward pass",
    "already done by the method: remove this line (or call method.loss(batch).backward())",
)
def _backward_again() -> None:
    _conadv()(small_batches(1)[0]).backward()


@_mistake("a setting changed after the method was made", "'ConAdv' object has no attribute 'chunk_size'")
def _setting_changed() -> None:
    _conadv().chunk_size = 4


@_mistake("BatchNorm that was not split", PLAIN)
def _not_split() -> None:
    _conadv(small_cnn())


@_mistake("an optimizer made before `split_batchnorm`", NEVER_UPDATED)
def _optimizer_first() -> None:
    model = small_cnn()
    optimizer = sgd(model)
    _learn(_conadv(split_batchnorm(model)), optimizer, small_batches(3))


@_mistake("the same, where `model.zero_grad()` clears the gradients", NEVER_UPDATED)
def _optimizer_first_and_all_cleared() -> None:
    model = small_cnn()
    optimizer = sgd(model)
    _learn(_conadv(split_batchnorm(model)), optimizer, small_batches(4), clear=model)


@_mistake(
    "an optimizer with the weights of a copy of the model",
    "the optimizer has the weights of a copy of the method's model, which never learns: make the method and the "
    "optimizer with the same model (a deepcopy has other weights)",
)
def _copy_is_trained() -> None:
    method = _conadv(model := split_batchnorm(small_cnn()))
    _learn(method, sgd(copy.deepcopy(model)), small_batches(3))


@_mistake("a BatchNorm layer put into the model after the method was made", PLAIN)
def _layer_replaced() -> None:
    method = _conadv(model := split_batchnorm(small_cnn()))
    model[1] = nn.BatchNorm2d(4).double()
    _step(method)


@_mistake(
    "`split_batchnorm` after `DistributedDataParallel` or FSDP",
    "DistributedDataParallel or FSDP would not exchange the new branches: split the model, then wrap it",
    ranks=2,
)
def _split_late() -> None:
    with loops.process_group():
        split_batchnorm(DistributedDataParallel(small_cnn()))


@_mistake("`DistributedDataParallel(find_unused_parameters=True)`", UNUSED, ranks=2)
def _unused() -> None:
    wrap = partial(DistributedDataParallel, find_unused_parameters=True)
    with loops.process_group():
        _conadv(wrap(split_batchnorm(small_cnn())))


@_mistake(
    "`DistributedDataParallel(static_graph=True)`",
    "DistributedDataParallel(static_graph=True) allows one backward pass per step, and a method takes several: "
    "leave static_graph out",
    ranks=2,
)
def _static() -> None:
    with loops.process_group():
        _conadv(DistributedDataParallel(split_batchnorm(small_cnn()), static_graph=True))


@_mistake(
    "Transformers on several ranks, without `ddp_find_unused_parameters`", UNUSED, ranks=2, library="transformers"
)
def _trainer_unused() -> None:
    loops.transformers("conadv", 2, 1, ddp_find_unused_parameters=None)


@_mistake("several ranks whose model nothing synchronizes", UNSYNCHRONIZED, ranks=2, warns=True)
def _not_synchronized() -> None:
    with loops.process_group():
        model = split_batchnorm(small_cnn())
        _learn(_conadv(model), sgd(model), loops.own_batches(3))


@_mistake(
    "another epsilon, or another setting, on one rank of `DistributedDataParallel`",
    "the methods of the ranks differ: epsilon is 0.01568627450980392 on rank 0 and 0.03137254901960784 on rank 1; "
    "create them with the same arguments on every rank",
    ranks=2,
)
def _another_epsilon() -> None:
    with loops.process_group():
        model = DistributedDataParallel(split_batchnorm(small_cnn()))
        _step(ConAdv(model, F.cross_entropy, PGD(8 / 255 if loops.place()[0] else 4 / 255)))


@_mistake(
    "a method on one rank of `DistributedDataParallel`, and a plain loop on the others",
    "waited 4 seconds for the first step of rank 1 with a method: create the same method on every rank, and call "
    "it in every step in place of the plain loss",
    ranks=2,
    heard=0,
)
def _method_on_one_rank() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=4))
    try:
        model = DistributedDataParallel(split_batchnorm(small_cnn()))
        images, labels = small_batches(1)[0]
        if dist.get_rank() == 0:
            _conadv(model)((images, labels))
        F.cross_entropy(model(images), labels).backward()
    finally:
        dist.destroy_process_group()


@_mistake(
    "Accelerate on several ranks, the method with the model before `prepare`",
    UNSYNCHRONIZED,
    ranks=2,
    warns=True,
    library="accelerate",
)
def _not_prepared() -> None:
    from accelerate import Accelerator

    own = Accelerator(cpu=True)
    model = prepared("conadv")
    method = _conadv(model)
    _, optimizer, batches = own.prepare(model, sgd(model), loader(6))
    for batch in batches:
        optimizer.zero_grad()
        own.backward(method.loss(batch))
        optimizer.step()


@_mistake(
    'Fabric with `precision="bf16-true"`',
    "Input type (torch.FloatTensor) and weight type (CPUBFloat16Type) should be the same or input should be a "
    "MKLDNN tensor and weight is a dense tensor",
    library="lightning",
)
def _fabric_true() -> None:
    from lightning.fabric import Fabric

    model = prepared("conadv").float()
    model, _ = (own := Fabric(accelerator="cpu", devices=1, precision="bf16-true")).setup(model, sgd(model))
    images, labels = small_batches(1)[0]
    own.backward(_conadv(model).loss((images.float(), labels)))


@_mistake(
    "float16 autocast around `method(batch)`, which cannot scale the loss",
    "float16 needs a scaled loss: scaler.scale(method.loss(batch)).backward()",
)
def _float16_unscaled() -> None:
    method = _conadv(split_batchnorm(small_cnn()).float())
    images, labels = small_batches(1)[0]
    with torch.autocast("cpu", torch.float16):
        method((images.float(), labels))


@_mistake(
    "`method.loss` for evaluation",
    "a method takes training steps, and gradients are off here (torch.no_grad, inference_mode): to evaluate, call "
    "the model itself",
)
def _without_gradients() -> None:
    with torch.no_grad():
        _conadv().loss(small_batches(1)[0])


@_mistake(
    "`Sam.loss`", "sam moves the weights during its backward pass, so it has no loss to return: call method(batch)"
)
def _loss_of_sam() -> None:
    Sam(small_cnn(), F.cross_entropy).loss(small_batches(1)[0])


@_mistake(
    "an LBFGS closure, where each call counts as a step",
    "LBFGS evaluates its closure several times per step, and each would count as a step of this method: use "
    "ConAdv(delay=0), or another optimizer",
)
def _lbfgs() -> None:
    method = _conadv(model := split_batchnorm(small_cnn()))
    torch.optim.LBFGS(model.parameters()).step(lambda: _step(method))


@_mistake(
    "recycled, and a loss that is not backpropagated",
    "backpropagate the loss of each step: recycled takes the twins from there",
)
def _never_backpropagated() -> None:
    method = Recycled(split_batchnorm(small_cnn()), F.cross_entropy, ATTACK)
    for batch in small_batches(2):
        method.loss(batch)


@_mistake(
    "recycled with chunks, and a smaller last batch",
    "a batch with 1 chunks of twins follows one with 2: the method needs batches of one size (drop_last=True drops "
    "the smaller last one)",
)
def _smaller_last_batch() -> None:
    method = Recycled(split_batchnorm(small_cnn()), F.cross_entropy, ATTACK, chunk_size=4)
    for images, labels in small_batches(2):
        _step(method, (images, labels))
        _step(method, (images[:4], labels[:4]))


@_mistake(
    "a last batch that the chunks do not divide",
    "a batch of 4 images is not a whole number of chunks of 3: choose a chunk size that divides it, and drop the "
    "last, smaller batch of an epoch (drop_last=True)",
)
def _unequal_chunks() -> None:
    [_step(method, batch) for method in [_conadv(chunk_size=3)] for batch in _unequal_batches()]


@_mistake(
    "`method(images, labels)`",
    "the batch is a Tensor, not (images, labels) as tensors: say how to get them with batch=, or pass both as one "
    "argument, method((images, labels))",
)
def _two_arguments() -> None:
    _conadv()(*small_batches(1)[0])


@_mistake("`batch=` that returns a tuple", "batch= returned a tuple: return conadv.Batch(images, labels)")
def _batch_of_a_tuple() -> None:
    _step(_conadv(batch=lambda item: (item["image"], item["label"])), {"image": 1, "label": 2})


@_mistake(
    "batches of (images, labels, index)",
    "the loader yields a tuple of 3, not (images, labels) as tensors: say how to get them, such "
    "as batch=lambda item: conadv.Batch(item[0], item[1])",
)
def _batch_of_three() -> None:
    _step(_conadv(), (*small_batches(1)[0], torch.arange(8)))


@_mistake(
    "arrays, or lists of pictures",
    "the loader yields a tuple of ndarray and ndarray, not (images, labels) as tensors: say how to get them, such "
    "as batch=lambda item: conadv.Batch(torch.as_tensor(item[0]), torch.as_tensor(item[1]))",
)
def _arrays() -> None:
    _step(_conadv(), tuple(tensor.numpy() for tensor in small_batches(1)[0]))


@_mistake(
    "a generator in a second epoch",
    "the loader has no batch: an iterator (a generator, say) can be read only once; pass a DataLoader or a list, "
    "for every epoch",
    warns=True,
)
def _generator_again() -> None:
    method, batches = _conadv(), iter(small_batches(1))
    for _ in range(2):
        for now, _ in method.feed(batches):
            _step(method, now)


@_mistake('a loss with `reduction="sum"`', 'the loss has reduction="sum": a method needs the mean, reduction="mean"')
def _sum_of_losses() -> None:
    _conadv(loss=nn.CrossEntropyLoss(reduction="sum"))


@_mistake(
    "class weights with chunks",
    "a loss with class weights is not the mean of its chunks: pass chunk_size=None, or multiply per-image losses "
    "by their weights and take the plain mean",
)
def _class_weights() -> None:
    _conadv(loss=nn.CrossEntropyLoss(torch.ones(5).double()), chunk_size=4)


@_mistake("the same in a function, or with a model that returns a dict or an object", NO_MEAN)
def _weights_in_a_function() -> None:
    _step(_conadv(loss=lambda outputs, labels: F.cross_entropy(outputs, labels, WEIGHTS), chunk_size=4))


@_mistake(
    "`ignore_index` with chunks",
    "labels that the loss ignores (below 0, or ignore_index) with chunks: each chunk would be averaged over "
    "another number of images; pass chunk_size=None, or drop these images",
)
def _ignored_labels() -> None:
    _step(_conadv(chunk_size=4), (small_batches(1)[0][0], torch.full((8,), -100)))


@_mistake("labels that a function of your own ignores, with chunks, even if they come late", NO_MEAN)
def _ignored_late() -> None:
    def loss(outputs: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(outputs, labels, ignore_index=4)

    method = _conadv(loss=loss, chunk_size=4)
    for number, (images, labels) in enumerate(small_batches(16)):
        rare = torch.where(torch.arange(8) < 3, 4, labels.clamp(max=3))
        _step(method, (images, rare if number == 15 else labels.clamp(max=3)))


@_mistake(
    "images with NaN or infinity",
    "the images have NaN or infinity, so the loss is nan: look at how they are made (a division by 0 in the "
    "normalization?)",
)
def _not_finite() -> None:
    images, labels = small_batches(1)[0]
    images[:, :, 0] = 0
    _step(_conadv(), (images / images.amax(3, keepdim=True), labels))


@_mistake(
    "images in [0, 1], although the attack was given mean and std",
    "images from 0 to 1 look like pixels in [0, 1], but the attack was given mean and std of normalized ones, "
    "which makes its ball larger: drop mean and std, or normalize the images",
    warns=True,
)
def _normalized() -> None:
    attack = PGD(4 / 255, mean=(0.5, 0.5), std=(0.2, 0.2))
    images = torch.linspace(0, 1, 8 * 72, dtype=torch.float64).view(8, 2, 6, 6)
    _step(ConAdv(split_batchnorm(small_cnn()), F.cross_entropy, attack), (images, small_batches(1)[0][1]))


@_mistake(
    "mean and std of images in [0, 255]",
    "mean (124.0, 116.0, 104.0): not within the pixels' range [0, 1]; divide mean and std by 255 if they are those "
    "of bytes",
)
def _mean_of_bytes() -> None:
    PGD(4 / 255, mean=(124.0, 116.0, 104.0), std=(58.0, 57.0, 57.0))


@_mistake(
    "another layer that tracks statistics (InstanceNorm, EvoNorm)",
    "1 (InstanceNorm2d) tracks statistics of images in its buffer running_mean, which clean and adversarial images "
    "would share: replace it by a layer without such a buffer, or by BatchNorm",
)
def _tracking_norm() -> None:
    norm = partial(nn.InstanceNorm2d, track_running_stats=True)
    _step(_conadv(split_batchnorm(small_cnn(norm=norm))))


@_mistake("the state of another method", "the state is of another method: it has delay 1 instead of 2")
def _another_state() -> None:
    _conadv(delay=2).load_state_dict(_conadv().state_dict())


def answers(row: Refusal, pool: Pool) -> list[str]:
    """What the mistake of a row is answered with on the ranks that hear of it."""
    said = pool.run(row.ranks, _said, REFUSALS.index(row)) if row.ranks > 1 else [_said(REFUSALS.index(row))]
    return said if row.heard is None else [said[row.heard]]


def _said(number: int) -> str:
    refusal = REFUSALS[number]
    with quiet_ranks() if refusal.ranks > 1 else nullcontext(), warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        try:
            refusal.make()
        except (ValueError, RuntimeError, AttributeError) as error:
            return str(error)
    messages = [str(warning.message) for warning in heard]
    return refusal.message if refusal.warns and refusal.message in messages else f"nothing, or {messages}"
