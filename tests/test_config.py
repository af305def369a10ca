"""Recipes: what they refuse and how they say so, and that nothing stands in one that nobody wrote."""

from __future__ import annotations

import dataclasses
import re
import shutil
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conadv import config
from conadv.config import (
    Attack,
    Checkpoint,
    Data,
    Recipe,
    Schedule,
    Setting,
    dump_recipe,
    flatten,
    load_recipe,
    override,
    recipe_of_run,
    sealed,
)

KEYS = list(config.settings())
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


def test_defaults_are_the_papers_for_photographs():
    recipe = Recipe()
    assert (recipe.method, recipe.delay, recipe.epochs, recipe.chunk_size) == ("conadv", 1, 90, 0)
    assert (recipe.attack.epsilon, recipe.attack.random_start, recipe.label_smoothing) == (4 / 255, 0.8, 0.1)
    assert (recipe.optimizer.name, recipe.optimizer.momentum, recipe.optimizer.weight_decay) == ("lars", 0.9, 5e-4)
    assert (recipe.schedule.decay, recipe.schedule.power) == ("poly", 2)
    assert (recipe.model, recipe.data.augment, recipe.data.train_size) == ("auto", "auto", None)


def test_own_data_without_a_recipe_takes_the_defaults_and_nothing_from_the_digits():
    own = load_recipe(None, {"data.path": "photos", "seed": "3"})
    assert own == Recipe(seed=3, data=Data(path="photos"))
    assert own.attack.epsilon == 4 / 255
    assert load_recipe(None) == load_recipe(None, {"data.path": "none"}) == load_recipe("digits")
    assert load_recipe(None, {"seed": "3"}) == load_recipe("digits", {"seed": "3"})
    assert load_recipe("digits", {"data.path": "photos"}).attack.epsilon == 24 / 255


def test_digits_is_the_regime_in_which_the_effect_shows():
    recipe = load_recipe("digits")
    assert (recipe.batch_size, recipe.chunk_size, recipe.epochs, recipe.data.train_size) == (100, 100, 120, 100)
    assert (recipe.optimizer.name, recipe.optimizer.lr, recipe.label_smoothing) == ("lars", 10, 0.1)
    assert (recipe.schedule.warmup_epochs, recipe.schedule.decay, recipe.schedule.power) == ("30%", "poly", 2)
    assert (recipe.model, recipe.width, recipe.attack.epsilon) == ("resnet8", None, 24 / 255)
    assert (recipe.data.name, recipe.data.augment) == ("digits", "none")


def test_recipes_are_frozen_and_hashable():
    recipe = Recipe()
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe.delay = 3  # type: ignore[misc]
    assert hash(recipe) == hash(Recipe())


def test_whole_numbers_become_floats_where_floats_belong():
    assert type(Recipe(adv_weight=1, twin_branch="main").adv_weight) is float
    assert type(load_recipe("digits", {"optimizer.lr": 35}).optimizer.lr) is float


@pytest.mark.parametrize("key", KEYS)
def test_every_field_has_a_text_that_ends_a_sentence(key):
    assert re.fullmatch(r"\S.*[.)]", config.description(key))


# --- methods and delays ---


def test_disadv_is_conadv_without_delay():
    assert Recipe(method="disadv") == Recipe(method="conadv", delay=0)
    assert (Recipe(method="disadv").method, Recipe(method="disadv").delay) == ("disadv", 0)


@pytest.mark.parametrize(("method", "delay"), [("vanilla", 0), ("disadv", 0), ("conadv", 1), ("recycled", 1)])
def test_each_method_brings_its_delay(method, delay):
    assert Recipe(method=method).delay == delay
    assert load_recipe("digits", {"method": method}).delay == delay


