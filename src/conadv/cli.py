"""The command line: a command reads its input, calls the function that does the work, and prints what it returns.

The text of a command is its help. PyTorch is imported only by commands that compute.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from importlib.metadata import version
from inspect import BoundArguments
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import App, CycloptsError, Group, Parameter, UnusedCliTokensError

from conadv import config
from conadv.config import Recipe
from conadv.config.advice import explain
from conadv.config.fields import OptionalText, check_fraction, number
from conadv.config.files import check_resumable, flags_over_file
from conadv.last_words import say_line, witnessed
from conadv.machine import ADVICE, is_out_of_memory
from conadv.printing import allow_any_encoding, one_line
from conadv.printing import report as report_result
from conadv.ranks.launch import local_rank, own_rank, world_size
from conadv.trainer.stop import Interrupted

# Seconds that a rank waits for lower ranks to print the error.
_TURN = 5.0

# How files of weights end. All but the first are refused, with what to do instead.
_WEIGHTS = (".safetensors", ".pt", ".pth", ".bin")

_FIELDS = Group("Recipe", help=" ".join((Recipe.__doc__ or "").split()), sort_key=1)

OptionalCount = Annotated[int | None, number(none=True, gte=1, lte=10**12)]
Switch = Annotated[bool, Parameter(negative="", show_default=False)]
Json = Annotated[Switch, Parameter(help="Print one JSON object on standard output, and nothing else there.")]
Out = Parameter(name=("--out", "-o"))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. The exit status: 0, 1 (a run failed), 2 (bad input) or that of a signal, such as 130."""
    allow_any_encoding()
    try:
        words = sys.argv[1:] if arguments is None else arguments
        command, bound = parse(words)
        who = f"rank {own_rank()}" if world_size() > 1 else "conadv train"
        with witnessed(who) if arguments is None and words[:1] == ["train"] else nullcontext():
            status = command(*bound.args, **bound.kwargs)
        sys.stdout.flush()
        return status if isinstance(status, int) else 0
    except CycloptsError as error:
        extra = error.unused_tokens if isinstance(error, UnusedCliTokensError) else []
        problem = f"unexpected argument {extra[0]!r}." if extra else explain(error)
        more = f" See {' '.join(['conadv', *(error.command_chain or ())])} --help" if problem[-1] in ".?" else ""
        return _refuse(problem + more)
    except ArithmeticError as error:  # a loss that is not finite
        if world_size() == 1:  # otherwise one rank has said so
            say_line(f"error: {error}")
        return 1
    except ValueError as error:
        return _refuse(str(error))
    except BrokenPipeError:  # the reader of our output is gone; without this, Python prints another error at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        say_line(f"error: {ADVICE}")
        return 1
    except OSError as error:  # such as a full disk
        say_line(f"error: {error}")
        return 1
    except Interrupted as stop:
        return stop.exit_status
    except KeyboardInterrupt:
        say_line("interrupted")
        return 130


def train(
    recipe: str | None = None,
    /,
    *,
    run_dir: Annotated[Path | None, Parameter(name=("--run-dir", "--run"))] = None,
    resume: Path | None = None,
    quiet: Switch = False,
    json: Json = False,
    fields: Annotated[Recipe, Parameter(name="*", group=_FIELDS)] = Recipe(),  # noqa: B008
) -> None:
    """Train a model as described by a recipe.

    A flag changes one field of the recipe: conadv train digits --method recycled --attack.epsilon 8/255 --seed 1

    Your own photographs: conadv train --data.path photos --epochs 30 --eval-every 1

    Several GPUs: torchrun --nproc-per-node 8 -m conadv train imagenet-32k --layout auto --run-dir runs/first

    Args:
        recipe: A TOML file or a built-in recipe (see conadv recipes). none: digits, or the defaults with --data.path.
        run_dir: The folder to write (torchrun refuses the short name). none: a new one in runs.
        resume: The folder of a run to resume, instead of a recipe.
        quiet: Print no progress.
    """
    if resume is not None:
        if recipe is not None or run_dir is not None:
            raise ValueError("--resume takes the recipe and the folder from the run: drop RECIPE and --run-dir")
        check_resumable(resume, fields)
    # When a connection breaks, PyTorch would print its C++ stack on every rank around our one line.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from conadv.trainer.train import train_recipe

    report_result(lambda: train_recipe(fields, run_dir, resume, quiet), json)


