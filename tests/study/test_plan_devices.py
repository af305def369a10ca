"""Passes and duties against the work that the paper's table counts, and the files that measurements come in."""

import json
from dataclasses import replace

import pytest

from conadv.core.catalog import METHODS
from conadv.core.roles import Role
from conadv.study.plan.devices import DEVICES, MODELS, Device, ModelSize, PassTimes, duty_seconds
from conadv.study.plan.measured import read_measurement, times_in
from conadv.study.plan.request import PlanRequest

UNIT = PassTimes(1.0, 1.0, 1.0)


@pytest.mark.parametrize(("method", "work"), [("vanilla", 3), ("disadv", 8), ("conadv", 8), ("recycled", 6)])
def test_work_of_a_method_with_passes_of_one(method, work) -> None:
    assert sum(duty_seconds(METHODS[method], UNIT, 1, attack_steps=1, full_attack=False).values()) == work


def test_each_duty_counts_its_own_passes() -> None:
    times = PassTimes(forward=1.0, input_backward=10.0, weight_backward=100.0, pixel_backward=4.0, overhead=1000.0)
    learn, recycle = 3000 + 2 * 107, 3000 + 2 * 111
    clean, adv, attack = Role.CLEAN, Role.ADV, Role.ATTACK
    assert duty_seconds(METHODS["vanilla"], times, 2, 1, False) == {clean: learn}
    assert duty_seconds(METHODS["recycled"], times, 2, 1, False) == {clean: recycle, adv: learn}
    expected = {clean: learn, adv: learn, attack: 3 * (2000 + 22)}
    assert duty_seconds(METHODS["conadv"], times, 2, 3, False) == expected
    assert duty_seconds(METHODS["disadv"], times, 2, 3, True)[attack] == 3 * recycle
    assert times.backward(2) == 2000 + 2 * 106


def test_a_method_of_the_future_is_timed_by_its_row() -> None:
    """Two forward and backward passes to learn once, the second of them as long as the first."""
    times = PassTimes(forward=1.0, input_backward=10.0, weight_backward=100.0, pixel_backward=4.0, overhead=1000.0)
    twice = replace(METHODS["vanilla"], name="twice", passes={Role.CLEAN: 6})
    assert duty_seconds(twice, times, 2, 1, False) == {Role.CLEAN: 6000 + 2 * 2 * 107}


def test_a_device_does_its_share_of_the_peak() -> None:
    times = Device(1000.0, 0.5, overhead=7.0).times(ModelSize(1, 1, forward_flops=50.0, pixel_flops=5.0))
    assert times == PassTimes(0.1, 0.1, 0.1, pixel_backward=0.01, overhead=7.0)


@pytest.mark.parametrize(("device", "images_per_second"), [("v100", 1200), ("a100", 2470)])
def test_the_table_gives_back_the_throughput_it_was_made_from(device, images_per_second) -> None:
    seconds = DEVICES[device].times(MODELS["resnet50"]).passes(3, 256, to_pixels=False)
    assert 256 / seconds == pytest.approx(images_per_second, rel=0.03)


def test_a_model_of_unknown_size_cannot_be_timed() -> None:
    with pytest.raises(ValueError, match="--flops"):
        DEVICES["a100"].times(ModelSize(1, 1))


def measurement(**changes: object) -> dict[str, object]:
    entries = {
        "forward": {"seconds_per_image": 0.25},
        "input_backward": {"seconds_per_image": 0.5},
        "weight_backward": {"seconds_per_image": 1},
        "update": {"seconds": 2.0},
        "recycled/vanilla": {"ratio": 2.0, "low": 1.9, "high": 2.1, "n": 5},
    } | changes
    return {"machine": {}, "results": [{"name": name, **entry} for name, entry in entries.items() if entry is not None]}


def test_times_are_found_among_the_results(tmp_path) -> None:
    path = tmp_path / "step.json"
    path.write_text(json.dumps(measurement()))
    assert PlanRequest(**times_in(read_measurement(path))).times == PassTimes(0.25, 0.5, 1.0, update=2.0)


def test_a_measurement_without_a_pass_names_the_flag_for_it() -> None:
    with pytest.raises(ValueError, match=r"no weight_backward.*--weight-backward"):
        times_in(measurement(weight_backward=None))


@pytest.mark.parametrize("entry", [{"seconds": 1.0}, {"seconds_per_image": "1"}, {"seconds_per_image": True}])
def test_a_pass_without_its_number_is_named(entry) -> None:
    with pytest.raises(ValueError, match='"forward" needs a number "seconds_per_image"'):
        times_in(measurement(forward=entry))


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"{}", b'{"results": 1}', b'{"results": [1]}', b"\xff\xfe", b'{"results": null}', b"[" * 10**5],
)
def test_files_that_hold_no_measurement(tmp_path, content) -> None:
    path = tmp_path / "step.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="conadv bench --json") as error:
        read_measurement(path)
    assert "\n" not in str(error.value)


def test_a_file_that_is_not_there(tmp_path) -> None:
    with pytest.raises(ValueError, match="cannot read"):
        read_measurement(tmp_path / "none.json")