@pytest.mark.parametrize(("method", "delay"), [("vanilla", 1), ("disadv", 1), ("recycled", 2), ("recycled", 0)])
def test_a_delay_that_the_method_does_not_have_is_refused(method, delay):
    message = refusal(load_recipe, "digits", {"method": method, "delay": str(delay)})
    assert method in message
    assert "--delay" in message
    assert "--method conadv" in message


def test_a_method_on_the_command_line_does_not_inherit_the_delay_of_another(tmp_path):
    path = write(tmp_path, 'method = "conadv"\ndelay = 4')
    assert load_recipe(path).delay == 4
    assert load_recipe(path, {"method": "conadv"}).delay == 4
    assert load_recipe(path, {"method": "disadv"}).delay == 0
    vanilla = write(tmp_path, dump_recipe(Recipe(method="vanilla")))
    assert load_recipe(vanilla, {"method": "conadv"}) == Recipe()


# --- ranges, each with the flag to change ---


@pytest.mark.parametrize(
    ("build", "flag"),
    [
        (lambda: Attack(epsilon=-1 / 255), "--attack.epsilon"),
        (lambda: Attack(epsilon=1.001), "--attack.epsilon"),
        (lambda: Attack(epsilon=float("nan")), "--attack.epsilon"),
        (lambda: Attack(epsilon="4/0"), "--attack.epsilon"),
        (lambda: Attack(epsilon="4/255/2"), "--attack.epsilon"),
        (lambda: Attack(steps=0), "--attack.steps"),
        (lambda: Attack(step_size=-0.1), "--attack.step-size"),
        (lambda: Attack(random_start=1.5), "--attack.random-start"),
        (lambda: Attack(targeted=1), "--attack.targeted"),
        (lambda: Recipe(delay=-1), "--delay"),
        (lambda: Recipe(delay=True), "--delay"),
        (lambda: Recipe(delay=1.0), "--delay"),
        (lambda: Recipe(epochs=0), "--epochs"),
        (lambda: Recipe(epochs=1.5), "--epochs"),
        (lambda: Recipe(epochs=2**63), "--epochs"),
        (lambda: Recipe(seed=-1), "--seed"),
        (lambda: Recipe(label_smoothing=1), "--label-smoothing"),
        (lambda: Recipe(model=""), "--model"),
        (lambda: Recipe(layout="\udcff"), "--layout"),
        (lambda: Recipe(method=["conadv"]), "--method"),
        (lambda: Recipe(batch_size=100, chunk_size=64), "--chunk-size"),
        (lambda: Recipe(data=Data(train_size=200)), "--batch-size"),
        (lambda: Recipe(epochs=10, schedule=Schedule(warmup_epochs=11)), "--schedule.warmup-epochs"),
        (lambda: Schedule(warmup_epochs="101%"), "--schedule.warmup-epochs"),
        (lambda: Schedule(warmup_epochs="-1%"), "--schedule.warmup-epochs"),
        (lambda: Schedule(warmup_epochs="nan%"), "--schedule.warmup-epochs"),
        (lambda: Schedule(warmup_epochs="%"), "--schedule.warmup-epochs"),
        (lambda: Schedule(warmup_epochs="30"), "--schedule.warmup-epochs"),
        (lambda: Schedule(power="30%"), "--schedule.power"),
        (lambda: Schedule(power=0), "--schedule.power"),
        (lambda: Schedule(warmup_epochs=10**400), "--schedule.warmup-epochs"),
        (lambda: Data(name="digits", path="x"), "--data.path"),
        (lambda: Data(views="three", augment="none"), "--data.augment"),
        (lambda: Checkpoint(keep=0), "--checkpoint.keep"),
    ],
)
def test_a_value_out_of_range_names_its_flag(build, flag):
    assert flag in refusal(build)


def test_edges_of_ranges_are_inside():
    assert Attack(epsilon=0).epsilon == 0
    assert Attack(epsilon=1).epsilon == 1
    assert Recipe(epochs=36, schedule=Schedule(warmup_epochs=36)).epochs == 36
    assert Schedule(warmup_epochs="100%").warmup_steps(360, 36) == 360
    assert Recipe(seed=2**63 - 1).seed == 2**63 - 1
    assert Recipe(chunk_size=1).chunk_size == 1


