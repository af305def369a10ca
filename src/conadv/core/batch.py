"""What a batch is, how it is cut into the chunks that BatchNorm sees, and a loader that looks ahead."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten
from torch.utils.data import DataLoader

# Tensors as a data layer makes them: images and labels, and an augmented view if there is one.
Chunk = tuple[Tensor, ...]


@dataclass(frozen=True, eq=False)
class Batch:
    """Images and labels, and what else a step may need.

    Args:
        images: what is attacked: bytes, or floats in [0, 1] (or normalized, if the attack has mean and std),
            (N, C, H, W). Any other input works too (see `PGD`).
        labels: what the loss takes besides the outputs: a tensor of N, or tuples and dicts of such tensors.
        augmented: another view of the same images, to learn from through a BatchNorm branch of its own.
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
    """Convert what a loader yields, (images, labels), to a `Batch`; a `Batch` is returned unchanged."""
    if isinstance(item, Batch):
        return item
    if isinstance(item, tuple | list) and len(item) == 2 and isinstance(item[0], Tensor):
        return Batch(*item)
    if isinstance(item, Tensor):
        raise ValueError(
            "the batch is a Tensor, not (images, labels) as tensors: say how to get them with batch=, "
            "or pass both as one argument, method((images, labels))"
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


def select(batch: Batch, images: Tensor | None) -> Batch:
    """Some images of a batch, by their numbers, with their labels and extra inputs; None: all of them."""
    if images is None:
        return batch
    size = len(batch.images)

    def one(tensor: Tensor) -> Tensor:
        return tensor[images] if tensor.dim() and len(tensor) == size else tensor

    def some(values: Any) -> Any:
        return tree_map_only(Tensor, one, values)

    return replace(batch, images=one(batch.images), labels=some(batch.labels), augmented=None, extra=some(batch.extra))


def regrouped(batches: Sequence[Batch], order: Tensor) -> list[Batch]:
    """The images of several batches in another order, cut into as many batches of equal size.

    Args:
        batches: of one size; every tensor of their labels and extra inputs has one entry per image.
        order: the new order of all images, by number.
    """
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
    if isinstance(values, Tensor):
        return values.to(device, non_blocking=True)
    return tree_map_only(Tensor, lambda tensor: tensor.to(device, non_blocking=True), values)


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
        raise ValueError(not_divided(size, chunk_size))
    return size // chunk_size


def not_divided(size: int, chunk_size: int) -> str:
    """The error message for a batch that is not a whole number of chunks."""
    return (
        f"a batch of {size} images is not a whole number of chunks of {chunk_size}: "
        "choose a chunk size that divides it, and drop the last, smaller batch of an epoch (drop_last=True)"
    )


def cut(batch: Batch | Chunked, chunk_size: int | None) -> Iterator[Any]:
    """The chunks of a batch, in order; without a chunk size the batch is its only chunk."""
    if isinstance(batch, Chunked):
        return _counted(batch)
    count = count_chunks(batch, chunk_size)
    return iter([batch]) if count == 1 else _parts(batch, count)


def _parts(batch: Batch, count: int) -> Iterator[Batch]:
    size = len(batch.images)
    if isinstance(batch.labels, Tensor) and batch.labels.dim() > 0 and len(batch.labels) != size:
        raise ValueError(f"{len(batch.labels)} labels for {size} images, which cannot be cut into chunks together")

    def part(values: Any, number: int) -> Any:
        def one(tensor: Tensor) -> Tensor:
            shared = tensor.dim() == 0 or len(tensor) != size  # not a value per image
            return tensor if shared else tensor.chunk(count)[number]

        return one(values) if isinstance(values, Tensor) else tree_map_only(Tensor, one, values)

    for number in range(count):
        augmented = None if batch.augmented is None else part(batch.augmented, number)
        yield Batch(part(batch.images, number), part(batch.labels, number), augmented, part(dict(batch.extra), number))


def _counted(batch: Chunked) -> Iterator[Any]:
    """Yield its chunks; raise an error if there are fewer than `count`, instead of silently leaving some out."""
    came = 0
    for chunk in batch.chunks:
        came += 1
        if came > batch.count:
            raise ValueError(f"more than the {batch.count} chunks that the batch says it has: set count to all of them")
        yield chunk
    if came < batch.count:
        raise ValueError(f"{came} of {batch.count} chunks came: a chunked batch can be iterated only once")


class Feed:
    """A loader that yields (now, ahead): a batch, and the one that comes `reads_ahead` steps later, or None.

    It behaves like the loader: sized, iterated again in each epoch, with a state.

    Args:
        loader: any iterable of batches; one that can be iterated again serves several epochs.
        chunk_size: images per chunk, to refuse a last batch that it does not divide before training starts.
        reads_ahead: how many batches are read before they are learnt from.
        begin: called at the start of an epoch.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        chunk_size: int | None = None,
        reads_ahead: int = 0,
        begin: Callable[[], None] = lambda: None,
    ) -> None:
        self._loader = loader
        self.reads_ahead = reads_ahead
        self._begin = begin
        self._window: deque[Any] = deque()  # batches that were read and not yielded yet
        self._resumed = False
        self._ended = False  # the loader has no more batches in this epoch, but some of the window are left
        _check_last_batch(loader, chunk_size)

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]  # a TypeError, as for any iterable without a length

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        if not self._resumed:
            self._window.clear()
            self._ended = False
            self._begin()
        is_empty = isinstance(self._loader, Iterator) and not self._resumed
        self._resumed = False
        end = _End(self._loader)
        for batch in () if self._ended else self._loader:
            is_empty = False
            self._window.append(batch)
            if len(self._window) > self.reads_ahead:
                end.tell(last=end.reached and self.reads_ahead == 0)
                yield self._window.popleft(), batch if self.reads_ahead else None
            if end.reached:  # its last batch: what is left is yielded before the loader stops
                yield from self._rest(end)
        self._ended = True
        yield from self._rest(end)
        self._ended = False
        if is_empty:
            warnings.warn(
                "the loader has no batch: an iterator (a generator, say) can be read only once; pass a DataLoader or a "
                "list, for every epoch",
                stacklevel=2,
            )

    def _rest(self, end: _End) -> Iterator[tuple[Any, Any]]:
        while self._window:
            end.tell(last=len(self._window) == 1)
            yield self._window.popleft(), None

    def state_dict(self) -> dict[str, Any]:
        """The position of the loader, if it has a state, and the batches that were pulled ahead."""
        inner = _stateful(self._loader)
        position = None if inner is None else inner.state_dict()
        return {"loader": position, "window": list(self._window), "ended": self._ended}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; the next iteration continues there."""
        inner = _stateful(self._loader)
        if inner is not None and state["loader"] is not None:
            inner.load_state_dict(state["loader"])
        self._window = deque(state["window"])
        self._ended = state["ended"]
        self._resumed = True


class _End:
    """The end-of-epoch flag of Accelerate's loaders, which decides when gradients are synchronized.

    The flag is raised with the loader's last batch, which here is learnt from some steps later. So it is lowered
    again until then. Other loaders have no such flag.
    """

    _NAME = "end_of_dataloader"

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._has_flag = isinstance(getattr(loader, self._NAME, None), bool)
        self._reached = False

    @property
    def reached(self) -> bool:
        if self._has_flag and getattr(self._loader, self._NAME):
            self._reached = True
        return self._reached

    def tell(self, last: bool) -> None:
        if self._has_flag:
            self._reached = self.reached
            setattr(self._loader, self._NAME, last)


def _stateful(loader: Any) -> Any:
    """The loader, if it can save and restore its position."""
    methods = (getattr(loader, name, None) for name in ("state_dict", "load_state_dict"))
    return loader if all(map(callable, methods)) else None


def _check_last_batch(loader: Any, chunk_size: int | None) -> None:
    """Refuse a loader whose last batch will not be a whole number of chunks, before the first epoch."""
    if chunk_size is None or not isinstance(loader, DataLoader) or loader.drop_last or loader.batch_size is None:
        return
    try:
        rest = len(loader.dataset) % loader.batch_size  # type: ignore[arg-type]
    except TypeError:  # an iterable data set, whose length is not known
        return
    if rest % chunk_size:
        raise ValueError(f"the last batch of each epoch: {not_divided(rest, chunk_size)}")
