"""Passes and duties against the work that the paper's table counts, and the files that measurements come in."""

import json
import math

import pytest

from conadv.study.plan.catalogue import DEVICES, MODELS, Device, ModelSize, named_device, named_model
from conadv.study.plan.cost import PassTimes, duty_seconds, read_measurement, times_in

UNIT = PassTimes(1.0, 1.0, 1.0)


@pytest.mark.parametrize(("method", "work"), [("vanilla", 3), ("disadv", 8), ("conadv", 8), ("recycled", 6)])
def test_work_of_a_method_with_passes_of_one(method, work) -> None:
    assert sum(duty_seconds(method, UNIT, images=1, steps=1, full=False).values()) == work


def test_each_duty_counts_its_own_passes() -> None:
    times = PassTimes(forward=1.0, input_backward=10.0, weight_backward=100.0, pixel_backward=4.0, overhead=1000.0)
    learn, recycle = 3000 + 2 * 107, 3000 + 2 * 111
    assert duty_seconds("vanilla", times, 2, 1, False) == {"clean": learn}
    assert duty_seconds("recycled", times, 2, 1, False) == {"clean": recycle, "adv": learn}
    assert duty_seconds("conadv", times, 2, 3, False) == {"clean": learn, "adv": learn, "attack": 3 * (2000 + 22)}
    assert duty_seconds("disadv", times, 2, 3, True)["attack"] == 3 * recycle
    assert times.backward(2) == 2000 + 2 * 106


@pytest.mark.parametrize(
    "name", ["forward", "input_backward", "weight_backward", "pixel_backward", "overhead", "update"]
)
@pytest.mark.parametrize("value", [-1.0, math.inf, math.nan])
def test_impossible_times_are_refused(name, value) -> None:
    with pytest.raises(ValueError, match=name):
        PassTimes(**({"forward": 1.0, "input_backward": 1.0, "weight_backward": 1.0} | {name: value}))


def test_a_pass_takes_time_and_the_pixels_are_a_part_of_it() -> None:
    with pytest.raises(ValueError, match="weight_backward 0"):
        PassTimes(1.0, 1.0, 0.0)
    with pytest.raises(ValueError, match="pixel_backward 2"):
        PassTimes(1.0, 1.0, 1.0, pixel_backward=2.0)


def test_a_device_does_its_share_of_the_peak() -> None:
    times = Device(1000.0, 0.5, overhead=7.0).times(ModelSize(1, 1, forward_flops=50.0, pixel_flops=5.0))
    assert times == PassTimes(0.1, 0.1, 0.1, pixel_backward=0.01, overhead=7.0)


@pytest.mark.parametrize(("device", "images_per_second"), [("v100", 1200), ("a100", 2470)])
def test_the_table_gives_back_the_throughput_it_was_made_from(device, images_per_second) -> None:
    seconds = named_device(device).times(MODELS["resnet50"]).learning(256)
    assert 256 / seconds == pytest.approx(images_per_second, rel=0.03)


def test_names_that_are_not_in_the_tables() -> None:
    with pytest.raises(ValueError, match=r"a100.*--measured"):
        named_device("abacus")
    with pytest.raises(ValueError, match=r"resnet50.*--parameters"):
        named_model("resnet1")
    with pytest.raises(ValueError, match="--flops"):
        DEVICES["a100"].times(ModelSize(1, 1))


@pytest.mark.parametrize("fields", [(0, 1), (1, 0), (1, 1, -1.0), (1, 1, 1.0, math.nan)])
def test_impossible_models_are_refused(fields) -> None:
    with pytest.raises(ValueError, match="give"):
        ModelSize(*fields)


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
    assert PassTimes(**times_in(read_measurement(path))) == PassTimes(0.25, 0.5, 1.0, update=2.0)


def test_a_measurement_without_a_pass_names_the_flag_for_it() -> None:
    with pytest.raises(ValueError, match=r"no weight_backward.*--weight-backward"):
        times_in(measurement(weight_backward=None))


@pytest.mark.parametrize("entry", [{"seconds": 1.0}, {"seconds_per_image": "1"}, {"seconds_per_image": True}])
def test_a_pass_without_its_number_is_named(entry) -> None:
    with pytest.raises(ValueError, match='"forward" needs a number "seconds_per_image"'):
        times_in(measurement(forward=entry))


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"{}", b'{"results": 1}', b'{"results": [1]}', b"\xff\xfe", b'{"results": null}']
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