@pytest.mark.parametrize(("wrong", "right"), [("conadw", "conadv"), ("recycle", "recycled"), ("Vanilla", "vanilla")])
def test_an_unknown_method_names_the_nearest(wrong, right):
    assert f"did you mean {right}?" in refusal(lambda: Recipe(method=wrong))


@pytest.mark.parametrize("text", ["4/255", "24/255", "1/3", "0/1", "0.03125", "8.5/255", "255/255"])
def test_fractions_are_exact(text, tmp_path):
    above, _, below = text.partition("/")
    exact = float(Fraction(above) / Fraction(below or 1))
    assert load_recipe("digits", {"attack.epsilon": text}).attack.epsilon == exact
    if "/" in text:
        assert load_recipe(write(tmp_path, f'attack.epsilon = "{text}"')).attack.epsilon == exact


# --- a warm-up in epochs or in percent ---


@pytest.mark.parametrize(
    ("given", "kept"),
    [("30%", "30%"), ("30.0%", "30%"), ("2.50%", "2.5%"), ("0%", "0%"), ("-0%", "0%"), ("1e1%", "10%")],
)
def test_a_share_of_the_run_is_kept_in_one_form(given, kept, tmp_path):
    assert Schedule(warmup_epochs=given).warmup_epochs == kept
    recipe = load_recipe("digits", {"schedule.warmup_epochs": given})
    assert recipe.schedule.warmup_epochs == kept
    path = write(tmp_path, dump_recipe(recipe))
    assert f'warmup_epochs = "{kept}"' in path.read_text()
    assert load_recipe(path) == recipe


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
        (41, 1300, 100, 533),
    ],
)
def test_a_warm_up_in_steps(warmup, steps, epochs, expected):
    assert Schedule(warmup_epochs=warmup).warmup_steps(steps, epochs) == expected


def test_a_share_goes_along_when_the_epochs_change():
    recipe = load_recipe("digits", {"epochs": "5"})
    assert recipe.schedule.warmup_steps(5, recipe.epochs) == 2
    message = refusal(load_recipe, "imagenet-32k", {"epochs": "5"})
    assert "a warm-up of 40 epochs is longer than the 5 of the run" in message
    assert "such as 30%" in message


# --- files ---


def test_a_missing_recipe_names_the_nearest(tmp_path):
    message = refusal(load_recipe, "digit")
    assert "no such file" in message
    assert "did you mean digits?" in message
    assert "nowhere.toml" in refusal(load_recipe, tmp_path / "nowhere.toml")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("batch_size = \n", "line 1"),
        ("= 3", "line 1"),
        ("seed = 1\nseed = 2\n", "line 2"),
        ("seed = 0x" + "f" * 9000, "seed"),
        ("seed = " + "9" * 9000, "digits"),
        ("batchsize = 3", "did you mean batch_size?"),
        ("lr = 3", "did you mean optimizer.lr?"),
        ("epsilon = 0.1", "did you mean attack.epsilon?"),
        ("[atack]\nepsilon = 0.1", "atack"),
        ("[attack]\nepsilom = 0.1", "did you mean attack.epsilon?"),
        ('"attack.epsilon" = 0.1', "unknown key"),
        ("[attack.epsilon]\nx = 1", "attack.epsilon"),
        ("attack = 3", "[attack]"),
        ("[[attack]]\nsteps = 1", "[attack]"),
        ("[method]\nname = 1", "method"),
        ('delay = "1"', "a whole number"),
        ("delay = true", "a whole number"),
        ("delay = 1.0", "a whole number"),
        ("batch_size = [64]", "a whole number"),
        ("seed = 2020-01-01", "a whole number"),
        ("attack.targeted = 1", "true or false"),
        ('attack.targeted = "true"', "true or false"),
        ('optimizer.lr = "10"', "a number"),
        ('schedule.warmup_epochs = "30"', "a number, from 0 to 1e6, or a share from 0% to 100%"),
        ("optimizer.lr = nan", "a number"),
        ("optimizer.lr = inf", "a number"),
        ("optimizer.lr = false", "a number"),
        ("model = 8", "a text"),
        ("attack.epsilon = 8", "from 0 to 1"),
        ('model = "os:system"', "--model"),
        ('model = "os:\\nsystem"', "--model"),
        (b"\xff\xfe\x00", "UTF-8"),
        (b"#" + b" " * 1_000_000, "larger than"),
        ("seed = " + "[" * 100_000, "brackets"),
    ],
)
def test_a_file_that_is_wrong_says_where_and_how(content, says, tmp_path):
    path = write(tmp_path, content)
    message = refusal(load_recipe, path)
    assert says in message
    assert "mine.toml" in message


