"""`conadv plan`: what flags mean, every example of the help, and random input, which gets an answer or one line."""

from __future__ import annotations

import json
import math
import random
import shlex
from pathlib import Path

import pytest

from conadv import cli
from conadv.setting import descriptions, settings_of
from conadv.study.plan.request import PlanRequest
from examples_of_help import examples

SETTINGS = {setting.key: setting for setting in settings_of(PlanRequest)}
TEXTS = {key: descriptions(PlanRequest.__module__)[f"PlanRequest.{key}"] for key in SETTINGS}
# What an example needs beside it.
COMPANIONS = {
    "parameters": {"image_shape": (3, 8, 8), "flops": 1e9},
    "image_shape": {"parameters": 10, "flops": 1e9},
    "layouts": {"methods": ("vanilla", "recycled")},
}


def asked(capsys, *words: str) -> dict:
    assert cli.main(["plan", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))


@pytest.fixture
def step(tmp_path) -> str:
    path = tmp_path / "step.json"
    names = ("forward", "input_backward", "weight_backward")
    results = [{"name": name, "seconds_per_image": 0.5} for name in names]
    path.write_text(json.dumps({"machine": {}, "results": results}))
    return str(path)


def test_a_measurement_comes_before_the_table_and_a_flag_before_both(step, capsys) -> None:
    words = ["--measured", step, "--weight-backward", "0.25", "--update", "0.125", "--device", "h100"]
    times = asked(capsys, *words)["inputs"]["times"]
    assert (times["forward"], times["input_backward"], times["weight_backward"]) == (0.5, 0.5, 0.25)
    assert (times["update"], times["overhead"]) == (0.125, 0.0)


def test_flags_reach_the_request(capsys) -> None:
    words = '--methods vanilla recycled --layouts clean "clean | adv" --full-attack --image-shape 1 2 3 --parameters 5'
    words += ' --flops 1e9 --between "2us 25GB/s" --sweep 128 256 --epochs 1/2'
    inputs = asked(capsys, *shlex.split(words))["inputs"]
    assert (inputs["methods"], inputs["layouts"]) == (["vanilla", "recycled"], ["clean", "clean | adv"])
    assert inputs["full_attack"] is True
    assert inputs["model"] == {"parameters": 5, "image_values": 6, "forward_flops": 1e9, "pixel_flops": 0.0}
    assert inputs["machine"]["between"]["bandwidth"] == 25e9
    assert (inputs["sweep"], inputs["epochs"]) == ([128, 256], 0.5)


def test_help_teaches_every_input(capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert cli.main(["plan", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for key, setting in SETTINGS.items():
        assert f"{setting.flag} " in text
        assert " ".join(TEXTS[key].split()[:3]) in text


@pytest.mark.parametrize(
    ("key", "words"), [(key, words) for key, text in TEXTS.items() for words in examples(text)], ids=str
)
def test_every_example_of_the_help_is_accepted(key: str, words: list[str]) -> None:
    setting = SETTINGS[key]
    value = setting.parse(words if setting.length is not None else " ".join(words))
    assert getattr(PlanRequest(**COMPANIONS.get(key, {}), **{key: value}), key) == value


def test_there_are_examples() -> None:
    assert {"inside", "between", "image_shape", "layouts"} <= {key for key in TEXTS if examples(TEXTS[key])}


# --- bad input ---


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--nodes", "0"], "change --nodes"),
        (["--nodes", "many"], "a whole number"),
        (["--nodes", "9" * 5000], "change --nodes"),
        (["--image-shape", "3", "8"], "3 values"),
        (["--methods", "conadw"], "did you mean conadv?"),
        (["--layouts", "clean"], "no layout given fits disadv"),
        (["--nods", "3"], "--nodes"),
        (["--sweep", "65"], "65 is not a whole number of chunks"),
        (["--measured", "nowhere.json"], "cannot read nowhere.json"),
        (["--plot", "plan.txt"], ".png"),
        (["--validate"], "--validate"),
    ],
)
def test_mistakes_get_one_line(words, says, capsys) -> None:
    assert cli.main(["plan", *words]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("error: ") and says in err


@pytest.mark.parametrize("value", [math.nan, math.inf, 0.0, 1e300, -1.0, 10**400], ids=lambda value: f"{value}"[:6])
def test_a_measurement_of_impossible_times_gets_one_line(value, step, capsys) -> None:
    document = json.loads(Path(step).read_text())
    document["results"][0]["seconds_per_image"] = value
    Path(step).write_text(json.dumps(document))
    assert cli.main(["plan", "--measured", step]) == 2
    assert "forward is" in capsys.readouterr().err


NUMBERS = ["0", "1", "2", "3", "7", "64", "96", "4096", "65536", "1e3", "0.5", "-1", "1e-12", "1e-300", "1e300", "1e6"]
NUMBERS += ["inf", "-inf", "nan", "none", "", "x", "9" * 30, "1000000", "1000001", "1e12", "0x10", "1_000", "٣", "1/3"]
LINKS = ["free", "nvlink3", "2us 25GB/s", "0s 1e-6MB/s", "1e6s 1MB/s", "1e999s 1GB/s", "0ns 0GB/s", "2us", ""]
LAYOUTS = ["clean", "clean+adv", "clean | adv", "clean|adv|attack", "clean+adv+attack", "adv | clean", "clean |", "|"]


def random_words(draw: random.Random) -> list[str]:
    words = []
    for setting in draw.sample(list(SETTINGS.values()), draw.randint(1, 5)):
        if setting.kind is bool:
            words.append(setting.flag)
            continue
        pool = [*setting.choices, "x"] if setting.choices else NUMBERS
        pool = {"inside": LINKS, "between": LINKS, "layouts": LAYOUTS}.get(setting.key, pool)
        count = 1 if setting.length is None else setting.length or draw.randint(1, 3)
        words += [setting.flag, *(draw.choice(pool) for _ in range(count))]
    return words


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3))])
def test_random_input_gets_an_answer_or_one_line(seed: int, capsys) -> None:
    draw = random.Random(seed)
    statuses = []
    for _ in range(40):
        words = random_words(draw)
        as_json = draw.random() < 0.5
        statuses.append(cli.main(["plan", "--samples", "4", *words, *(["--json"] if as_json else [])]))
        out, err = capsys.readouterr()
        if statuses[-1] == 2:
            assert (out, err.count("\n")) == ("", 1), words
        else:
            assert (statuses[-1], err) == (0, ""), words
            assert not any(word in ("nan", "inf") for word in out.split()), words
            if as_json:
                json.loads(out, parse_constant=lambda word, words=words: pytest.fail(f"{words}: {word}"))
    assert {0, 2} == set(statuses)