def evaluate(
    run: Path,
    /,
    *,
    robust: Switch = False,
    epsilon: Annotated[float | None, number(gte=0, lte=1e6)] = None,
    steps: Annotated[int | None, number(gte=1, lte=10**4)] = None,
    restarts: Annotated[int | None, number(gte=1, lte=10**4)] = None,
    images: OptionalCount = None,
    autoattack: Switch = False,
    best: Switch = False,
    json: Json = False,
    model: OptionalText = None,
    data_path: Annotated[OptionalText, Parameter(name="--data.path")] = None,
) -> None:
    """Evaluate the newest checkpoint of a run.

    For example: conadv eval runs/digits-conadv-001 --robust --epsilon 8/255

    Args:
        run: The folder of a run.
        robust: Also evaluate under attack by PGD.
        epsilon: Radius of the attack. none: that of the run.
        steps: Steps of the attack. none: 20.
        restarts: Random starts of the attack; the worst one counts. none: 2.
        images: Test images to attack, a fixed sample. none: all.
        autoattack: Attack by AutoAttack; needs pip install 'conadv[robust]'.
        best: Evaluate RUN/best.safetensors, not the newest checkpoint.
        model: The model of the run, if it is your own package.module:callable.
        data_path: Where the data of the run is now. none: where it was.
    """
    given = {"epsilon": epsilon, "steps": steps, "restarts": restarts, "images": images}
    attack = {key: value for key, value in given.items() if value is not None}
    if not robust and (autoattack or attack):
        raise ValueError(
            "--epsilon, --steps, --restarts, --images and --autoattack describe the attack of --robust: "
            "add --robust, or drop them"
        )
    if autoattack and (steps is not None or restarts is not None):
        raise ValueError("AutoAttack has its own steps and restarts: drop --steps and --restarts")
    moved = {"model": model, "data.path": data_path}
    recipe = config.recipe_of_run(run, {key: value for key, value in moved.items() if value is not None})
    if recipe.attack.norm == "linf":
        check_fraction("--epsilon", epsilon)
    from conadv import trained
    from conadv.task.evaluate import RobustTest

    known: dict[str, Any] = {"epsilon": recipe.attack.epsilon, "norm": recipe.attack.norm, **attack}
    test = RobustTest(**known, autoattack=autoattack) if robust else None
    report_result(lambda: trained.evaluate(recipe, run, test, best), json)


def export(
    run: Path,
    out: Path,
    /,
    *,
    format: Literal["safetensors", "torch-export", "onnx"] | None = None,
    model: OptionalText = None,
    json: Json = False,
) -> None:
    """Export the weights of a run for the original model.

    For example: conadv export runs/digits-conadv-001 model.safetensors

    Args:
        run: The folder of a run.
        out: The file to write: NAME.safetensors, NAME.pt2 (torch-export) or NAME.onnx.
        format: Weights for the original model, or the network with its weights, by PyTorch's exporters. none: as the
            name of the file says.
        model: With torch-export and onnx: the model, if it is your own package.module:callable.
    """
    known = {".safetensors": "safetensors", ".pt2": "torch-export", ".onnx": "onnx"}.get(out.suffix)
    if known is None:
        raise ValueError(f"{str(out)!r} is no kind of export: choose a name that ends in .safetensors, .pt2 or .onnx")
    if format not in (None, known):
        raise ValueError(f"--format {format} does not write {out.suffix} files: drop it, or choose another name")
    from conadv import trained

    report_result(lambda: trained.export(run, out, known, model), json)


def predict(
    source: Path,
    /,
    *images: Path,
    top: Annotated[int, number(gte=1, lte=10**6)] = 5,
    model: OptionalText = None,
    json: Json = False,
) -> int:
    """Print the most likely classes of images, with their probabilities.

    A file that cannot be read is reported, and the exit status is then 1.
    For example: conadv predict runs/photos-conadv-001 cat.jpg more/

    Args:
        source: The folder of a run, or a file that conadv export wrote.
        images: Image files, and folders of them.
        top: Classes per image, the most likely ones first.
        model: The model of the run, if it is your own package.module:callable.
    """
    from conadv import trained

    predictions, problems = trained.predict(source, images, top, model)
    if json:
        report_result(lambda: predictions, as_json=True)
    else:
        for path, classes in predictions.items():
            shares = (f"{one['class']} {100 * one['probability']:.1f} %" for one in classes)
            print(" ".join(f"{path}  {', '.join(shares)}".splitlines()))
    for problem in problems:
        say_line(f"error: {problem}")
    return 1 if problems else 0


def inspect_data(path: Path, /, *, json: Json = False) -> None:
    """Describe a data set: images per class, sizes, and damaged files. Every image is decoded once.

    For example: conadv data inspect photos

    Args:
        path: The folder or file of a data set.
    """
    from conadv.task.data.open import inspect_data

    found = inspect_data(path)
    if json:
        report_result(lambda: found, as_json=True)
        return
    sizes = dict.fromkeys(f"{width} × {height}" for height, width in (found["smallest"], found["largest"]))
    print(f"{one_line(path)}: {found['kind']}, {len(found['classes'])} classes, {' to '.join(sizes)} pixels")
    for row in found["classes"]:
        print(f"{row['train']:9,} train {row['test']:9,} test  {one_line(row['class'])}")
    print(f"{found['train']:9,} train {found['test']:9,} test  in all\ndamaged: {len(found['damaged'])}")
    for problem in found["damaged"]:
        print(f"  {problem['name']}: {problem['reason']}")