def test_a_folder_is_no_recipe(tmp_path):
    assert "directory" in refusal(load_recipe, tmp_path)
    assert "directory" in refusal(load_recipe, "")


@pytest.mark.parametrize("name", ["x" * 5000, "x" * 5000 + ".toml", "a\0b", "\udcff.toml", "a\nb.toml", "..", "~"])
def test_names_that_no_file_can_have_are_refused(name):
    refusal(load_recipe, name)
    refusal(recipe_of_run, name)


def test_a_file_that_may_not_be_read_says_so(tmp_path, monkeypatch):
    path = write(tmp_path, "seed = 1")

    def locked(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", locked)
    assert "Permission denied" in refusal(load_recipe, path)


def test_a_byte_order_mark_does_no_harm(tmp_path):
    assert load_recipe(write(tmp_path, b"\xef\xbb\xbfseed = 7\r\n")).seed == 7


def test_a_built_in_name_wins_over_a_file_in_the_folder(tmp_path, monkeypatch):
    (tmp_path / "digits").write_text("seed = 7")
    (tmp_path / "own").write_text("seed = 8")
    monkeypatch.chdir(tmp_path)
    assert load_recipe("digits").seed == 0
    assert load_recipe("./digits").seed == 7
    assert load_recipe("own").seed == 8


@pytest.mark.parametrize("name", config.recipe_names())
def test_built_in_recipes_load_and_open_with_a_title(name):
    load_recipe(name)
    title = config.find_recipe(name).read_text(encoding="utf-8").splitlines()[0]
    assert title.startswith("# ")
    assert len(title) > 10


def test_an_installed_package_carries_its_recipes_and_config_needs_only_the_catalogs(tmp_path):
    package = tmp_path / "conadv"
    shutil.copytree(Path(config.__file__).parent, package / "config")
    source = Path(config.__file__).parents[1]
    modules = (
        "setting",
        "sinks",
        "atomic",
        "toml_file",
        "core/__init__",
        "catalog",
        "core/roles",
        "optim/__init__",
        "optim/catalog",
    )
    for module in modules:
        target = package / f"{module}.py"
        target.parent.mkdir(exist_ok=True)
        shutil.copy(source / f"{module}.py", target)
    (package / "__init__.py").touch()
    (package / "recipes").mkdir()
    (package / "recipes" / "only.toml").write_text("seed = 7")
    program = "from conadv.config import *; print(recipe_names(), load_recipe('only').seed)"
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "['only'] 7\n"


# --- flags over files ---


def test_flags_win_over_the_file_and_only_those_given(tmp_path):
    path = write(tmp_path, "seed = 3\nattack.epsilon = 0.25\nattack.steps = 4")
    recipe = load_recipe(path, {"attack.epsilon": "4/255", "optimizer.lr": "1e-1"})
    expected = flatten(Recipe()) | {"seed": 3, "attack.steps": 4, "attack.epsilon": 4 / 255, "optimizer.lr": 0.1}
    assert flatten(recipe) == expected


def test_an_unknown_flag_key_names_the_nearest():
    assert "did you mean attack.epsilon?" in refusal(load_recipe, "digits", {"attack.epsilom": "1"})


def test_none_is_written_as_none():
    recipe = load_recipe("digits", {"max_steps": 5, "layout": "clean | adv"})
    assert recipe.max_steps == 5
    assert override(recipe, {"max_steps": "none", "layout": None}) == load_recipe("digits")
    assert "--delay" in refusal(load_recipe, "digits", {"delay": "none"})


def test_code_to_import_comes_from_a_flag_alone(tmp_path):
    path = write(tmp_path, 'model = "my.models:small"')
    assert "--model 'my.models:small'" in refusal(load_recipe, path)
    assert load_recipe(path, {"model": "other.models:large"}).model == "other.models:large"
    assert load_recipe("digits", {"model": "my.models:small"}).model == "my.models:small"


def test_own_data_takes_nothing_from_the_digits(tmp_path):
    own = load_recipe("digits", {"data.path": "/data"})
    assert own.data == Data(path="/data", augment="none")
    assert own.data.name is None
    assert own.data.train_size is None
    assert load_recipe("digits", {"data.path": "/data", "data.train_size": "500"}).data.train_size == 500
    # Data that only moved is still the same data; other data is not.
    path = write(tmp_path, '[data]\npath = "/data"\ntrain_size = 500\nimage_size = 64')
    assert load_recipe(path, {"data.path": "/moved"}).data == Data(path="/moved", train_size=500, image_size=64)
    assert load_recipe(path, {"data.name": "synthetic"}).data == Data(name="synthetic", image_size=64)
    assert load_recipe("digits", {"data.name": "digits"}) == load_recipe("digits")


# --- run folders ---


def run_folder(folder: Path, recipe: Recipe) -> Path:
    (folder / "config.toml").write_text(dump_recipe(recipe, "conadv 0\ntorch 1"), encoding="utf-8")
    return folder


@pytest.mark.parametrize("place", [0, 12, 80, 200, -3])
def test_a_sealed_recipe_that_was_changed_is_refused(place, tmp_path):
    path = run_folder(tmp_path, Recipe()) / "config.toml"
    text = sealed(path.read_text(encoding="utf-8"))
    path.write_text(text, encoding="utf-8")
    assert recipe_of_run(tmp_path) == Recipe()
    letters = list(text)
    letters[place] = "0" if letters[place] != "0" else "1"
    path.write_text("".join(letters), encoding="utf-8")
    with pytest.raises(ValueError, match=r"damaged or was edited|recipe '"):
        recipe_of_run(tmp_path)


def test_a_sealed_recipe_is_refused_wherever_it_is_cut_off(tmp_path):
    path = run_folder(tmp_path, Recipe()) / "config.toml"
    text = sealed(path.read_text(encoding="utf-8"))
    for length in (*range(12), *range(12, len(text), 97), len(text) - 1):
        path.write_text(text[:length], encoding="utf-8")
        with pytest.raises(ValueError, match=r"damaged or was edited|recipe '"):
            recipe_of_run(tmp_path)


def test_a_run_goes_on_with_its_recipe(tmp_path):
    recipe = Recipe(method="recycled", seed=5)
    run = run_folder(tmp_path, recipe)
    assert recipe_of_run(run) == recipe
    assert recipe_of_run(run, {"seed": "5", "method": "recycled"}) == recipe
    changed = recipe_of_run(run, {"layout": "clean | adv", "threads": "2", "checkpoint.keep": "9", "max_steps": "7"})
    assert (changed.layout, changed.threads, changed.checkpoint.keep, changed.max_steps) == ("clean | adv", 2, 9, 7)


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


# What the first recipes had. Do not add to it.
FIRST = """
method delay adv_weight batch_size chunk_size epochs seed model width precision label_smoothing nonfinite skip_limit
attack.epsilon attack.step_size attack.steps attack.norm attack.direction attack.random_start attack.targeted
optimizer.name optimizer.lr optimizer.momentum optimizer.weight_decay optimizer.trust_coefficient
schedule.warmup_epochs schedule.decay schedule.power schedule.end_lr
data.name data.train_size data.image_size data.channels data.classes data.augment data.views data.damaged
"""


def test_older_checkpoints_are_considered_when_a_field_is_added():
    """List a new field in ADDED if its default does what runs did without it, else refuse their checkpoints there."""
    assert set(KEYS) - set(config.RESUMABLE) == {*FIRST.split(), *config.added_values()}


def test_a_folder_that_is_no_run_says_so(tmp_path):
    assert "not a run folder" in refusal(recipe_of_run, tmp_path)
    assert "not a run folder" in refusal(recipe_of_run, tmp_path / "nowhere")


# --- what holds for every recipe ---

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)
WHOLE_NUMBERS = st.integers(0, 1000) | st.integers(0, 10**12)
FLOATS = st.floats(0, 1) | st.floats(0, 1e6) | st.integers(0, 255).map(lambda level: level / 255)


