"""The command line: a command reads its input, calls the function that does the work, and prints what it returns.

PyTorch is imported only by commands that compute.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from importlib.metadata import version
from inspect import BoundArguments
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import App, CycloptsError, Parameter, UnusedCliTokensError

from conadv import config, study_commands
from conadv.flags import Json, option, spell_out
from conadv.last_words import witnessed
from conadv.memory import ADVICE, is_out_of_memory
from conadv.printing import allow_any_encoding, say
from conadv.printing import report as report_result
from conadv.ranks.agreement import AgreedError
from conadv.ranks.launch import adopt_slurm, local_rank, own_rank, world_size
from conadv.recipe_flags import Field, dotted, with_fields
from conadv.trainer.stop import Interrupted

# What `eval` may change of a run: paths on this machine, and code to import, which only a flag may name.
_EVAL_FIELDS = ("model", "threads", "data.path", "data.workers", "data.memory")

# Seconds that a rank waits for lower ranks to print the error.
_TURN = 5.0

# --run is short, but torchrun takes it for an abbreviation of its own --run-path, and refuses it.
_RUN = ("--run-dir", "--run")

Run = Annotated[Path, Parameter(help="The folder of a run.")]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. The exit status: 0, 1 (a run failed), 2 (bad input) or that of a signal, such as 130."""
    allow_any_encoding()
    try:
        words = sys.argv[1:] if arguments is None else arguments
        adopt_slurm()
        command, bound = parse(words)
        who = f"rank {own_rank()}" if world_size() > 1 else "conadv train"
        with witnessed(who) if arguments is None and words[:1] == ["train"] else nullcontext():
            status = command(*bound.args, **bound.kwargs)
        sys.stdout.flush()
        return status if isinstance(status, int) else 0
    except CycloptsError as error:
        extra = error.unused_tokens if isinstance(error, UnusedCliTokensError) else []
        problem = f"unexpected argument {extra[0]!r}." if extra else error
        return _refuse(f"{problem} See {' '.join(['conadv', *(error.command_chain or ())])} --help")
    except (AgreedError, ArithmeticError) as error:  # known to all ranks: bad input, a loss that is not finite
        if own_rank() == 0:
            say(f"error: {error}")
        return 2 if isinstance(error, AgreedError) else 1
    except ValueError as error:
        return _refuse(str(error))
    except BrokenPipeError:  # the reader of our output is gone; without this, Python prints another error at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        say(f"error: {ADVICE}")
        return 1
    except OSError as error:  # such as a full disk
        say(f"error: {error}")
        return 1
    except Interrupted as stop:
        return stop.exit_status
    except KeyboardInterrupt:
        say("interrupted")
        return 130


def train(
    recipe: Annotated[
        str | None,
        Parameter(
            help="A TOML file or a built-in recipe (see conadv recipes). none: digits, or defaults with --data.path."
        ),
    ] = None,
    /,
    *,
    run: Annotated[Path | None, option("The folder to write. none: a new one in runs.", "DIR", names=_RUN)] = None,
    resume: Annotated[Path | None, option("The folder of a run to resume, instead of a recipe.", "DIR")] = None,
    quiet: Annotated[bool, option("Print no progress.")] = False,
    json: Json = False,
    **fields: Field,
) -> None:
    """Train a model as described by a recipe.

    A flag changes one field of the recipe: conadv train digits --method recycled --attack.epsilon 8/255 --seed 1

    A boolean flag without a value is true: --compile is --compile true, and --no-compile is --compile false.
    """
    if resume is None:
        chosen = config.load_recipe(recipe, dotted(fields))
    elif recipe is not None or run is not None:
        raise ValueError("--resume takes the recipe and the folder from the run: drop RECIPE and --run-dir")
    else:
        chosen = config.recipe_of_run(resume, dotted(fields))
    # When a connection breaks, PyTorch would print its C++ stack on every rank around our one line.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from conadv.trainer import training

    report_result(lambda: training.train(chosen, run, resume, quiet), json)


def evaluate(
    run: Run,
    /,
    *,
    robust: Annotated[bool, option("Also evaluate under attack by PGD.")] = False,
    epsilon: Annotated[str | None, option("Radius of the attack.", "X", "that of the run")] = None,
    steps: Annotated[str | None, option("Steps of the attack.", "N", "20")] = None,
    restarts: Annotated[str | None, option("Random starts of the attack; the worst one counts.", "N", "2")] = None,
    images: Annotated[str | None, option("Test images to attack, a fixed sample.", "N", "all")] = None,
    autoattack: Annotated[bool, option("Attack by AutoAttack; needs pip install 'conadv[robust]'.")] = False,
    best: Annotated[bool, option("Evaluate RUN/best.safetensors, not the newest checkpoint.")] = False,
    json: Json = False,
    **fields: Field,
) -> None:
    """Evaluate the newest checkpoint of a run."""
    given = {"epsilon": epsilon, "steps": steps, "restarts": restarts, "images": images}
    if not robust and (autoattack or any(value is not None for value in given.values())):
        raise ValueError(
            "--epsilon, --steps, --restarts, --images and --autoattack describe the attack of --robust: "
            "add --robust, or drop them"
        )
    if autoattack and (steps is not None or restarts is not None):
        raise ValueError("AutoAttack has its own steps and restarts: drop --steps and --restarts")
    kinds = {"epsilon": "attack.epsilon", "steps": "attack.steps", "restarts": "attack.steps", "images": "batch_size"}
    known = {
        key: replace(config.settings()[kinds[key]], key=key).parse(value)
        for key, value in given.items()
        if value is not None
    }
    recipe = config.recipe_of_run(run, dotted(fields))
    from conadv.trainer import trained
    from conadv.trainer.adversary import RobustTest

    settings: dict[str, Any] = {
        "epsilon": recipe.attack.epsilon,
        "norm": recipe.attack.norm,
        "autoattack": autoattack,
        **known,
    }
    test = RobustTest(**settings) if robust else None
    report_result(lambda: trained.evaluate(recipe, run, test, best), json)


