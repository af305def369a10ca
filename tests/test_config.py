"""Recipes: what they refuse and how they say so, and that nothing stands in one that nobody wrote."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import conadv
from conadv import cli, config
from conadv.config import (
    Data,
    Recipe,
    Schedule,
    dump_recipe,
    flatten,
    load_recipe,
    override,
    recipe_of_run,
)
from conadv.config.advice import ADVICE
from conadv.optim import OPTIMIZERS, RATES

DEFAULTS = flatten(Recipe())
KEYS = list(DEFAULTS)
ONE_LINE = r"\A[^\n\r\v\f\x85\u2028\u2029]{1,1000}\Z"


def refusal(work, *arguments) -> str:
    """The message with which something is refused, which must be one line."""
    with pytest.raises(ValueError, match=ONE_LINE) as caught:
        work(*arguments)
    return str(caught.value)


def accepted(work, *arguments) -> Recipe | None:
    """The recipe that something gives; None if it is refused, which must be with one line."""
    try:
        return work(*arguments)
    except ValueError as error:
        if not re.search(ONE_LINE, str(error)):
            raise
    return None


def write(folder: Path, text: str | bytes) -> Path:
    path = folder / "mine.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


# --- what a recipe holds ---


@pytest.mark.parametrize(
    ("changes", "expected"),
    [({}, 100), ({"batch_size": 50}, 0), ({"batch_size": 50, "chunk_size": 25}, 25), ({"batch_size": 200}, 100)],
)
def test_a_recipe_keeps_its_chunk_size_unless_it_does_not_divide_another_batch(changes, expected):
    assert load_recipe("digits", {"data.train_size": 200, **changes}).chunk_size == expected


def test_defaults_are_for_images_of_your_own():
    recipe = Recipe()
    assert (recipe.method, recipe.delay, recipe.epochs, recipe.chunk_size) == ("conadv", 1, 90, 0)
    assert (recipe.attack.epsilon, recipe.attack.random_start, recipe.label_smoothing) == (4 / 255, 0.8, 0.1)
    assert (recipe.optimizer.name, recipe.optimizer.lr, recipe.optimizer.weight_decay) == ("muon", 0.02, 5e-4)
    assert (recipe.schedule.decay, recipe.schedule.power) == ("poly", 2)
    assert (recipe.model, recipe.data.augment, recipe.data.train_size) == ("auto", "auto", None)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_optimizer_brings_its_rate(name):
    rate = 10.0 if name == "lars" else RATES[name]  # that of the recipe stays with its optimizer
    assert load_recipe("digits", {"optimizer.name": name}).optimizer.lr == rate
    assert load_recipe("digits", {"optimizer.name": name, "optimizer.lr": 3}).optimizer.lr == 3


def test_own_data_without_a_recipe_takes_the_defaults_and_nothing_from_the_digits():
    own = load_recipe(None, {"data.path": "photos", "seed": "3"})
    assert own == Recipe(seed=3, data=Data(path="photos"))
    assert load_recipe(None) == load_recipe(None, {"data.path": "none"}) == load_recipe("digits")
    assert load_recipe(None, {"seed": "3"}) == load_recipe("digits", {"seed": "3"})
    assert load_recipe("digits", {"data.path": "photos"}).attack.epsilon == 24 / 255


def test_values_have_the_type_of_their_field():
    recipe = load_recipe(
        "digits", {"optimizer.lr": 35, "log": "tensorboard,wandb", "deterministic": "TRUE", "pretrained": True}
    )
    assert (type(recipe.optimizer.lr), recipe.deterministic, recipe.pretrained) == (float, True, True)
    assert recipe.log == ("tensorboard", "wandb") == load_recipe("digits", {"log": ["tensorboard", "wandb"]}).log
    assert load_recipe("digits", {"pretrained": "a.safetensors"}).pretrained == "a.safetensors"
    assert load_recipe("digits", {"precision": "bf16"}).precision == "bfloat16"


def test_a_recipe_that_was_built_by_hand_is_checked_before_it_is_trained(tmp_path):
    assert "epochs" in refusal(conadv.train, Recipe(epochs=-1), tmp_path / "run")
    assert not (tmp_path / "run").exists()


# --- methods and delays ---


def test_disadv_is_conadv_without_delay():
    assert Recipe(method="disadv") == Recipe(method="conadv", delay=0)
    assert (Recipe(method="disadv").method, Recipe(method="disadv").delay) == ("disadv", 0)


@pytest.mark.parametrize(("method", "delay"), [("vanilla", 0), ("disadv", 0), ("conadv", 1), ("recycled", 1)])
def test_each_method_brings_its_delay(method, delay):
    assert Recipe(method=method).delay == load_recipe("digits", {"method": method}).delay == delay


@pytest.mark.parametrize(("method", "delay"), [("vanilla", 1), ("disadv", 1), ("recycled", 2), ("recycled", 0)])
def test_a_delay_that_the_method_does_not_have_is_refused(method, delay):
    message = refusal(load_recipe, "digits", {"method": method, "delay": str(delay)})
    assert method in message
    assert "drop --delay, or choose --method conadv" in message


def test_a_method_on_the_command_line_does_not_inherit_the_delay_of_another(tmp_path):
    path = write(tmp_path, 'method = "conadv"\ndelay = 4')
    assert load_recipe(path).delay == load_recipe(path, {"method": "conadv"}).delay == 4
    assert load_recipe(path, {"method": "disadv"}).delay == 0
    vanilla = write(tmp_path, dump_recipe(Recipe(method="vanilla")))
    assert load_recipe(vanilla, {"method": "conadv"}) == Recipe()


# --- what is refused, with the field to change ---


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"attack.epsilon": -1 / 255}, "attack.epsilon"),
        ({"attack.epsilon": 1.001}, "attack.epsilon 1.001: it is a fraction of the pixel range, from 0 to 1; did you"),
        ({"attack.epsilon": 256}, "attack.epsilon 256: it is a fraction of the pixel range, from 0 to 1"),
        ({"attack.step_size": 2}, "attack.step_size 2: it is a fraction of the pixel range, from 0 to 1; did you mean"),
        ({"attack.step_size": 2, "attack.direction": "noise"}, "did you mean 2/255?"),
        ({"attack.epsilon": float("nan")}, "not a number, such as 0.5 or 4/255"),
        ({"attack.epsilon": "4/0"}, "not a number"),
        ({"attack.steps": 0}, "attack.steps"),
        ({"attack.step_size": -0.1}, "attack.step_size"),
        ({"attack.targeted": 2}, "attack.targeted"),
        ({"delay": -1}, "delay"),
        ({"delay": True}, "not a whole number"),
        ({"epochs": 0}, "epochs"),
        ({"epochs": 2**63}, "epochs"),
        ({"seed": 2**63}, "seed"),
        ({"model": ""}, "model"),
        ({"layout": "\udcff"}, "UTF-8"),
        ({"method": ["conadv"]}, "method"),
        ({"method": "conadw"}, 'Did you mean "conadv"?'),
        ({"log": "tensorboard,wandbe"}, "did you mean wandb?"),
        ({"batch_size": 100, "chunk_size": 64}, "--chunk-size"),
        ({"chunk_size": 50, "data.copies": 4}, "--data.copies"),
        ({"epochs": 10, "schedule.warmup_epochs": 11}, "--schedule.warmup-epochs"),
        *(
            ({"schedule.warmup_epochs": text}, "from 0% to 100%")
            for text in ("101%", "-1%", "nan%", "%", "-3", 10**400)
        ),
        ({"schedule.power": 0}, "schedule.power"),
        ({"optimizer.lr": 0}, "optimizer.lr"),
        ({"optimizer.name": "sgd", "schedule.end_lr": 1}, "schedule.end_lr 1 is above optimizer.lr 0.1: lower it"),
        ({"data.name": "digits", "data.path": "x"}, "--data.path"),
        ({"data.views": "three"}, "--data.augment"),
        ({"adv_weight": 1}, "--twin-branch main"),
        ({"checkpoint.keep": 0}, "checkpoint.keep"),
    ],
)
def test_a_value_that_cannot_be_names_its_field(changes, says):
    assert says in refusal(load_recipe, "digits", changes)


@pytest.mark.parametrize("key", [key for key, value in DEFAULTS.items() if type(value) in (int, float)])
@pytest.mark.parametrize("giant", ["1" + "0" * 5000, "1e308", "1e39", "inf", "-1e-300", "-1"])
def test_every_number_has_a_bound_that_float32_and_int64_hold(key, giant):
    message = refusal(load_recipe, None, {key: giant, "data.path": "x"})
    assert key in message or config.flag(key) in message


@pytest.mark.parametrize(
    "changes",
    [
        {"attack.norm": "l2", "attack.epsilon": 3, "attack.step_size": 4},
        {"attack.step_size": 2, "attack.direction": "raw"},
        {"attack.step_size": 2, "attack.direction": "unit"},
    ],
)
def test_an_l2_norm_may_be_larger_than_the_range_of_a_pixel(changes):
    assert flatten(load_recipe("digits", changes)).items() >= changes.items()


def test_the_radius_of_an_evaluation_gets_the_same_advice(tmp_path, capsys):
    (tmp_path / "config.toml").write_text(config.dump_recipe(Recipe()))
    assert cli.main(["eval", str(tmp_path), "--robust", "--epsilon", "8"]) == 2
    assert (
        "--epsilon 8: it is a fraction of the pixel range, from 0 to 1; did you mean 8/255?" in capsys.readouterr().err
    )


def test_edges_of_ranges_are_inside():
    for key, value in (("attack.epsilon", 0), ("attack.epsilon", 1), ("seed", 2**63 - 1), ("chunk_size", 1)):
        assert flatten(load_recipe("digits", {key: value}))[key] == value
    assert load_recipe("digits", {"epochs": 36, "schedule.warmup_epochs": 36}).schedule.warmup_epochs == 36
    assert Schedule(warmup_epochs="100%").warmup_steps(360, 36) == 360


@pytest.mark.parametrize("text", ["4/255", "24/255", "1/3", "0/1", "0.03125", "8.5/255", "255/255"])
def test_fractions_are_exact(text, tmp_path):
    above, _, below = text.partition("/")
    exact = float(Fraction(above) / Fraction(below or 1))
    assert load_recipe("digits", {"attack.epsilon": text}).attack.epsilon == exact
    assert load_recipe(write(tmp_path, f'attack.epsilon = "{text}"')).attack.epsilon == exact


# --- a warm-up in epochs or in percent ---


@pytest.mark.parametrize(
    ("given", "kept"),
    [("30%", "30%"), ("30.0%", "30%"), ("2.50%", "2.5%"), ("0%", "0%"), ("-0%", "0%"), ("1e1%", "10%"), ("30", 30)],
)
def test_a_share_of_the_run_is_kept_in_one_form(given, kept, tmp_path):
    recipe = load_recipe("digits", {"schedule.warmup_epochs": given})
    assert recipe.schedule.warmup_epochs == kept
    assert load_recipe(write(tmp_path, dump_recipe(recipe))) == recipe


@pytest.mark.parametrize(
    ("warmup", "steps", "epochs", "expected"),
    [
        ("30%", 120, 120, 36),
        (36, 120, 120, 36),
        ("20%", 970, 10, 194),
        (2, 970, 10, 194),
        ("30%", 5, 5, 2),
        ("1%", 9, 3, 0),
        (0.5, 30, 3, 5),
        ("41%", 1300, 100, 533),
    ],
)
def test_a_warm_up_in_steps(warmup, steps, epochs, expected):
    assert Schedule(warmup_epochs=warmup).warmup_steps(steps, epochs) == expected


# --- files ---


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("batch_size = \n", "line 1"),
        ("seed = 1\nseed = 2\n", "line 2"),
        ("seed = 0x" + "f" * 9000, "digits"),
        ("seed = " + "9" * 9000, "digits"),
        ("batchsize = 3", "did you mean batch_size?"),
        ("lr = 3", "did you mean optimizer.lr?"),
        ("epsilon = 0.1", "did you mean attack.epsilon?"),
        ("[atack]\nepsilon = 0.1", "did you mean attack.epsilon?"),
        ("[attack]\nepsilom = 0.1", "did you mean attack.epsilon?"),
        ('"attack.epsilon" = 0.1', "write [attack]"),
        ("[attack.epsilon]\nx = 1", "attack.epsilon"),
        ("attack = 3", "[attack]"),
        ("[[attack]]\nsteps = 1", "[attack]"),
        ("[method]\nname = 1", "method"),
        ("delay = true", "a whole number"),
        ("batch_size = [64]", "batch_size"),
        ("seed = 2020-01-01", "a whole number"),
        ("optimizer.lr = nan", "a number"),
        ('model = "os:system"', "--model"),
        ('data.path = "os:system"', "--data.path"),
        ('method = "\\u001b[31m\\u202e"', r"\x1b"),
        (b"\xff\xfe\x00", "UTF-8"),
        (b"#" + b" " * 1_000_000, "larger than"),
        ("seed = " + "[" * 100_000, "brackets"),
    ],
)
def test_a_file_that_is_wrong_says_where_and_how(content, says, tmp_path):
    message = refusal(load_recipe, write(tmp_path, content))
    assert says in message
    assert "mine.toml" in message


@pytest.mark.parametrize("key", [key for key in ADVICE if key not in KEYS])
def test_a_field_that_left_and_a_flag_of_other_programs_get_advice(key, tmp_path):
    table, _, name = key.rpartition(".")
    message = refusal(load_recipe, write(tmp_path, (f"[{table}]\n" if table else "") + f"{name} = 1"))
    if key != "data":  # a table
        assert ADVICE[key] in message
        assert ADVICE[key] in refusal(load_recipe, "digits", {key: 1})


def test_a_missing_recipe_names_the_nearest(tmp_path):
    message = refusal(load_recipe, "digit")
    assert "no such file" in message
    assert "did you mean digits?" in message
    assert "nowhere.toml" in refusal(load_recipe, tmp_path / "nowhere.toml")
    assert "directory" in refusal(load_recipe, tmp_path)
    assert "directory" in refusal(load_recipe, "")


@pytest.mark.parametrize("name", ["x" * 5000, "a\0b", "\udcff.toml", "a\nb.toml", "..", "~"])
def test_names_that_no_file_can_have_are_refused(name):
    refusal(load_recipe, name)
    refusal(recipe_of_run, name)


def test_a_file_that_may_not_be_read_says_so(tmp_path, monkeypatch):
    path = write(tmp_path, "seed = 1")

    def locked(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", locked)
    assert "Permission denied" in refusal(load_recipe, path)


def test_a_built_in_name_wins_over_a_file_in_the_folder(tmp_path, monkeypatch):
    (tmp_path / "digits").write_bytes(b"\xef\xbb\xbfseed = 7\r\n")  # a byte order mark does no harm
    (tmp_path / "own").write_text("seed = 8")
    monkeypatch.chdir(tmp_path)
    assert [load_recipe(name).seed for name in ("digits", "./digits", "own")] == [0, 7, 8]


def test_an_installed_package_carries_its_recipes_and_config_needs_only_the_catalogs(tmp_path):
    source, package = Path(conadv.__file__).parent, tmp_path / "conadv"
    shutil.copytree(source / "config", package / "config")
    catalogs = ("sinks", "atomic", "catalog", "printing", "roles", "optim/__init__")
    for module in catalogs:
        (package / module).parent.mkdir(exist_ok=True)
        shutil.copy(source / f"{module}.py", package / f"{module}.py")
    (package / "__init__.py").touch()
    (package / "recipes").mkdir()
    (package / "recipes" / "only.toml").write_text("seed = 7")
    program = "from conadv.config import *; print(recipe_names(), load_recipe('only').seed)"
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "['only'] 7\n"


# --- flags over files ---


def test_none_is_written_as_none():
    recipe = load_recipe("digits", {"max_steps": 5, "layout": "clean | adv"})
    assert recipe.max_steps == 5
    assert override(recipe, {"max_steps": "none", "layout": None}) == load_recipe("digits")


def test_code_to_import_comes_from_a_flag_alone(tmp_path):
    path = write(tmp_path, 'model = "my.models:small"')
    assert "--model 'my.models:small'" in refusal(load_recipe, path)
    assert load_recipe(path, {"model": "other.models:large"}).model == "other.models:large"
    assert load_recipe("digits", {"model": "my.models:small"}).model == "my.models:small"


def test_own_data_takes_nothing_from_the_digits(tmp_path):
    assert load_recipe("digits", {"data.path": "/data"}).data == Data(path="/data", augment="none")
    assert load_recipe("digits", {"data.path": "/data", "data.train_size": "500"}).data.train_size == 500
    # Data that only moved is still the same data; other data is not.
    path = write(tmp_path, '[data]\npath = "/data"\ntrain_size = 500\nimage_size = 64')
    assert load_recipe(path, {"data.path": "/moved"}).data == Data(path="/moved", train_size=500, image_size=64)
    assert load_recipe(path, {"data.name": "synthetic"}).data == Data(name="synthetic", image_size=64)
    assert load_recipe("digits", {"data.name": "digits"}) == load_recipe("digits")


# --- run folders ---


def run_folder(folder: Path, recipe: Recipe) -> Path:
    text = dump_recipe(recipe, "conadv 0\ntorch 1")
    (folder / "config.toml").write_text(text, encoding="utf-8")
    return folder


def test_a_run_goes_on_with_its_recipe(tmp_path):
    recipe = Recipe(method="recycled", seed=5)
    run = run_folder(tmp_path, recipe)
    assert recipe_of_run(run) == recipe_of_run(run, {"seed": "5", "method": "recycled"}) == recipe
    changes = {"layout": "clean | adv", "threads": 2, "checkpoint.keep": 9, "max_steps": 7}
    assert recipe_of_run(run, changes) == override(recipe, changes)


@pytest.mark.parametrize(
    ("key", "text"), [("epochs", "121"), ("seed", "6"), ("attack.epsilon", "0"), ("data.path", "/x"), ("delay", "2")]
)
def test_a_run_that_goes_on_keeps_what_makes_its_numbers(key, text, tmp_path):
    message = refusal(recipe_of_run, run_folder(tmp_path, Recipe()), {key: text})
    assert "--" + ("data.name" if key == "data.path" else key) in message
    assert "--data.workers" in message  # what may change instead


def test_data_of_a_run_may_move(tmp_path):
    run = run_folder(tmp_path, Recipe(data=Data(path="/data")))
    assert recipe_of_run(run, {"data.path": "/moved"}).data.path == "/moved"


def test_a_run_with_code_of_its_own_asks_for_it_again(tmp_path):
    run = run_folder(tmp_path, Recipe(model="my.models:small"))
    assert "--model 'my.models:small'" in refusal(recipe_of_run, run)
    assert recipe_of_run(run, {"model": "my.models:small"}).model == "my.models:small"
    assert "--model would change" in refusal(recipe_of_run, run, {"model": "your.models:small"})


def test_a_run_of_version_0_2_names_a_field_that_left_and_what_to_do(tmp_path):
    (tmp_path / "config.toml").write_text('method = "conadv"\neval_train = "sample"\n[data]\nmemory = 1024\n')
    message = refusal(recipe_of_run, tmp_path)
    assert "eval_train" in message
    assert ADVICE["eval_train"] in message
    assert "start a new run" in message


def test_a_folder_that_is_no_run_says_so(tmp_path):
    assert "not a run folder" in refusal(recipe_of_run, tmp_path)
    assert "not a run folder" in refusal(recipe_of_run, tmp_path / "nowhere")


# --- what holds for every recipe ---

VALUES = st.one_of(
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.booleans(),
    st.sampled_from(["none", "4/255", "25%", "vanilla", "l2", "three", "cosine", "sgd", "adv", "wandb", "synthetic"]),
    st.text(),
)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory) -> Path:
    """One folder for all examples of a property."""
    return tmp_path_factory.mktemp("scratch")


@given(changes=st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=4))
@settings(deadline=None)
def test_changes_mean_what_they_say_or_are_refused_and_come_back_from_a_file(changes, scratch):
    recipe = accepted(load_recipe, "digits", changes)
    if recipe is None:
        return
    goes_along = {"method", "delay", "chunk_size", "data.name", "data.path", "data.train_size"}
    before, after = flatten(load_recipe("digits")), flatten(recipe)
    assert {key for key in KEYS if after[key] != before[key]} <= changes.keys() | goes_along
    for key in changes.keys() - goes_along:
        assert (
            str(after[key]) == str(changes[key]) or after[key] in (None, True, False, ()) or type(after[key]) is float
        )
    code = {key: after[key] for key in ("model", "data.path") if after[key] is not None}
    assert load_recipe(write(scratch, dump_recipe(recipe, "conadv 1\ntorch 2")), code) == recipe


WHOLE = dump_recipe(Recipe())


@given(
    content=st.binary()
    | st.text().map(lambda text: text.encode("utf-8", "surrogatepass"))
    | st.tuples(st.integers(0, len(WHOLE)), st.integers(0, 40), st.text(max_size=8)).map(
        lambda cut: (WHOLE[: cut[0]] + cut[2] + WHOLE[cut[0] + cut[1] :]).encode("utf-8", "surrogatepass")
    )
)
@settings(deadline=None)
def test_any_bytes_and_any_damage_are_a_recipe_or_refused(content, scratch):
    recipe = accepted(load_recipe, write(scratch, content))
    if recipe is not None:
        assert load_recipe(write(scratch, dump_recipe(recipe))) == recipe
