"""The benchmark of steps: the candidates do the same work, and what is reported of them. No time is asserted."""

from __future__ import annotations

import pytest
import torch

from conadv.core.catalog import METHODS
from conadv.machine import usable_cores as cores
from conadv.study.bench import step
from conadv.study.bench.alternate import Lap, silent
from conadv.study.bench.ranks import one_core
from conadv.study.bench.workload import Workload

TINY = Workload("resnet8", width=4, chunk_size=6, image_size=8)


def gradients(model: torch.nn.Module) -> list[torch.Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@pytest.fixture(scope="module")
def found_step():
    return step.measure(TINY, 2, silent)


def test_step_compares_every_method_with_vanilla_and_vanilla_with_the_plain_loop(found_step) -> None:
    ratios = [result.name for result in found_step.results if result.unit == "ratio"]
    others = [f"{name}/vanilla" for name in METHODS if name != "vanilla"]
    assert ratios == ["vanilla/plain", "train/plain", *others]
    assert {result.spread.n for result in found_step.results[:2]} == {4}  # a small difference needs more rounds
    assert {result.spread.n for result in found_step.results[2:]} == {2}


def test_operations_are_those_of_the_method(found_step) -> None:
    # Forward 1, input gradients 1, weight gradients 1; the first layer's input gradient is small but not nothing.
    flops = {result.name: result.flops for result in found_step.results if result.unit == "ratio"}
    assert flops["disadv/vanilla"] == flops["conadv/vanilla"] == pytest.approx(8 / 3, rel=0.05)
    assert flops["recycled/vanilla"] == pytest.approx(6 / 3, rel=0.05)


def test_seconds_an_image_are_the_laps_by_the_chunk() -> None:
    whole = {"forward": 6.0, "to pixels": 18.0, "to weights": 29.0, "to both": 30.0, "update": 5.0}
    laps = {name: [Lap(seconds, seconds)] for name, seconds in (whole | dict.fromkeys(METHODS, 40.0)).items()}
    times = {time.name: time.spread.median for time in step._pass_times(laps, images=6)}
    passes = {"forward": 1.0, "input_backward": 2.0, "weight_backward": 2.0, "pixel_backward": 1 / 6, "update": 5.0}
    assert times == pytest.approx(passes | {f"step of {name}": 40.0 for name in METHODS})


def test_a_last_product_that_drowns_in_noise_is_nothing() -> None:
    seconds = dict.fromkeys(["forward", "to pixels", "to both", "update", *METHODS], 1.0) | {"to weights": 2.0}
    laps = {name: [Lap(value, value)] for name, value in seconds.items()}
    (pixels,) = [time for time in step._pass_times(laps, 1) if time.name == "pixel_backward"]
    assert pixels.unit == "seconds_per_image" and pixels.spread.median == 0.0


def test_vanilla_and_the_plain_loop_take_the_same_step(monkeypatch) -> None:
    built = []
    monkeypatch.setattr(Workload, "build", remembering(built, Workload.build))
    for run in step.plainest(TINY).values():
        run()
    assert len(built) == 3
    first, *others = map(gradients, built)
    assert any(part.abs().max() > 0 for part in first)
    for other in others:
        for mine, theirs in zip(first, other, strict=True):
            torch.testing.assert_close(mine, theirs)


def remembering(built: list, build):
    def remember(self, *arguments):
        model = build(self, *arguments)
        built.append(model)
        return model

    return remember


def test_steps_leave_the_weights_where_they_are() -> None:
    model = TINY.build()
    before = [parameter.clone() for parameter in model.parameters()]
    run = step.plain_step(model, TINY.pixels())
    run()
    run()
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


def test_one_core_and_one_thread_only_for_the_while() -> None:
    threads, before = torch.get_num_threads(), cores()
    with one_core():
        assert cores() == before[-1:]
        assert torch.get_num_threads() == 1
    assert (torch.get_num_threads(), cores()) == (threads, before)


def test_the_network_and_the_images_are_the_same_each_time() -> None:
    first, second = TINY.build("recycled").state_dict(), TINY.build("recycled").state_dict()
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert torch.equal(TINY.batch()[0], TINY.batch()[0])
    assert not torch.equal(TINY.batch(0)[0], TINY.batch(1)[0])
    assert TINY.batch()[0].dtype == torch.uint8
    assert torch.equal((TINY.pixels()[0] * 255).round().to(torch.uint8), TINY.batch()[0])


@pytest.mark.parametrize(("width", "channels_last"), [(4, False), (15, False), (16, True), (32, True)])
def test_narrow_networks_stay_away_from_a_kernel_that_writes_past_its_memory(width: int, channels_last: bool) -> None:
    weights = Workload("resnet8", width).build().get_parameter("conv1.weight")
    assert weights.is_contiguous(memory_format=torch.channels_last) == channels_last


@pytest.mark.parametrize("name", METHODS)
def test_methods_are_what_their_names_say(name: str) -> None:
    method = TINY.method(name, TINY.build(name))
    assert (method.delay, method.duties) == (METHODS[name].default_delay, METHODS[name].duties)


@pytest.mark.parametrize("sizes", [{"chunk_size": 0}, {"image_size": -1}, {"model": "my.module:net", "width": 3}])
def test_sizes_that_make_no_sense(sizes) -> None:
    with pytest.raises(ValueError, match=r"from 1 to 10000|drop it"):
        Workload(**{"model": "resnet8", **sizes})
