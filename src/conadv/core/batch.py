"""What a batch is, how it is cut into the chunks that BatchNorm sees, and a loader that looks ahead."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten


@dataclass(frozen=True, eq=False)
class Batch:
    """Images and labels, and what else a step may need.

    Args:
        images: what is attacked: bytes, or floats in [0, 1] (or normalized, if the attack has mean and std),
            (N, C, H, W). Any other input works too (see `PGD`).
        labels: what the loss takes besides the outputs: a tensor of N, or tuples and dicts of such tensors.
        augmented: another view of the same images, to learn from through a BatchNorm branch of its own (split with
            `("main", "aug", "adv")`). Images and view share the weight of the clean loss equally.
        extra: further inputs of the model by name; the method needs `input_name` for the images then.
    """

    images: Tensor
    labels: Any
    augmented: Tensor | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Chunked:
    """A batch that need not be whole in memory: its chunks may come one at a time, and can be iterated once.

    Args:
        count: the number of chunks.
        chunks: each of them a batch, or what a method's `batch` function makes one from.
    """

    count: int
    chunks: Iterable[Any]


def as_batch(item: Any) -> Batch:
    """Convert what a loader yields, (images, labels), to a `Batch`."""
    if isinstance(item, tuple | list) and len(item) == 2 and isinstance(item[0], Tensor):
        return Batch(*item)
    if isinstance(item, Tensor):
        raise ValueError(
            "the batch is a Tensor, not (images, labels) as tensors: say how to get them with batch=, "
            "or pass both as one argument, method((images, labels))"
        )
    if isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], tuple | list | dict | Batch | Chunked):
        raise ValueError(
            "a pair of batches, as method.feed yields them: for now, ahead in method.feed(loader): method(now, ahead)"
        )
    what, example = type(item).__name__, "item[0], item[1]"
    if isinstance(item, dict):
        images, labels = [*item, "images", "labels"][:2]
        what, example = f"dict with the keys {', '.join(map(str, item))}", f"item[{images!r}], item[{labels!r}]"
    elif isinstance(item, tuple | list) and len(item) == 2:
        what = f"{what} of {type(item[0]).__name__} and {type(item[1]).__name__}"
        example = "torch.as_tensor(item[0]), torch.as_tensor(item[1])"
    elif isinstance(item, tuple | list):
        what = f"{what} of {len(item)}"
    raise ValueError(
        f"the loader yields a {what}, not (images, labels) as tensors: say how to get them, such as "
        f"batch=lambda item: conadv.Batch({example})"
    )


def regrouped(batches: Sequence[Batch], order: Tensor) -> list[Batch]:
    """The images of several batches of one size in another order, cut into as many batches."""
    size = len(batches[0].images)
    leaves, like = zip(*(tree_flatten((one.images, one.labels, dict(one.extra))) for one in batches), strict=True)
    if any(not isinstance(leaf, Tensor) or leaf.dim() == 0 or len(leaf) != size for own in leaves for leaf in own):
        raise ValueError("twins can be shuffled only if every label and extra input has one entry per image")
    mixed = [torch.cat(same)[order.to(same[0].device)].split(size) for same in zip(*leaves, strict=True)]
    parts = [tree_unflatten([tensors[number] for tensors in mixed], like[0]) for number in range(len(batches))]
    return [Batch(images, labels, extra=extra) for images, labels, extra in parts]


def to_pixels(images: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Move images to the model's device; bytes become fractions of the pixel range in the model's dtype."""
    if images.dtype == torch.uint8:
        return images.to(device, non_blocking=True).to(dtype).div_(255)
    return images.to(device, non_blocking=True)


def to_device(values: Any, device: torch.device) -> Any:
    """Move all tensors of a structure to a device."""
    return tree_map_only(Tensor, partial(Tensor.to, device=device, non_blocking=True), values)


def count_chunks(batch: Batch | Chunked, chunk_size: int | None) -> int:
    """The number of chunks of a batch; a batch that the chunk size does not divide is an error."""
    if isinstance(batch, Chunked):
        return batch.count
    size = len(batch.images)
    if size == 0:
        raise ValueError("an empty batch: drop it from the loader")
    if chunk_size is None:
        return 1
    if size % chunk_size:
        raise ValueError(
            f"a batch of {size} images is not a whole number of chunks of {chunk_size}: "
            "choose a chunk size that divides it, and drop the last, smaller batch of an epoch (drop_last=True)"
        )
    return size // chunk_size


def cut(batch: Batch | Chunked, chunk_size: int | None) -> Iterator[Any]:
    """The chunks of a batch, in order; without a chunk size the batch is its only chunk."""
    count = count_chunks(batch, chunk_size)
    if isinstance(batch, Chunked):
        came = 0
        for chunk in batch.chunks:
            came += 1
            yield chunk
        if came != count:
            raise ValueError(f"{came} instead of {count} chunks came: a chunked batch can be iterated only once")
        return
    size = len(batch.images)
    if count > 1 and isinstance(batch.labels, Tensor) and batch.labels.dim() > 0 and len(batch.labels) != size:
        raise ValueError(f"{len(batch.labels)} labels for {size} images, which cannot be cut into chunks together")

    def part(number: int, values: Tensor) -> Tensor:
        shared = values.dim() == 0 or len(values) != size  # not a value per image
        return values if shared else values.chunk(count)[number]

    for number in range(count):
        fields = (batch.images, batch.labels, batch.augmented, dict(batch.extra))
        yield batch if count == 1 else Batch(*tree_map_only(Tensor, partial(part, number), fields))


class Feed:
    """A loader that yields (now, ahead): a batch, and the one that comes `reads_ahead` steps later, or None.

    To resume in the middle of an epoch, leave out the batches that were learnt from: the position of a loader that can
    save it is that of the batches that were read.

    Args:
        loader: any iterable of batches; one that can be iterated again serves several epochs.
        reads_ahead: how many batches are read before they are learnt from.
        begin: called at the start of an epoch.
    """

    def __init__(self, loader: Iterable[Any], reads_ahead: int = 0, begin: Callable[[], None] = lambda: None) -> None:
        self._loader, self.reads_ahead, self._begin = loader, reads_ahead, begin

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]  # a TypeError, as for any iterable without a length

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        self._begin()
        window: deque[Any] = deque()  # batches that were read and not yielded yet
        is_empty = isinstance(self._loader, Iterator)
        for batch in self._loader:
            is_empty = False
            window.append(batch)
            if len(window) > self.reads_ahead:
                yield window.popleft(), batch if self.reads_ahead else None
        while window:
            yield window.popleft(), None
        if is_empty:
            warnings.warn(
                "the loader has no batch: an iterator (a generator, say) can be read only once; pass a DataLoader or a "
                "list, for every epoch",
                stacklevel=2,
            )
