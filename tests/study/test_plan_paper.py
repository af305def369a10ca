"""Calibrated on two figures of the paper, the plan predicts the others as docs/planning.md says."""

import json
import math
import re
from pathlib import Path

import pytest

from conadv.study.plan import render_validation, validate

DOCS = Path(__file__).parents[2] / "docs" / "planning.md"


def prediction(method: str, batch_size: int, unit: str, layout: str | None = None):
    (found,) = [
        prediction
        for prediction in validate().predictions
        if (prediction.published.method, prediction.published.batch_size, prediction.published.unit)
        == (method, batch_size, unit)
        and not prediction.published.same_cores
        and layout in (None, prediction.published.layout)
    ]
    return found


def test_the_calibration_gives_back_its_two_figures() -> None:
    assert prediction("vanilla", 2048, "images/ms").predicted == pytest.approx(75.7, rel=1e-9)
    assert prediction("vanilla", 32768, "s").predicted == pytest.approx(622, rel=1e-9)


@pytest.mark.parametrize(
    ("method", "batch_size", "unit", "published", "allowed"),
    [
        ("conadv", 2048, "images/ms", 71.3, 0.065),
        ("disadv", 2048, "images/ms", 36.1, 0.285),
        ("conadv", 32768, "s", 677, 0.085),
        ("disadv", 32768, "s", 1191, 0.135),
    ],
)
def test_published_figures_are_met_as_closely_as_the_docs_say(method, batch_size, unit, published, allowed) -> None:
    found = prediction(method, batch_size, unit)
    assert found.published.value == published
    assert abs(found.predicted / published - 1) < allowed


def test_disadv_is_five_thirds_of_vanilla_but_for_the_reduction() -> None:
    # By hand: a step of 2048/75.7 ms, of which half of a reduction over 1024 cores shows: 2 × 10 levels of 1 µs and
    # 2 × 102.2 MB at 83 GB/s. The rest of it are three passes; disadv takes five.
    vanilla = 2048 / 75.7
    shown = 0.5 * (2 * 10 * 1e-3 + 2 * 4 * 25_557_032 / 83e9 * 1e3)
    shown_twice_the_cores = shown + 0.5 * 2 * 1e-3
    step = (vanilla - shown) * 5 / 3 + shown_twice_the_cores
    assert prediction("disadv", 2048, "images/ms").predicted == pytest.approx(2048 / step, rel=1e-6)
    full = (vanilla - shown) * 2 + shown_twice_the_cores
    assert prediction("disadv", 2048, "images/ms").full_attack == pytest.approx(2048 / full, rel=1e-6)


def test_conadv_takes_the_time_of_vanilla() -> None:
    steps = 90 * math.floor(1_281_167 / 32768)
    assert steps == 3510
    assert prediction("conadv", 32768, "s").predicted == pytest.approx(622, rel=1e-3)


def test_the_page_shows_what_the_command_prints() -> None:
    assert render_validation(validate()) in DOCS.read_text(encoding="utf-8")


def test_the_page_states_the_four_deviations_in_words() -> None:
    text = DOCS.read_text(encoding="utf-8").replace("−", "-")
    for method, batch_size, unit in (
        ("conadv", 2048, "images/ms"),
        ("disadv", 2048, "images/ms"),
        ("conadv", 32768, "s"),
        ("disadv", 32768, "s"),
    ):
        assert re.search(rf"{prediction(method, batch_size, unit).deviation:+.1f} %".replace("+", r"\+"), text)


def test_it_is_one_json_object() -> None:
    document = validate().to_json()
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    assert {"inputs", "rows"} == document.keys()
    assert len(document["rows"]) == len(validate().predictions)
