"""What a step does beyond the plainest loop. No time is asserted."""

from __future__ import annotations

import torch

from conadv.study.bench.alternate import silent
from conadv.study.bench.workload import Workload
from overhead import counted, measure

TINY = Workload("resnet8", width=8, chunk_size=6, image_size=8)


def test_known_work_is_counted_as_it_is() -> None:
    """Two products and a sum of 256 × 256 floats, each with a result of its own; a view starts no work."""
    matrix = torch.rand(256, 256)
    found = counted(lambda: (matrix @ matrix).view(-1).sum() + (matrix @ matrix).sum())
    assert found.operators == 5
    assert found.allocations == 5
    assert found.megabytes * 1e6 == 2 * 4 * 256 * 256 + 3 * 4


def test_the_ratios_come_with_the_counts_of_each() -> None:
    found = measure(TINY, 1, silent)
    assert [result.name for result in found.results] == ["vanilla/plain", "train/plain"]
    assert [note.split(":")[0] for note in found.notes] == ["train", "plain", "vanilla"]
    assert all("operators" in note and "page faults" in note for note in found.notes)