def recipes(*, json: Json = False) -> None:
    """List the built-in recipes, which conadv train takes by name."""
    titles = {}
    for name in config.recipe_names():
        with config.find_recipe(name).open(encoding="utf-8") as file:
            titles[name] = file.readline().lstrip("# ").rstrip()  # a comment that says what it is
    report_result(lambda: titles, json)


def sweep(
    study: Path,
    /,
    *,
    out: Path | None = None,
    jobs: Annotated[int | None, number(gte=1, lte=10**4)] = None,
    quiet: Switch = False,
    json: Json = False,
) -> int:
    """Run the cells of a study as ordinary runs. Finished cells are skipped, and stopped ones are resumed.

    The exit status is 1 if cells failed. For example: conadv sweep study.toml --out runs/study

    Args:
        study: A study file (TOML): a base, arms and a grid.
        out: The folder to write. none: runs/STUDY.
        jobs: How many cells to run at a time. none: as many as the cores allow.
        quiet: Print no progress.
    """
    from conadv.study.study_file import read_study
    from conadv.study.sweep import sweep as run_sweep

    folder = out or Path("runs") / study.stem
    tell = (lambda text: None) if quiet else say_line
    return 1 if report_result(lambda: run_sweep(read_study(study), folder, jobs, tell), json)["failed"] else 0


def report(
    folder: Path, /, *, out: Annotated[Path | None, Out] = None, paper: Switch = False, json: Json = False
) -> None:
    """Write the results of a study as one self-contained HTML page.

    For example: conadv report runs/study -o study.html

    Args:
        folder: The folder of a study, written by conadv sweep.
        out: The page to write; a CSV file of all cells goes next to it. none: FOLDER/report.html.
        paper: Add the numbers of the paper.
    """
    try:
        from conadv.study.report import write_report
    except ImportError as error:
        raise ValueError(f"a report needs {error.name}: pip install 'conadv[study]'") from None
    report_result(lambda: write_report(folder, out, paper), json)


def timeline(runs: list[Path], /, *, out: Annotated[Path, Out] = Path("timeline.svg"), json: Json = False) -> None:
    """Draw what each rank does during one step: one row per rank, time from left to right, for one or more runs.

    For example: conadv timeline runs/profiled -o steps.svg

    Args:
        runs: Folders of runs that were profiled with conadv train --profile 5.
        out: The picture to write: .svg, .png or .pdf.
    """
    from conadv.study.timeline import draw_timeline, read_timeline

    report_result(lambda: draw_timeline([(run.name, read_timeline(run)) for run in runs], out), json)


def parse(words: Sequence[str]) -> tuple[Callable[..., Any], BoundArguments]:
    """Return the function of a command line, and its arguments."""
    command, bound, _ = _app().parse_args(_joined(words), print_error=False, exit_on_error=False)
    return command, bound


def _joined(words: Sequence[str]) -> list[str]:
    """Join a flag and true, false or a file of weights after it: --deterministic and --pretrained need no value."""
    joined: list[str] = []
    for word in words:
        before = joined[-1] if joined else ""
        is_value = word.lower() in ("true", "false") or (before == "--pretrained" and word.endswith(_WEIGHTS))
        if is_value and before.startswith("--") and "=" not in before:
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return ["--pretrained=true" if word == "--pretrained" else word for word in joined]


def _app() -> App:
    app = App(
        name="conadv",
        help="Concurrent adversarial learning for large-batch training. Begin with: conadv train digits",
        help_format="markdown",
        version=lambda: version("conadv"),
        version_flags=["--version"],
        config=[flags_over_file],
    )
    data = App(name="data", help="Inspect data sets.")
    data.command(inspect_data, name="inspect")
    commands: tuple[Any, ...] = (train, evaluate, export, predict, recipes, data, sweep, report, timeline)
    for order, command in enumerate(commands):
        if isinstance(command, App):
            command.sort_key = order
            app.command(command)
        else:
            app.command(command, name="eval" if command is evaluate else None, sort_key=order)
    return app


def _refuse(problem: str) -> int:
    # All ranks read the same input: rank 0 prints the error, and torchrun then ends the others. A rank that is still
    # running after a while was the only one with the problem.
    if own_rank() != 0:
        time.sleep(_TURN * (1 + local_rank()))
    say_line(f"error: {one_line(problem)}")
    return 2
