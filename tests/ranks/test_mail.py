"""Messages between ranks: what arrives is what was sent, few are in memory, and none is left in the end."""

from __future__ import annotations

import pytest
import torch

from conadv.core.batch import Batch
from conadv.ranks.mail import Wire
from conadv.ranks.member import checksum
from conadv.ranks.world import flat, unflatten
from support import tasks


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_twin_crosses_to_the_bit(dtype):
    images = torch.rand(3, 2, 5, 5).to(dtype)
    wire = Wire((3, 2, 5, 5), dtype, as_bytes=False)
    message = wire.pack(images)
    assert len(message) == wire.size
    assert torch.equal(wire.unpack(message), images)


def test_pixels_of_8_bits_cross_as_one_byte_each_and_a_twin_made_here_has_the_same_bits():
    wire = Wire((3, 2, 5, 5), torch.float32, as_bytes=True)
    images = torch.randint(256, (3, 2, 5, 5)).float() / 255
    assert wire.size == 3 * 2 * 5 * 5
    assert torch.equal(wire.unpack(wire.pack(images)), images)
    near = Batch(images + 1e-7, torch.zeros(3))
    assert torch.equal(wire.received(near).images, images)


def test_weights_of_several_types_cross_in_one_message():
    tensors = [torch.rand(3, 3).double(), torch.tensor(7), torch.rand(2, 3, 2, 2).to(memory_format=torch.channels_last)]
    received = [torch.zeros_like(tensor) for tensor in tensors]
    unflatten(flat(tensors), received)
    assert all(torch.equal(one, other) for one, other in zip(tensors, received, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_one_bit_anywhere_changes_the_checksum(dtype):
    weights = [torch.rand(5, 3).to(dtype), torch.rand(7).to(dtype)]
    before = int(checksum(weights))
    weights[1].view(torch.uint8)[3] ^= 1
    assert int(checksum(weights)) != before


@pytest.mark.parametrize(
    ("method", "layout", "delay"),
    [("conadv", "clean | adv | attack", 1), ("conadv", "2 clean+adv | attack", 3), ("recycled", "2 clean | adv", 1)],
)
def test_few_messages_are_in_memory_and_none_in_the_end(method, layout, delay, pool):
    """A batch has 4 chunks: those that were sent in this step and the one before, and those not learnt from yet."""
    for most, left in pool.run(3, tasks.count_messages, method, layout, delay):
        assert most <= 4 * (delay + 1)
        assert left == 0


@pytest.mark.parametrize("data", [b"", b"some facts", bytes(range(256))])
def test_every_rank_gets_what_the_others_have(data, pool):
    for received, some, total in pool.run(3, tasks.collectives, data):
        assert (received, some, total) == (data, True, 3.0)


def test_all_ranks_start_with_the_weights_of_one(pool):
    first, *others = pool.run(3, tasks.share_weights)
    assert others == [first] * 2


@pytest.mark.parametrize(
    ("oddity", "says"),
    [
        ("loss", "the loss on rank 1 (lane 1, clean)"),
        ("gradient", "the gradient, or a statistic of BatchNorm, on rank 1 (lane 1, clean)"),
        ("statistics", "the gradient, or a statistic of BatchNorm, on rank 1 (lane 1, clean)"),
    ],
)
def test_all_ranks_hear_what_is_not_finite_and_where(oddity, says, pool):
    assert pool.run(3, tasks.step_with_oddity, oddity) == [f"step 0: {says} is not finite"] * 3
