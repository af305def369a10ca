"""Twins cross from rank to rank as they are, in their order, and nothing of them stays behind."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conadv.core.algorithm import ConAdv
from conadv.core.batch import Batch
from conadv.core.roles import Role
from conadv.ranks.collectives import joined
from conadv.ranks.handoff import between_ranks
from conadv.ranks.layout import Layout
from conadv.ranks.traffic import Traffic
from conadv.ranks.wire import Wire
from support.tasks import SHAPE, hand_over, twin, wait_in_vain


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(st.integers(1, 9), st.integers(0, 2**30))
def test_floats_cross_bit_by_bit(dtype, images, seed):
    wire = Wire(images, SHAPE, dtype, as_bytes=False)
    sent = twin(images, dtype, seed)
    message = wire.pack(sent)
    assert message.dtype == torch.uint8
    assert len(message) == wire.size == images * (8 + 30 * dtype.itemsize) + 1
    received = wire.unpack(message)
    assert received.images.dtype == dtype
    assert torch.equal(received.images, sent.images)
    assert torch.equal(received.labels, sent.labels)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_whole_255th_crosses_as_a_byte_to_its_nearest_number(dtype):
    levels = torch.arange(256)
    # As an attack leaves them: sums of 255ths, a few units in the last place beside the quotient.
    noisy = (levels.to(dtype) / 255 + 24 / 255 - 24 / 255).clamp(0, 1).reshape(2, 1, 16, 8)
    wire = Wire(2, (1, 16, 8), dtype, as_bytes=True)
    received = wire.unpack(wire.pack(Batch(noisy, torch.tensor([3, 9])))).images
    assert wire.size == 2 * (8 + 128) + 1
    assert torch.equal(received.flatten(), levels.to(dtype) / 255)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("as_bytes", [True, False])
def test_labels_that_are_shares_of_the_classes_cross_bit_by_bit(dtype, as_bytes):
    wire = Wire(3, (1, 1, 1), dtype, as_bytes, label_shape=(5,), label_dtype=torch.float32)
    sent = Batch(torch.tensor([0, 128, 255]).to(dtype).div(255).view(3, 1, 1, 1), torch.rand(3, 5))
    message = wire.pack(sent)
    assert len(message) == wire.size == 3 * (4 * 5 + (1 if as_bytes else dtype.itemsize)) + 1
    received = wire.unpack(message)
    assert received.labels.dtype == torch.float32
    assert torch.equal(received.labels, sent.labels)
    assert torch.equal(received.images, sent.images)
    with pytest.raises(AssertionError):
        wire.pack(Batch(sent.images, torch.arange(3)))


def test_a_channels_last_twin_crosses_in_the_order_of_its_dimensions():
    wire = Wire(4, SHAPE, torch.float32, as_bytes=False)
    sent = twin(4, torch.float32, 0)
    turned = Batch(sent.images.to(memory_format=torch.channels_last), sent.labels)
    assert torch.equal(wire.unpack(wire.pack(turned)).images, sent.images)


def test_an_odd_message_is_taken_apart_where_its_numbers_are_not_aligned():
    wire = Wire(3, (1, 1, 1), torch.float64, as_bytes=False)
    sent = Batch(torch.rand(3, 1, 1, 1, dtype=torch.float64), torch.arange(3))
    longer = torch.cat([torch.zeros(1, dtype=torch.uint8), wire.pack(sent)])
    received = wire.unpack(longer[1:])
    assert torch.equal(received.images, sent.images)
    assert torch.equal(received.labels, sent.labels)


@pytest.mark.parametrize("stop", [1, 4, 12])
@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("delay", [0, 1, 2, 5])
def test_twins_arrive_in_their_order_and_a_run_can_stop_anywhere(delay, chunks, stop, pool):
    layout = "attack | clean+adv" if delay else "clean+attack | adv"
    one, other = pool.run(2, hand_over, layout, delay, chunks, 12, stop)
    assert one["arrived"] == []
    assert other["arrived"] == [True] * (stop * chunks)
    assert one["owned"] <= (delay + 1) * chunks
    assert other["owned"] <= delay * chunks


@pytest.mark.parametrize("stop", [1, 4])
@pytest.mark.parametrize("delay", [0, 1, 3])
@pytest.mark.parametrize(("layout", "size"), [("3 clean | 3 adv | 2 attack", 8), ("2 clean+adv | attack", 3)])
def test_between_several_ranks_twins_arrive_in_their_order_and_few_are_owned(layout, size, delay, stop, pool):
    results = pool.run(size, hand_over, layout, delay, 6, 6, stop)
    plan = Layout.fit(layout, ConAdv.duties, size)
    for rank, found in enumerate(results):
        own = plan.place(rank, 6).chunks
        assert found["arrived"] == ([True] * (stop * own) if Role.ADV in plan.role(rank) else [])
        assert found["owned"] <= (delay + (Role.ATTACK in plan.role(rank))) * own


@pytest.mark.parametrize("stop", [0, 1, 5])
def test_twins_that_come_with_the_clean_gradient_leave_no_message_without_receiver(stop, pool):
    _, other = pool.run(2, hand_over, "clean | adv", 1, 2, 5, stop)
    assert other["arrived"] == [True] * (stop * 2)


@pytest.mark.parametrize("for_what", ["twins", "sums"])
def test_a_wait_in_every_group_of_a_run_ends_with_the_timeout(for_what, pool):
    """PyTorch's default would be 30 minutes."""
    assert "imed out" in pool.run(2, wait_in_vain, 5.0, for_what)[0]


def test_a_lane_of_one_rank_needs_no_hand_off_between_ranks():
    layout = Layout.fit(None, ConAdv.duties, 1)
    with joined(30) as world:
        wire = Wire(2, SHAPE, torch.float32, as_bytes=False)
        assert between_ranks(Traffic(layout, 0, 1, 1), world, wire) is None
