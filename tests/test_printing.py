"""Numbers as people read them."""

import pytest

from conadv.printing import duration, readable


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (9.96, "10 s"),
        (89.4, "89 s"),
        (90, "2 min"),
        (5340, "89 min"),
        (5400, "1 h 30 min"),
    ],
)
def test_durations_are_as_people_say_them(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("seconds", 754.2, "13 min"),
        ("images_per_second", 12345.67, "12,346"),
        ("test_top1", 91.6, "91.60 %"),
        ("train_loss", 0.55849924, "0.5585"),
        ("gap", -0.126, "-0.13 points"),
        ("epsilon", 8 / 255, "8/255"),
        ("batch_size", 98304, "98,304"),
        ("layout", None, "none"),
    ],
)
def test_a_value_has_its_unit(key, value, text):
    assert readable(key, value) == text