def values_of(setting: Setting) -> st.SearchStrategy:
    """Anything that may stand in a field, by what the field says of itself."""
    if setting.choices:
        inside = st.sampled_from(setting.choices)
    else:
        any_value = {int: WHOLE_NUMBERS, float: FLOATS, bool: st.booleans(), str: TEXTS}[setting.kind]
        inside = any_value.filter(setting.rule.holds)
    return inside | st.none() if setting.optional else inside


# What these may be depends on other fields, so they are drawn with them below.
BOUND = ("method", "delay", "batch_size", "chunk_size", "epochs", "model")
FREE = [key for key in KEYS if key not in BOUND and not key.startswith("data.") and key != "schedule.warmup_epochs"]


@st.composite
def recipes(draw) -> Recipe:
    values = {key: draw(values_of(config.settings()[key])) for key in draw(st.sets(st.sampled_from(FREE)))}
    chunk, chunks = draw(st.integers(1, 1000)), draw(st.integers(1, 1000))
    method = draw(st.sampled_from(["vanilla", "disadv", "recycled", "conadv"]))
    values |= {"method": method, "chunk_size": chunk, "batch_size": chunk * chunks}
    values |= {"delay": draw(st.integers(0, 9))} if method == "conadv" else {}
    values["epochs"] = draw(st.integers(1, 500))
    share = st.floats(0, 100).map(lambda percent: f"{percent!r}%")
    values["schedule.warmup_epochs"] = draw(st.floats(0, values["epochs"]) | share)
    values["data.train_size"] = draw(st.none() | st.integers(chunk * chunks, 10**12))
    values["data.path"] = draw(st.none() | TEXTS)
    values["data.image_size"] = draw(st.none() | st.integers(1, 8192))
    return override(Recipe(), values)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory) -> Path:
    """One folder for all examples of a property."""
    return tmp_path_factory.mktemp("scratch")


