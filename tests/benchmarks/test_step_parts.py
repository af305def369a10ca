"""The parts of a step on one rank; test_on_ranks.py has two. No time is asserted."""

from __future__ import annotations

from conadv.study.bench.contender import Contender
from conadv.study.bench.layout import role_alone
from conadv.study.bench.workload import Workload
from step_parts import PARTS, profile

TINY = Workload("resnet8", width=4, chunk_size=6, image_size=8)


def test_the_parts_of_a_profile_are_the_whole() -> None:
    step = role_alone(Contender("conadv", "conadv", "clean | adv | attack"), 1, TINY, steps=1)
    seconds = profile(step)
    assert tuple(seconds) == PARTS
    assert min(seconds["forward"], seconds["backward"], seconds["packing"], seconds["optimizer"]) > 0
    assert seconds["attack"] == 0
