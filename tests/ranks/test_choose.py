"""`--layout auto`: which layout is chosen, and that it trains as any other."""

from __future__ import annotations

import pytest
import safetensors.torch

from conadv.catalog import METHODS
from conadv.ranks.layout import choose_layout
from conadv.trainer.build import check_fit
from support import tasks, tiny


@pytest.mark.parametrize(
    ("method", "delay", "size", "chunks", "layout", "lanes"),
    [
        ("vanilla", 0, 4, 8, "clean", 4),
        ("conadv", 1, 1, 6, "clean+adv+attack", 1),
        ("conadv", 1, 3, 1, "clean | adv | attack", 1),  # one chunk cannot be shared by lanes
        ("conadv", 1, 3, 3, "clean+adv+attack", 3),  # 8 passes on each of 3 ranks, against 3 chunks of 3
        ("conadv", 1, 3, 6, "clean+adv+attack", 3),
        ("conadv", 1, 6, 2, "clean | adv | attack", 2),
        ("conadv", 1, 2, 1, "clean | adv+attack", 1),
        ("disadv", 0, 2, 1, "clean | adv+attack", 1),
        ("recycled", 1, 2, 1, "clean | adv", 1),
        ("recycled", 1, 2, 2, "clean+adv", 2),  # equal work, and no messages
        ("sam", 0, 2, 2, "clean", 2),
    ],
)
def test_the_layout_that_ends_a_step_first_is_chosen(method, delay, size, chunks, layout, lanes):
    chosen = choose_layout(METHODS[method], delay, size, chunks)
    assert (str(chosen), chosen.lanes) == (layout, lanes)


def test_whatever_number_of_ranks_fits_some_layout_is_taken_and_used_wholly():
    for method in METHODS.values():
        for size in range(1, 13):
            try:
                chosen = choose_layout(method, method.default_delay, size, 12)
            except ValueError:
                assert all(
                    size % (text.count("|") + 1) or 12 % (size // (text.count("|") + 1)) for text in method.layouts
                )
            else:
                assert chosen.world_size == size


def test_auto_takes_the_attackers_that_an_attack_of_several_steps_needs():
    recipe = tiny.recipe(attack__steps=5, layout="auto", batch_size=16, chunk_size=4)
    chosen = [check_fit(recipe, size) for size in (3, 6)]  # 24 passes, then 12 (as "clean | adv | 4 attack" has)
    assert [(str(layout), layout.lanes) for layout in chosen] == [
        ("clean+adv | 2 attack", 1),
        ("clean+adv | 2 attack", 2),
    ]
    assert str(check_fit(tiny.recipe(layout="auto", batch_size=4, chunk_size=4), 3)) == "clean | adv | attack"


def test_no_layout_that_fits_is_an_error():
    with pytest.raises(ValueError, match=r'no layout of vanilla \("clean"\) fits 5 ranks and 6 chunks'):
        check_fit(tiny.recipe(method="vanilla", layout="auto"), 5)


def test_auto_trains_as_one_process_does(pool, tmp_path):
    states = []
    for size, layout in ((1, "none"), (2, "auto")):
        out = tmp_path / f"{size}.safetensors"
        pool.run(size, tasks.take_steps, {"epochs": 1, "layout": layout, "batch_size": 4}, str(out))
        states.append(safetensors.torch.load_file(out))
    assert tiny.distance(*states) <= 1e-12
