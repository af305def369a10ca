"""Step, attack and lars: that the candidates do the same work, and what is reported of them. No time is asserted."""

from __future__ import annotations

import sys

import pytest
import torch
import torch.nn.functional as F

from conadv.study.bench import attack, extra, lars, step
from conadv.study.bench.alternate import Lap
from conadv.study.bench.machine import cores, one_core
from conadv.study.bench.result import Ratio, Time
from conadv.study.bench.workload import METHODS, Workload, delay_of, duties_of
from conadv.study.plan import times_in

TINY = Workload("resnet8", width=4, chunk_size=6, image_size=8)


def quiet(done: int, total: int) -> None:
    """Nobody watches."""


def names(findings) -> list[str]:
    return [result.name for result in findings.results]


def gradients(model: torch.nn.Module) -> list[torch.Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@pytest.fixture(scope="module")
def found_step():
    return step.measure(TINY, 2, quiet)


def test_step_compares_every_method_with_vanilla_and_vanilla_with_the_plain_loop(found_step) -> None:
    ratios = [result.name for result in found_step.results if isinstance(result, Ratio)]
    assert ratios == ["vanilla/plain", "train/plain", "disadv/vanilla", "conadv/vanilla", "recycled/vanilla"]
    assert {result.spread.n for result in found_step.results[:2]} == {4}  # a small difference needs more rounds
    assert {result.spread.n for result in found_step.results[2:]} == {2}


def test_operations_are_those_of_the_method(found_step) -> None:
    # Forward 1, input gradients 1, weight gradients 1; the first layer's input gradient is small but not nothing.
    flops = {result.name: result.flops for result in found_step.results if isinstance(result, Ratio)}
    assert flops["disadv/vanilla"] == flops["conadv/vanilla"] == pytest.approx(8 / 3, rel=0.05)
    assert flops["recycled/vanilla"] == pytest.approx(6 / 3, rel=0.05)


def test_the_planner_finds_the_passes(found_step) -> None:
    entries = [result.to_json() for result in found_step.results]
    times = times_in({"results": entries})
    assert set(times) == {"forward", "input_backward", "weight_backward", "pixel_backward", "update"}
    assert times["forward"] > 0
    assert times["pixel_backward"] >= 0


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
    assert isinstance(pixels, Time) and pixels.spread.median == 0.0


def test_vanilla_and_the_plain_loop_take_the_same_step(monkeypatch) -> None:
    built = []
    monkeypatch.setattr(Workload, "build", remembering(built, Workload.build))
    for run in step._plainest(TINY).values():
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


def test_foolbox_and_ours_make_the_same_twins() -> None:
    foolbox = extra.load("foolbox")
    images, _ = TINY.pixels()
    runs = attack._attacks(foolbox, TINY.build().eval(), TINY.pixels())
    ours = runs["pgd"]()
    assert (ours - images).abs().max() > 0
    torch.testing.assert_close(ours, runs["foolbox-unchecked"]())
    torch.testing.assert_close(ours, runs["foolbox"]()[1])


def test_the_naive_step_learns_from_both() -> None:
    model, (images, labels) = TINY.build(), TINY.pixels()
    attack._naive_step(extra.load("foolbox"), model, (images, labels))()
    reference = TINY.build()
    twins = attack._attacks(extra.load("foolbox"), TINY.build().eval(), (images, labels))["pgd"]()
    (0.5 * F.cross_entropy(reference(images), labels) + 0.5 * F.cross_entropy(reference(twins), labels)).backward()
    assert model.training
    for mine, theirs in zip(gradients(model), gradients(reference), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_attack_reports_both_ways_to_call_foolbox_and_the_naive_loop() -> None:
    found = attack.measure(TINY, 2, quiet)
    assert names(found) == ["foolbox-unchecked/pgd", "foolbox/pgd", "naive/disadv"]
    assert str(found.results[0].goal) == "≥ 1.3"


def test_lars_is_compared_with_sgd_and_the_other_library() -> None:
    found = lars.measure(TINY, 2, quiet)
    assert names(found) == ["lars/sgd", "lars/pytorch_optimizer"]
    tensors = len(list(TINY.build().parameters()))
    assert f"{tensors} tensors" in found.heartbeats[0]


def test_resnet50_has_the_tensors_that_the_goal_speaks_of() -> None:
    assert len(list(Workload("resnet50", classes=1000).build().parameters())) == 161


def test_gradients_are_the_same_before_every_update() -> None:
    model = TINY.build()
    restore = lars._restore_gradients(model)
    before = [gradient.clone() for gradient in gradients(model)]
    for gradient in gradients(model):
        gradient.zero_()
    restore()
    assert all(torch.equal(old, new) for old, new in zip(before, gradients(model), strict=True))


@pytest.mark.parametrize("name", ["foolbox", "pytorch_optimizer"])
def test_rows_that_need_an_absent_library_are_left_out_with_a_word(name, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)  # as Python marks what cannot be imported
    benchmark = {"foolbox": attack, "pytorch_optimizer": lars}[name]
    found = benchmark.measure(TINY, 1, quiet)
    assert not any(name in result.name for result in found.results)
    assert f"pip install {name}" in found.heartbeats[-1]


def test_a_library_that_is_there_but_broken_is_not_absent(tmp_path, monkeypatch) -> None:
    (tmp_path / "half_there.py").write_text("import what_it_needs")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="what_it_needs"):
        extra.load("half_there")
    assert extra.load("not_there_at_all") is None


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
    assert (method.delay, method.duties) == (delay_of(name), duties_of(name))


@pytest.mark.parametrize("sizes", [{"chunk_size": 0}, {"image_size": -1}, {"model": "my.module:net", "width": 3}])
def test_sizes_that_make_no_sense(sizes) -> None:
    with pytest.raises(ValueError, match=r"at least 1|drop it"):
        Workload(**{"model": "resnet8", **sizes})
