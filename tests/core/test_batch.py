"""Batches as they come, and the chunks that they are cut into."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conadv.core.batch import Batch, Chunked, Feed, count_chunks, cut, to_pixels


@given(chunks=st.integers(1, 6), chunk_size=st.integers(1, 5), views=st.integers(0, 1))
def test_chunks_are_the_batch_in_order(chunks: int, chunk_size: int, views: int) -> None:
    size = chunks * chunk_size
    images, labels = torch.arange(size * 2).view(size, 2), torch.arange(size)
    batch = Batch(images, {"labels": (labels,)}, images + 1000 if views else None, {"index": labels + 5, "scale": 2.0})
    parts = list(cut(batch, chunk_size))
    assert count_chunks(batch, chunk_size) == len(parts) == chunks
    assert all(len(part.images) == chunk_size for part in parts)
    assert torch.equal(torch.cat([part.images for part in parts]), images)
    assert torch.equal(torch.cat([part.labels["labels"][0] for part in parts]), labels)
    assert torch.equal(torch.cat([part.extra["index"] for part in parts]), labels + 5)
    assert all(part.extra["scale"] == 2.0 for part in parts)
    if views:
        assert torch.equal(torch.cat([part.augmented for part in parts]), images + 1000)


def test_without_a_chunk_size_the_batch_is_its_only_chunk() -> None:
    (part,) = cut(Batch(torch.zeros(7, 2), torch.zeros(7)), None)
    assert part.images.shape == (7, 2) and part.labels.shape == (7,)


@pytest.mark.parametrize("chunk_size", [None, 4])
def test_an_empty_batch_is_refused(chunk_size: int | None) -> None:
    with pytest.raises(ValueError, match="an empty batch"):
        count_chunks(Batch(torch.zeros(0, 3), torch.zeros(0)), chunk_size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_byte_becomes_its_fraction(dtype: torch.dtype) -> None:
    raw = torch.arange(256, dtype=torch.uint8)
    pixels = to_pixels(raw, torch.device("cpu"), dtype)
    assert pixels.dtype == dtype and pixels.tolist() == (torch.arange(256).to(dtype) / 255).tolist()
    assert torch.equal((pixels * 255).round().to(torch.uint8), raw)


@pytest.mark.parametrize("count", [1, 3])
def test_more_or_fewer_chunks_than_a_batch_says_it_has_are_refused(count: int) -> None:
    batch = Chunked(count, [Batch(torch.zeros(2, 3), torch.zeros(2)) for _ in range(2)])
    with pytest.raises(ValueError, match=f"2 instead of {count} chunks"):
        list(cut(batch, 2))


# --- a loader that looks ahead -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ahead", "pairs"),
    [
        (0, [(1, None), (2, None), (3, None)]),
        (1, [(1, 2), (2, 3), (3, None)]),
        (2, [(1, 3), (2, None), (3, None)]),
        (4, [(1, None), (2, None), (3, None)]),
    ],
)
def test_a_batch_comes_with_the_one_that_is_so_many_steps_later(
    ahead: int, pairs: list[tuple[int, int | None]]
) -> None:
    begun: list[None] = []
    feed = Feed([1, 2, 3], ahead, lambda: begun.append(None))
    assert len(feed) == 3
    for epoch in (1, 2):
        assert list(feed) == pairs
        assert len(begun) == epoch