@given(recipe=recipes(), header=st.sampled_from(["", "conadv 0.1.0\ntorch 2.13.0"]))
def test_a_dumped_recipe_loads_as_an_equal_one(recipe, header, scratch):
    path = write(scratch, dump_recipe(recipe, header))
    assert load_recipe(path, {"model": recipe.model}) == recipe


def meaning(setting: Setting, text: str):
    """What a person means by a text in a flag; KeyError, ValueError or ZeroDivisionError: nothing."""
    if setting.optional and text == "none":
        return None
    if setting.length is not None:
        return tuple(text.split(","))
    if setting.kind is bool:
        return {"true": True, "false": False}[text.lower()]
    if setting.percent and text.endswith("%"):
        return f"{float(text[:-1]):g}%"
    if setting.kind is float and "/" in text:
        above, below = text.split("/")
        return float(Fraction(above) / Fraction(below))
    return setting.kind(text)


NUMBERS = st.one_of(
    st.integers().map(str),
    st.floats().map(repr),
    st.tuples(st.integers(-9, 300), st.integers(-9, 300)).map(lambda pair: f"{pair[0]}/{pair[1]}"),
)
FLAG_TEXTS = st.one_of(
    NUMBERS, st.text(), st.sampled_from(["none", "true", "False", "-1", "1_000", " 5", "1e3", "--seed", "25%", "101%"])
)


