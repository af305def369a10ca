"""The stream's promise: the same images in the same order for every layout, number of workers and start."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conadv.core.batch import Chunked
from conadv.task.augment import augmentation
from conadv.task.data.arrays import digits, synthetic
from conadv.task.data.fit import Fit
from conadv.task.data.source import Arrays, DamagedError, Picture, Source
from conadv.task.stream import Stream, evaluation_batches
from task.data.samples import images_of


def numbered(number: int) -> Source:
    """Images that say their own index."""
    images = np.zeros((number, 4, 4, 2), np.uint8)
    images[..., 0], images[..., 1] = (
        (np.arange(number) // 256)[:, None, None],
        (np.arange(number) % 256)[:, None, None],
    )
    return Source(Arrays(images), np.arange(number), tuple(str(i) for i in range(number)))


def joined(batches: Iterator[Chunked]) -> Iterator[tuple[torch.Tensor, ...]]:
    """The batches of a stream, each as one."""
    for batch in batches:
        yield tuple(torch.cat(views) for views in zip(*batch.chunks, strict=True))


def make_stream(count: int = 100, batch_size: int = 12, chunk_size: int = 3, augment: str = "none", **rest) -> Stream:
    return Stream(numbered(count), batch_size, chunk_size, rest.pop("seed", 5), augmentation(augment), **rest)


@st.composite
def streams(draw: st.DrawFn) -> tuple[Stream, list[list[int]]]:
    """A stream, and its chunks dealt out to lanes."""
    chunk_size, chunks = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    count = draw(st.integers(chunk_size * chunks, 60))
    stream = make_stream(count, chunk_size * chunks, chunk_size, "crop-flip", seed=draw(st.integers(0, 2**64)))
    owners = draw(st.lists(st.integers(0, 2), min_size=chunks, max_size=chunks))
    lanes = [[chunk for chunk in range(chunks) if owners[chunk] == lane] for lane in set(owners)]
    return stream, lanes


@settings(max_examples=60, deadline=None)
@given(streams(), st.integers(0, 3), st.integers(0, 7), st.integers(1, 4))
def test_every_layout_worker_count_and_start_gives_the_same_images(
    made: tuple[Stream, list[list[int]]], workers: int, start: int, steps: int
) -> None:
    stream, lanes = made
    whole = list(joined(stream.batches(0, start + steps)))
    size = stream.chunk_size
    for lane in lanes:
        shares = list(joined(replace(stream, workers=workers).batches(start, start + steps, lane)))
        assert len(shares) == steps
        for share, batch in zip(shares, whole[start:], strict=True):
            for got, full in zip(share, batch, strict=True):
                expected = torch.cat([full[chunk * size : (chunk + 1) * size] for chunk in lane])
                assert torch.equal(got, expected)


@settings(max_examples=60, deadline=None)
@given(streams(), st.integers(0, 3))
def test_no_image_comes_twice_in_an_epoch_and_none_is_left_out_but_the_remainder(
    made: tuple[Stream, list[list[int]]], epoch: int
) -> None:
    stream, _ = made
    first = epoch * stream.steps_per_epoch
    epoch_batches = joined(stream.batches(first, first + stream.steps_per_epoch))
    seen = [label for _, labels in epoch_batches for label in labels.tolist()]
    assert len(set(seen)) == len(seen) == stream.steps_per_epoch * stream.batch_size
    assert len(stream.source) - len(seen) < stream.batch_size


def test_batches_are_contiguous_bytes_with_channels_first_and_their_labels() -> None:
    for images, labels in joined(make_stream().batches(0, 20, range(1, 3))):
        assert (images.shape, images.dtype, labels.dtype) == ((6, 2, 4, 4), torch.uint8, torch.int64)
        assert images.is_contiguous()
        assert torch.equal(images[:, 0, 0, 0].long() * 256 + images[:, 1, 0, 0].long(), labels)


def test_epochs_have_different_orders_and_leave_different_images_out() -> None:
    stream = make_stream(count=100, batch_size=12, chunk_size=3)
    assert (stream.steps_per_epoch, stream.chunks_per_step) == (8, 4)
    left_out = [
        set(range(100))
        - {int(i) for step in range(8 * e, 8 * e + 8) for c in range(4) for i in stream.indices(step, c)}
        for e in range(30)
    ]
    assert all(len(some) == 4 for some in left_out)
    assert len(set().union(*left_out)) > 50
    assert stream.indices(0, 0).tolist() != stream.indices(8, 0).tolist()


def test_an_image_is_augmented_differently_in_another_epoch() -> None:
    source = Source(Arrays(np.arange(64, dtype=np.uint8).reshape(1, 8, 8, 1)), np.array([0]), ("only",))
    stream = Stream(source, 1, 1, seed=0, augment=augmentation("crop-flip"))
    seen = {images.numpy().tobytes() for images, _ in joined(stream.batches(0, 300))}
    assert len(seen) == 18  # 3 × 3 places and a flip


def test_the_same_image_is_augmented_alike_in_any_batch_size() -> None:
    """The order is the same too, so that the batch size is the only thing a comparison changes."""
    source = synthetic((8, 8, 1), 64).train
    small, large = (Stream(source, size, 4, 1, augmentation("crop-flip")) for size in (8, 32))
    ours = torch.cat([images for images, _ in joined(small.batches(0, 8))])
    assert torch.equal(ours, torch.cat([images for images, _ in joined(large.batches(0, 2))]))


class Trap:
    """Pictures of which number 7 cannot be read."""

    def name(self, row: int) -> str:
        return f"trap-{row}.jpg"

    def picture(self, row: int) -> Picture:
        if row == 7:
            raise DamagedError(self.name(row), "truncated")
        return numbered(20).picture(row)


def worker_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("conadv-data")]


@pytest.mark.parametrize("workers", [0, 3])
def test_an_error_reaches_the_consumer_in_its_place(workers: int) -> None:
    stream = Stream(Source(Trap(), np.zeros(20, int), ("a",)), 2, 1, 0, augmentation("none"), workers)
    before = next(step for step in range(10) if 7 in [*stream.indices(step, 0), *stream.indices(step, 1)])
    batches = joined(stream.batches(0, None))
    for _ in range(before):
        next(batches)
    with pytest.raises(ValueError, match=r"trap-7\.jpg: truncated; repair the data, or leave out"):
        next(batches)
    assert worker_threads() == []


@pytest.mark.parametrize("end", ["closed", "dropped", "interrupted"])
def test_an_endless_stream_leaves_no_worker(end: str) -> None:
    def train() -> None:
        batches = make_stream(workers=2).batches(0, None)
        next(next(batches).chunks)
        assert worker_threads() != []
        if end == "closed":
            batches.close()
        if end == "interrupted":
            raise KeyboardInterrupt

    with suppress(KeyboardInterrupt):
        train()
    assert worker_threads() == []


class Counted:
    """An augmentation that counts the chunks it was asked for."""

    def __init__(self) -> None:
        self.inner, self.calls = augmentation("none"), []

    def __call__(self, *arguments: np.ndarray) -> tuple[np.ndarray, ...]:
        self.calls.append(arguments)
        return self.inner(*arguments)


@pytest.mark.parametrize("chunks", [2, 50])
def test_two_chunks_a_worker_are_made_ahead_however_large_the_batch(chunks: int) -> None:
    augment = Counted()
    batches = Stream(numbered(100), chunks, 1, 0, augment, workers=2).batches(0, None)
    next(next(batches).chunks)
    deadline = time.monotonic() + 20
    while len(augment.calls) < 1 + 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.05)
    assert len(augment.calls) == 1 + 4
    batches.close()


def test_chunks_that_nobody_asks_for_are_passed_over() -> None:
    whole = list(joined(make_stream().batches(0, 3)))
    batches = make_stream().batches(0, 3)
    next(batches)
    next(next(batches).chunks)
    (last,) = joined(batches)
    assert all(map(torch.equal, last, whole[2]))


@pytest.mark.parametrize("workers", [0, 2])
def test_evaluation_sees_every_image_once_in_order(workers: int) -> None:
    source = digits(100).test
    parts = list(evaluation_batches(source, 500, Fit(), workers))
    assert [len(labels) for _, labels in parts] == [500, 500, 500, 197]
    images = torch.cat([images for images, _ in parts])
    np.testing.assert_array_equal(images.numpy(), images_of(source).transpose(0, 3, 1, 2))
    np.testing.assert_array_equal(torch.cat([labels for _, labels in parts]).numpy(), source.labels)


def test_copies_of_an_image_share_a_batch_but_neither_a_chunk_nor_an_augmentation() -> None:
    once, twice = (
        make_stream(count=40, batch_size=8, chunk_size=4),
        make_stream(count=40, batch_size=16, chunk_size=4, copies=2),
    )
    assert once.steps_per_epoch == twice.steps_per_epoch == 5
    for step in (0, 3, 7):
        for chunk in range(4):
            assert twice.indices(step, chunk).tolist() == once.indices(step, chunk // 2).tolist()
    images = np.random.default_rng(0).integers(0, 256, (40, 8, 8, 3), np.uint8)
    source = Source(Arrays(images), np.arange(40) % 10, tuple("0123456789"))
    crops = Stream(source, 16, 4, seed=5, augment=augmentation("crop-flip"), copies=2)
    plain = Stream(source, 8, 4, seed=5, augment=augmentation("crop-flip"))
    first, second, third = (crops.chunk(2, chunk)[0] for chunk in (0, 1, 2))
    assert torch.equal(first, plain.chunk(2, 0)[0])
    assert torch.equal(third, plain.chunk(2, 1)[0])
    assert not any(torch.equal(one, other) for one, other in zip(first, second, strict=True))
