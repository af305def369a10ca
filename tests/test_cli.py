"""The command line: what it hands on, what it prints, and with which status it ends."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

import conadv.trainer
from conadv import cli, config
from conadv.config import Data, Recipe, dump_recipe, load_recipe, override, recipe
from conadv.config.fields import spell
from conadv.task.evaluate import RobustTest
from conadv.trainer.stop import Interrupted

FIELDS = config.flatten(Recipe())
SUMMARY = {"method": "conadv", "steps": 120, "test_top1": 93.4375, "layout": None, "test_loss": 0.25}


class Commands:
    """Stands in for the commands on runs: remembers how they were called and returns the summary."""

    def __init__(self) -> None:
        self.calls: list[tuple] = []
        self.act = lambda: SUMMARY

    def module(self) -> SimpleNamespace:
        return SimpleNamespace(**{name: self._call(name) for name in ("train_recipe", "evaluate", "export")})

    def _call(self, name: str):
        def call(*arguments):
            self.calls.append((name, *arguments))
            return self.act()

        return call


@pytest.fixture
def commands(monkeypatch) -> Commands:
    stand_in = Commands()
    module = stand_in.module()
    for owner, name in ((conadv.trainer, "train"), (conadv, "trained")):
        monkeypatch.setitem(sys.modules, f"{owner.__name__}.{name}", module)
        monkeypatch.setattr(owner, name, module, raising=False)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    return stand_in


@pytest.fixture
def run(tmp_path) -> Path:
    """The folder of a run of the recipe digits with seed 3."""
    (tmp_path / "config.toml").write_text(dump_recipe(Recipe(seed=3)), encoding="utf-8")
    return tmp_path


def refusal(capsys, *words: str) -> str:
    """What is said about bad input: one line on standard error, nothing on standard output, status 2."""
    assert cli.main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    return err


# --- train ---


def test_train_without_anything_trains_the_digits(commands):
    assert cli.main(["train"]) == 0
    assert commands.calls == [("train_recipe", load_recipe("digits"), None, None, False)]


# A text of each field that is not its value in digits.toml, and others that go along where fields bound each other.
OTHERS = {
    "method": "sam", "delay": "2", "twin_branch": "main", "chunk_size": "50", "batch_size": "50", "max_steps": "7",
    "layout": "clean | adv", "attackers": "2", "model": "resnet20", "pretrained": "true", "width": "8",
    "precision": "bfloat16", "threads": "2", "log": "tensorboard,wandb", "attack.step_size": "1/255",
    "attack.norm": "l2", "attack.direction": "noise", "attack.statistics": "running", "optimizer.name": "sgd",
    "schedule.warmup_epochs": "3%", "schedule.decay": "cosine", "data.name": "synthetic", "data.path": "photos",
    "data.train_size": "200", "data.copies": "2", "data.image_size": "16", "data.augment": "crop", "data.channels": "1",
    "data.views": "three", "data.workers": "2", "data.damaged": "skip",
}  # fmt: skip
WITH = {"data.views": ["--data.augment", "crop-flip"], "data.copies": ["--chunk-size", "50"]}


@pytest.mark.parametrize("key", FIELDS)
def test_every_field_has_a_flag_that_changes_it(key, commands):
    text = OTHERS.get(key) or {bool: "true", int: "3", float: "0.25"}[type(FIELDS[key])]
    assert cli.main(["train", config.flag(key), text, *WITH.get(key, [])]) == 0
    (_, recipe, *_) = commands.calls[0]
    assert spell(config.flatten(recipe)[key]) == text != spell(config.flatten(load_recipe("digits"))[key])


def test_flags_win_over_the_file_and_only_those_given(commands, tmp_path):
    mine = tmp_path / "mine.toml"
    mine.write_text("seed = 3\nepochs = 500\n[attack]\nsteps = 4\n")
    words = ["--attack.norm", "l2", "--optimizer.lr=3", "--quiet", "--run", str(tmp_path), "--layout", "clean | adv"]
    assert cli.main(["train", str(mine), *words, "--max-steps", "none"]) == 0
    changes = {"attack.norm": "l2", "optimizer.lr": 3, "layout": "clean | adv"}
    expected = override(Recipe(), {"seed": 3, "epochs": 500, "attack.steps": 4, **changes})
    assert commands.calls == [("train_recipe", expected, tmp_path, None, True)]


def test_values_may_begin_with_a_hyphen(commands, capsys):
    assert cli.main(["train", "--data.path=-data", "--run=-out"]) == 0
    (_, recipe, folder, *_) = commands.calls[0]
    assert (recipe.data, folder) == (Data(path="-data"), Path("-out"))
    capsys.readouterr()
    assert '"-1.5" for --optimizer.lr' in refusal(capsys, "train", "--optimizer.lr", "-1.5")


@pytest.mark.parametrize(
    ("words", "on"),
    [
        ("--deterministic digits --run x", True),
        ("digits --deterministic true --run x", True),
        ("digits --deterministic=FALSE --run x", False),
        ("digits --run x --no-deterministic", False),
    ],
)
def test_a_boolean_flag_needs_no_value(words, on, commands, tmp_path):
    mine = tmp_path / "mine.toml"
    mine.write_text(f"deterministic = {str(not on).lower()}\n")
    assert cli.main(["train", *words.replace("digits", str(mine)).split()]) == 0
    assert commands.calls == [("train_recipe", Recipe(deterministic=on), Path("x"), None, False)]


def test_switches_of_a_command_take_true_and_false_too(commands, run):
    assert cli.main(["eval", "--best", str(run)]) == 0
    assert cli.main(["eval", str(run), "--best", "false", "--json=true"]) == 0
    assert [best for *_, best in commands.calls] == [True, False]


def test_words_after_two_hyphens_are_not_flags(commands, capsys):
    assert "recipe '--deterministic': no such file" in refusal(capsys, "train", "--seed", "1", "--", "--deterministic")


@pytest.mark.parametrize(
    ("words", "pretrained"),
    [
        ("--pretrained mine.toml", True),
        ("mine.toml --pretrained", True),
        ("mine.toml", False),
        ("--pretrained a.safetensors mine.toml", "a.safetensors"),
        ("mine.toml --pretrained=b", "b"),
    ],
)
def test_pretrained_takes_a_file_or_nothing(words, pretrained, commands, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.toml").write_text("seed = 7")
    assert cli.main(["train", *words.split()]) == 0
    assert commands.calls[0][1] == Recipe(seed=7, pretrained=pretrained)


# --- bad input ---


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("train digit", "did you mean digits?"),
        ("train --atack.epsilon 0.1", "did you mean --attack.epsilon?"),
        ("train --batchsize 64", "Did you mean --batch-size?"),
        ("train --lr 0.1", "did you mean --optimizer.lr?"),
        ("train --device cuda", "CUDA_VISIBLE_DEVICES"),
        (
            "train digits --gpus 8 --run x",
            "--gpus: each GPU is a process of its own: torchrun --nproc-per-node 8 -m conadv train",
        ),
        ("train --precision fp16", "not one of float32, bfloat16 (or bf16) and float64"),
        ("train --eval-train all", "drop it"),
        ("train --pretrained w.pt", "pretrained w.pt may be a pickle, which is not read: save it as safetensors"),
        ("train --pretrained=w.pth", "save it as safetensors"),
        ("train --attack 3", "--attack.epsilon"),
        ("train --width 40000", "--width"),
        ("train --optimizer.lr 1e308", "--optimizer.lr"),
        ("train --attack.epsilon 4", "from 0 to 1; did you mean 4/255?"),
        ("train --delay -1", '"-1" for --delay. Must be >= 0'),
        ("train --delay", "--delay requires an argument"),
        ("train --seed=", "--seed: '' is not a whole number"),
        ("train --seed 1 --seed 2", "--seed specified multiple times"),
        ("train --deterministic --no-deterministic", "deterministic specified multiple times"),
        ("train --determinstic", "Did you mean --deterministic?"),
        ("train digits --deterministic yes", "unexpected argument 'yes'"),
        ("train digits --deterministic=2", "--deterministic"),
        ("train digits more", "unexpected argument 'more'. See conadv train --help"),
        ("train --resume nowhere", "not a run folder"),
        ("train digits --resume RUN", "drop RECIPE"),
        ("train --run here --resume RUN", "drop RECIPE"),
        ("eval nowhere", "not a run folder"),
        ("eval", "RUN"),
        ("eval . --steps 3", "--robust"),
        ("eval . --robust --steps 0", "--steps"),
        ("eval . --autoattack", "--robust"),
        ("eval . --robust --autoattack --steps 3", "drop --steps"),
        ("eval . --seed 3", "Unknown option: --seed"),
        ("sweep study.toml --jobs", "--jobs requires an argument"),
        ("report folder -o --json", "-o requires an argument"),
        ("export . model.pt", ".safetensors"),
        ("export .", "OUT"),
        ("trian", 'Did you mean "train"?'),
        ("--vresion", "conadv --help"),
    ],
)
def test_bad_input_gets_one_line(words, says, commands, capsys, run):
    assert says in refusal(capsys, *words.replace("RUN", str(run)).split())
    assert commands.calls == []


@given(
    words=st.lists(
        st.text(max_size=6) | st.sampled_from(["train", "digits", "--seed", "--run", "--json", "-", "--", "=1"])
    )
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_no_words_make_a_traceback(words, commands):
    assert cli.main(words) in (0, 2)


# --- resume ---


def test_resume_takes_the_recipe_of_the_run(commands, run):
    assert cli.main(["train", "--resume", str(run), "--threads", "2", "--seed", "3"]) == 0
    assert commands.calls == [("train_recipe", Recipe(seed=3, threads=2), None, run, False)]


def test_resume_refuses_what_would_change_the_numbers(commands, capsys, run):
    message = refusal(capsys, "train", "--resume", str(run), "--seed", "4", "--optimizer.lr", "1", "--threads", "2")
    assert "--seed, --optimizer.lr would change" in message
    assert "--layout" in message


# --- eval, export, recipes ---


def test_eval_hands_on_the_recipe_of_the_run(commands, run, capsys):
    assert cli.main(["eval", str(run)]) == 0
    assert cli.main(["eval", str(run), "--robust", "--epsilon", "8/255", "--steps", "20"]) == 0
    words = ["--robust", "--restarts", "5", "--images", "100", "--best"]
    assert cli.main(["eval", str(run), *words]) == 0
    assert cli.main(["eval", str(run), "--robust", "--autoattack"]) == 0
    assert commands.calls == [
        ("evaluate", Recipe(seed=3), run, None, False),
        ("evaluate", Recipe(seed=3), run, RobustTest(8 / 255, "linf", 20, 2, None, False), False),
        ("evaluate", Recipe(seed=3), run, RobustTest(Recipe().attack.epsilon, "linf", 20, 5, 100, False), True),
        ("evaluate", Recipe(seed=3), run, RobustTest(Recipe().attack.epsilon, autoattack=True), False),
    ]


def test_export_hands_on_run_and_file(commands, run):
    assert cli.main(["export", str(run), "model.safetensors"]) == 0
    assert commands.calls == [("export", run, Path("model.safetensors"), "safetensors", None)]


def test_recipes_lists_names_with_their_first_line(commands, capsys):
    assert cli.main(["recipes"]) == 0
    listed = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert list(listed) == config.recipe_names()
    first = config.find_recipe("digits").read_text(encoding="utf-8").splitlines()[0]
    assert listed["digits"] == first.removeprefix("# ")


def test_version(commands, capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.split() == [importlib.metadata.version("conadv")]


# --- what is printed ---


@pytest.mark.parametrize(("epsilon", "shown"), [(24 / 255, "24/255"), (4.1 / 255, "4.1/255"), (0.1, "25.5/255")])
def test_epsilon_is_shown_in_255ths_and_stays_a_number_in_json(epsilon, shown, commands, capsys):
    commands.act = lambda: {"epsilon": epsilon}
    assert cli.main(["train"]) == 0
    assert capsys.readouterr().out.split() == ["epsilon", shown]
    assert cli.main(["train", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"epsilon": epsilon}


def test_json_is_one_object_and_nothing_else(commands, capsys):
    def noisy():
        print("progress")
        return SUMMARY | {"gap": float("nan"), "images_per_second": float("inf")}

    commands.act = noisy
    assert cli.main(["train", "--json"]) == 0
    out, err = capsys.readouterr()
    refused = {"parse_constant": lambda word: pytest.fail(f"{word} is not JSON")}
    assert json.loads(out, **refused) == SUMMARY | {"gap": None, "images_per_second": None}
    assert err == "progress\n"


def test_the_summary_is_a_line_a_figure(commands, capsys):
    commands.act = lambda: SUMMARY | {"images_per_second": 12345.67}
    assert cli.main(["train"]) == 0
    rows = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert rows.pop("images_per_second") == "12,346"
    assert rows == {"method": "conadv", "steps": "120", "test_top1": "93.44 %", "layout": "none", "test_loss": "0.25"}


@pytest.mark.parametrize("words", [["train"], ["train", "--json"]])
def test_a_rank_with_nothing_to_say_is_silent(words, commands, capsys):
    commands.act = dict
    assert cli.main(words) == 0
    assert capsys.readouterr() == ("", "")


def test_of_several_ranks_the_first_speaks_about_bad_input(commands, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr("time.sleep", raising(SystemExit(143)))  # torchrun ends the others when the first has left
    with pytest.raises(SystemExit):
        cli.main(["train", "nowhere"])
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # it is alone with the problem
    refusal(capsys, "train", "nowhere")
    monkeypatch.setenv("RANK", "0")
    refusal(capsys, "train", "nowhere")


# --- how it ends ---


def raising(error: BaseException):
    def act(*arguments):
        raise error

    return act


@pytest.mark.parametrize(
    ("error", "status", "says"),
    [
        (ValueError("labels are\noutside the classes"), 2, "error: labels are outside the classes\n"),
        (FloatingPointError("the loss of step 3 is nan"), 1, "error: the loss of step 3 is nan\n"),
        (OSError(28, "No space left on device"), 1, "error: [Errno 28] No space left on device\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (Interrupted(signal.SIGTERM), 143, ""),
    ],
)
def test_exit_status(error, status, says, commands, capsys):
    commands.act = raising(error)
    assert cli.main(["train"]) == status
    assert capsys.readouterr() == ("", says)


OUT_OF_MEMORY = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes"


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError(OUT_OF_MEMORY)])
def test_out_of_memory_says_what_to_lower(error, commands, capsys):
    commands.act = raising(error)
    assert cli.main(["train"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: out of memory: lower --chunk-size, --width")


def test_a_fault_of_ours_is_not_hidden(commands):
    commands.act = raising(RuntimeError("ours"))
    with pytest.raises(RuntimeError, match="ours"):
        cli.main(["train"])


# --- help ---


@pytest.mark.parametrize("columns", ["80", "120"])
def test_help_of_train_teaches_every_field(columns, commands, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", columns)
    assert cli.main(["train", "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= int(columns) for line in lines)
    text = " ".join(" ".join(lines).replace("│", " ").split())
    tables = re.findall(r"^    (\w+): Annotated\[\w+, _table", Path(recipe.__file__).read_text(), re.MULTILINE)
    assert len(tables) == 5 and all(f"Recipe: {table}" in text for table in tables)
    for key in FIELDS:
        assert f"{config.flag(key)} " in text
    assert "Number of checkpoints to keep. [default: 2]" in text
    assert "four of 255 grey levels. 0: twins equal the images. [default: 4/255]" in text


@pytest.mark.parametrize("line", re.findall("conadv (train .*)", cli.train.__doc__ or ""))
def test_the_commands_that_the_help_of_train_shows_are_accepted(line, commands):
    assert cli.main(shlex.split(line)) == 0


@pytest.mark.parametrize("command", [cli.evaluate, cli.export, cli.predict, cli.inspect_data, cli.sweep, cli.report])
def test_the_help_of_a_command_shows_an_example_that_parses(command):
    (line,) = re.findall("For example: conadv (.*)", command.__doc__)
    assert cli.parse(shlex.split(line))[0] is command


# --- as a process of its own ---


PLAIN = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": ""}


@pytest.mark.parametrize(
    ("settings", "words", "status", "says"),
    [
        (PLAIN, "sweep --help", 0, "--jobs"),
        (PLAIN, "recipes", 0, "digits"),
        (PLAIN, "train ε–日", 2, "no such file"),
        ({"PYTHONIOENCODING": "latin-1"}, "data inspect {folder}", 0, "train"),
        ({"PYTHONIOENCODING": "ascii"}, "data inspect ε–日", 2, "error: "),
    ],
)
def test_terminals_without_utf_8_get_plain_text(words, status, says, settings, tmp_path):
    for part in ("train", "val"):
        (tmp_path / part / "ε日").mkdir(parents=True)
        Image.new("RGB", (4, 4)).save(tmp_path / part / "ε日" / "one.png")
    command = [sys.executable, "-X", "utf8=0", "-m", "conadv", *words.format(folder=tmp_path).split()]
    done = subprocess.run(command, capture_output=True, env=os.environ | settings, check=False)
    output = (done.stdout + done.stderr).decode("ascii" if settings == PLAIN else settings["PYTHONIOENCODING"])
    assert done.returncode == status, output
    assert says in output
    assert "codec" not in output


def start(program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    whole = os.environ | environment
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=whole, check=False)


def test_json_is_all_on_standard_output_whatever_a_library_prints():
    done = start(
        "import os\nfrom conadv.printing import report\n"
        "work = lambda: (print('python'), os.write(1, b'library\\n'), {'answer': 42})[-1]\n"
        "report(work, as_json=True)"
    )
    assert done.stdout == '{"answer": 42}\n'
    assert sorted(done.stderr.splitlines()) == ["library", "python"]


@pytest.mark.parametrize("flag", ["--run-dir", "--run"])
def test_the_folder_of_a_run_has_a_name_that_torchrun_lets_through_and_a_short_one(flag):
    _, bound = cli.parse(["train", "digits", flag, "here"])
    assert bound.arguments["run_dir"] == Path("here")


@pytest.mark.parametrize("words", ["recipes", "train --epochs 0"])
def test_help_starts_without_torch(words):
    done = start(
        "import runpy, sys\n"
        f"sys.argv = ['conadv', *{words.split()!r}]\n"
        "try: runpy.run_module('conadv', run_name='__main__')\n"
        "finally: print('torch' in sys.modules)"
    )
    assert done.returncode == (2 if "0" in words else 0)
    assert done.stdout.splitlines()[-1] == "False"


def test_a_reader_that_goes_away_is_no_traceback():
    program = "import sys; from conadv.cli import main; sys.exit(main(['train', '--help']))"
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait() == 1
    process.stderr.close()