@given(key=st.sampled_from(KEYS), data=st.data())
def test_a_flag_means_what_it_says_or_is_refused(key, data):
    setting = config.settings()[key]
    text = data.draw(FLAG_TEXTS | st.sampled_from(setting.choices or ("x",)))
    recipe = accepted(load_recipe, "digits", {key: text})
    if recipe is None:
        return
    before, after = flatten(load_recipe("digits")), flatten(recipe)
    assert after[key] == meaning(setting, text) or (key, text) in {("data.name", "none"), ("method", "conadv")}
    goes_along = {"method": {"delay"}, "delay": {"method"}, "data.path": {"data.name", "data.train_size"}}
    goes_along |= {"data.name": {"data.train_size"}}
    changed = {other for other in KEYS if after[other] != before[other]}
    assert changed <= {key} | goes_along.get(key, set())


TOML_VALUES = st.one_of(
    st.integers(-(2**70), 2**70).map(lambda value: (str(value), value)),
    st.floats().map(lambda value: (repr(value), value)),
    st.booleans().map(lambda value: (str(value).lower(), value)),
    st.sampled_from(
        [('"none"', "none"), ('"4/255"', "4/255"), ('"25%"', "25%"), ("[]", []), ("{}", {}), ("[1, [2]]", [1, [2]])]
    ),
    st.text("abz019-_./: é").map(lambda value: (f"'{value}'", value)),
)


@given(key=st.sampled_from(KEYS), pair=TOML_VALUES)
def test_a_value_in_a_file_is_taken_as_it_is_or_refused(key, pair, scratch):
    spelled, value = pair
    setting = config.settings()[key]
    recipe = accepted(load_recipe, write(scratch, f"{key} = {spelled}"))
    if recipe is None:
        return
    taken = flatten(recipe)[key]
    if value == "none" and setting.optional:
        assert taken is None or key == "data.name"
    elif isinstance(value, str) and setting.percent and value.endswith("%"):
        assert taken == value
    elif value == "4/255" and setting.kind is float:
        assert taken == 4 / 255
    elif setting.length is not None:
        assert taken == tuple(value if isinstance(value, list) else [value])
    else:
        assert type(value) in ((int, float) if setting.kind is float else (setting.kind,))
        assert (taken, type(taken)) == (setting.kind(value), setting.kind)


WHOLE = dump_recipe(Recipe())


@given(content=st.binary() | st.text().map(lambda text: text.encode("utf-8", "surrogatepass")))
def test_any_bytes_are_a_recipe_or_refused(content, scratch):
    check_loads_or_refuses(write(scratch, content))


@given(start=st.integers(0, len(WHOLE)), length=st.integers(0, 40), inserted=st.text(max_size=8))
def test_any_damage_to_a_recipe_is_survived_or_refused(start, length, inserted, scratch):
    damaged = WHOLE[:start] + inserted + WHOLE[start + length :]
    check_loads_or_refuses(write(scratch, damaged.encode("utf-8", "surrogatepass")))


def check_loads_or_refuses(path: Path) -> None:
    recipe = accepted(load_recipe, path)
    if recipe is not None:
        assert load_recipe(write(path.parent, dump_recipe(recipe))) == recipe
