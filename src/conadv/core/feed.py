"""A loader for a method: it yields pairs, the batch to learn from and the batch to attack."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.utils.data import DataLoader

from .batch import not_divided

# What a step sees of the data: the batch to learn from, and the one to attack; None where it needs none.
Pair = tuple[Any, Any]


class Feed:
    """A loader that yields (now, ahead), and behaves like one: sized, iterated again each epoch, with a state.

    Args:
        loader: any iterable of batches; one that can be iterated again serves several epochs.
        chunk_size: images per chunk, to refuse a last batch that it does not divide before training starts.
        taken: called before each pair.
        reads_ahead: batches that are pulled before they are learnt from, because they are attacked first.
        begin: called at the start of an epoch that was not resumed.
        prime: called with each of the first `reads_ahead` batches of an epoch and its place, before the first step.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        chunk_size: int | None = None,
        taken: Callable[[], None] = lambda: None,
        reads_ahead: int = 0,
        begin: Callable[[], None] = lambda: None,
        prime: Callable[[Any, int], None] = lambda batch, place: None,
    ) -> None:
        self._loader = loader
        self.reads_ahead = reads_ahead
        self._begin, self._prime, self._taken = begin, prime, taken
        self._window: deque[Any] = deque()
        self._resumed = False
        self._ended = False  # the loader has no more batches in this epoch, but some that it yielded are left
        _check_last_batch(loader, chunk_size)

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]  # a TypeError, as for any iterable without a length

    def __iter__(self) -> Iterator[Pair]:
        for pair in self._pairs():
            self._taken()
            yield pair

    def _pairs(self) -> Iterator[Pair]:
        if not self._resumed:
            self._window.clear()
            self._ended = False
            self._begin()
        is_empty = isinstance(self._loader, Iterator) and not self._resumed
        self._resumed = False
        ends = _End(self._loader)
        for batch in () if self._ended else self._loader:
            is_empty = False
            self._window.append(batch)
            if len(self._window) > self.reads_ahead:
                ends.tell(last=ends.reached and self.reads_ahead == 0)
                yield self._window.popleft(), batch if self.reads_ahead else None
            else:
                self._prime(batch, len(self._window))
            if ends.reached:  # its last batch: what is left is yielded before the loader stops
                yield from self._rest(ends)
        self._ended = True
        yield from self._rest(ends)
        self._ended = False
        if is_empty:
            warnings.warn(
                "the loader has no batch: an iterator (a generator, say) can be read only once; pass a DataLoader or a "
                "list, for every epoch",
                stacklevel=3,
            )

    def _rest(self, ends: _End) -> Iterator[Pair]:
        while self._window:
            ends.tell(last=len(self._window) == 1)
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