def export(
    run: Run,
    out: Annotated[Path, Parameter(help="The file to write: NAME.safetensors, NAME.pt2 (torch-export) or NAME.onnx.")],
    /,
    *,
    raw: Annotated[bool, option("Export the weights themselves, not their moving average.")] = False,
    format: Annotated[
        Literal["safetensors", "torch-export", "onnx"],
        option("Weights for the original model, or the network with its weights, by PyTorch's exporters.", "NAME"),
    ] = "safetensors",
    model: Annotated[
        str | None, option("With torch-export and onnx: the model, if it is your own package.module:callable.")
    ] = None,
    json: Json = False,
) -> None:
    """Export the weights of a run for the original model; their moving average if the run keeps one."""
    suffix = {"safetensors": ".safetensors", "torch-export": ".pt2", "onnx": ".onnx"}[format]
    if out.suffix != suffix:
        raise ValueError(f"--format {format} does not write {str(out)!r}: choose a name that ends in {suffix}")
    from conadv.trainer import trained

    report_result(lambda: trained.export(run, out, raw, format, model), json)


def predict(
    source: Annotated[Path, Parameter(help="The folder of a run, or a file that conadv export wrote.")],
    /,
    *images: Annotated[Path, Parameter(help="Image files, and folders of them.")],
    top: Annotated[str, option("Classes per image, the most likely ones first.", "N", "5")] = "5",
    model: Annotated[str | None, option("The model of the run, if it is your own package.module:callable.")] = None,
    json: Json = False,
) -> None:
    """Print the most likely classes of images, with their probabilities."""
    count = replace(config.settings()["batch_size"], key="top").parse(top)
    assert isinstance(count, int)
    from conadv.trainer import trained

    if json:
        report_result(lambda: trained.predict(source, images, count, model), as_json=True)
        return
    for path, classes in trained.predict(source, images, count, model).items():
        shares = (f"{one['class']} {100 * one['probability']:.1f} %" for one in classes)
        print(" ".join(f"{path}  {', '.join(shares)}".splitlines()))


def inspect_data(
    path: Annotated[Path, Parameter(help="The folder or file of a data set.")],
    /,
    *,
    json: Json = False,
) -> None:
    """Describe a data set: images per class, sizes, and damaged files. Every image is decoded once."""
    from conadv.task.data.inspection import as_lines, inspect_data

    found = inspect_data(path)
    if json:
        report_result(lambda: found, as_json=True)
    else:
        print("\n".join(as_lines(found)))


def recipes(*, json: Json = False) -> None:
    """List the built-in recipes."""
    report_result(lambda: {name: _title(config.find_recipe(name)) for name in config.recipe_names()}, json)


def parse(words: Sequence[str]) -> tuple[Callable[..., Any], BoundArguments]:
    """Return the function of a command line, and its arguments."""
    app = _app()
    words = spell_out(app, words, lambda word: config.find_recipe(word).exists())
    command, bound, _ = app.parse_args(words, print_error=False, exit_on_error=False)
    return command, bound


def _app() -> App:
    """All commands; those that take fields of a recipe get one flag per field."""
    app = App(
        name="conadv",
        help="Concurrent adversarial learning for large-batch training.",
        help_format="plaintext",
        version=lambda: version("conadv"),
        version_flags=["--version"],
    )
    values = config.flatten(config.Recipe())
    defaults = {key: config.toml_value(value).strip('"') for key, value in values.items()}
    app.command(with_fields(train, defaults), sort_key=0)
    app.command(with_fields(evaluate, dict.fromkeys(_EVAL_FIELDS, "that of the run")), name="eval", sort_key=1)
    app.command(export, sort_key=2)
    app.command(predict, sort_key=3)
    app.command(recipes, sort_key=4)
    data = App(name="data", help="Inspect data sets.", sort_key=4)
    data.command(inspect_data, name="inspect")
    app.command(data)
    app.command(study_commands.sweep, sort_key=5)
    app.command(study_commands.report, sort_key=6)
    app.command(study_commands.timeline, sort_key=9)
    return app


def _title(recipe: Path) -> str:
    """The first line of a recipe, which is a comment that says what it is."""
    with recipe.open(encoding="utf-8") as file:
        return file.readline().lstrip("# ").rstrip()


def _refuse(problem: str) -> int:
    # All ranks read the same input: rank 0 prints the error, and torchrun then ends the others. A rank that is still
    # running after a while was the only one with the problem.
    if own_rank() != 0:
        time.sleep(_TURN * (1 + local_rank()))
    say(f"error: {problem}")
    return 2
