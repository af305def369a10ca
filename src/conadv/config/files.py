"""Recipes to and from TOML, with flags on top; every mistake is a ValueError of one line.

digits.toml ──► {"attack.epsilon": ...} ──► flags on top ──► Recipe ──► config.toml of the run
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Mapping
from dataclasses import is_dataclass
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, CycloptsError, Parameter
from cyclopts.argument import ArgumentCollection
from cyclopts.config import Dict

from conadv.catalog import is_callable, names_dataset
from conadv.printing import one_line

from .advice import ADVICE, explain
from .fields import did_you_mean, show, spell
from .recipe import Recipe, flag, flatten

# What may change when a run is resumed: it does not affect the results.
RESUMABLE = (
    "layout", "attackers", "threads", "timeout", "max_steps", "eval_every", "eval_robust", "log", "profile",
    "data.path", "data.workers", "checkpoint.every", "checkpoint.keep",
)  # fmt: skip

# Recipes and studies have a few thousand bytes: an archive that is named by mistake is not read to its end.
_LARGEST = 1_000_000


def recipe_names() -> list[str]:
    """The names of the built-in recipes."""
    return sorted(path.stem for path in _folder().glob("*.toml"))


def find_recipe(name: str | Path) -> Path:
    """The path of a built-in recipe, or of your own file."""
    text = os.fspath(name)
    return _folder() / f"{text}.toml" if text in recipe_names() else Path(text)


def load_recipe(name: str | Path | None, overrides: Mapping[str, object] | None = None) -> Recipe:
    """Load a recipe, with some fields changed.

    Args:
        name: The name of a built-in recipe (`conadv recipes` lists them), or the path of a TOML file. None: `digits`,
            or the defaults, which suit photographs, if the overrides name your own data (data.path).
        overrides: Fields to change, by dotted key such as "attack.epsilon"; values, or texts as in flags ("4/255").

    Returns:
        The recipe, checked: a wrong name or value is a ValueError of one line.
    """
    changes = _without_none(overrides or {})
    path = _file_of(name, changes)
    return _parse(changes, _below(_read(path), changes, path) if path else {}, path)


def override(recipe: Recipe, overrides: Mapping[str, object]) -> Recipe:
    """The recipe with some values changed, by dotted key, under the same rules as flags over a file."""
    changes = _without_none(overrides)
    return _parse(changes, _below(_without_none(flatten(recipe)), changes), None)


def check_run_folder(run: str | Path) -> Path:
    """The recipe file of a run folder; a ValueError if the folder has none."""
    path = Path(run) / "config.toml"
    if not os.access(path, os.R_OK):
        raise ValueError(f"{show(str(run))} is not a run folder (no config.toml): pass one written by conadv train")
    return path


def recipe_of_run(run: str | Path, overrides: Mapping[str, object] | None = None) -> Recipe:
    """The recipe in a run folder; `overrides` may change only what does not change the results (`RESUMABLE`)."""
    recipe = load_recipe(check_run_folder(run), overrides)
    check_resumable(run, recipe)
    return recipe


def check_resumable(run: str | Path, recipe: Recipe) -> None:
    """Refuse a recipe with which the run in a folder would not continue as it began."""
    path = check_run_folder(run)
    before, after = flatten(_parse({}, _read(path), path)), flatten(recipe)
    changed = [flag(key) for key in after if after[key] != before[key] and key not in RESUMABLE]
    if changed:
        raise ValueError(
            f"{', '.join(changed)} would change the results of the run {show(str(run))}: start a new run, or change "
            f"only {', '.join(map(flag, RESUMABLE))}"
        )


def dump_recipe(recipe: Recipe, header: str = "") -> str:
    """TOML that loads back as an equal recipe, every field written out; `header` becomes comments at its top."""
    lines, previous = [f"# {line}" for line in header.splitlines()], ""
    for key, value in flatten(recipe).items():
        table, _, name = key.rpartition(".")
        if table != previous:
            lines += ["", f"[{table}]"]
            previous = table
        text = spell(value)
        plain = isinstance(value, int | float) and "/" not in text
        # JSON's escapes are TOML's, but for DEL, which JSON leaves as it is.
        quoted = json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
        lines.append(f"{name} = {text if plain else quoted}")
    return "\n".join(lines) + "\n"


def flags_over_file(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Let fields without a flag of `conadv train` have the values of its recipe or run; cyclopts calls it."""
    if commands != ("train",):
        return
    given = {argument.name: argument.tokens[0].value for argument in arguments if argument.tokens}
    changes = {name[2:].replace("-", "_"): text for name, text in given.items() if name.startswith("--")}
    for key in changes:
        if is_dataclass(getattr(Recipe(), key, None)):
            known = [flag(other) for other in flatten(Recipe()) if other.startswith(f"{key}.")]
            raise ValueError(f"--{key} is a table of a recipe: change one of its fields, {', '.join(known)}")
    path = check_run_folder(given["--resume"]) if "--resume" in given else _file_of(given.get("RECIPE"), changes)
    if path:
        _source(_below(_read(path), changes, path), path)(app, commands, arguments)


def read_toml(path: Path) -> tuple[str, dict[str, Any]]:
    """The text of a TOML file that a user wrote, and its tables. A missing file is a FileNotFoundError."""
    try:
        if path.exists() and not path.is_file() and not path.is_dir():  # opening a pipe would wait forever
            raise OSError("not a regular file")
        with path.open("rb") as file:
            content = file.read(_LARGEST + 1)
        if len(content) > _LARGEST:
            raise OSError(f"larger than {_LARGEST} bytes")
        text = content.decode("utf-8-sig")
        return text, tomllib.loads(text)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ValueError(f"{error.strerror or error}; pass a TOML file that can be read") from None
    except UnicodeDecodeError:
        raise ValueError("not UTF-8 text; pass a TOML file") from None
    except RecursionError:
        raise ValueError("brackets nested too deeply") from None


def _folder() -> Path:
    """The folder of the built-in recipes: in the package, or next to src in a clone."""
    package = Path(__file__).parents[1]
    inside = package / "recipes"
    return inside if inside.is_dir() else package.parents[1] / "recipes"


def _file_of(name: str | Path | None, changes: Mapping[str, object]) -> Path | None:
    """The file of a recipe; without a name `digits`, or none if the changes name your own data."""
    if name is None and str(changes.get("data.path", "none")) != "none":
        return None
    return find_recipe("digits" if name is None else name)


def _read(path: Path) -> dict[str, Any]:
    """The values of a recipe file by dotted key, not checked yet."""
    try:
        _, tables = read_toml(path)
        values: dict[str, Any] = {}
        for name, value in tables.items():
            if "." in name or (is_dataclass(getattr(Recipe(), name, None)) and not isinstance(value, dict)):
                table = name.partition(".")[0]
                raise ValueError(f"{name} is {show(value)}, outside of a table: write [{table}] and its keys below it")
            values |= {f"{name}.{key}": one for key, one in value.items()} if isinstance(value, dict) else {name: value}
        str(values)  # refuses numbers of thousands of digits, and lists in lists without end
        old = [key for key in values if key in ADVICE and key not in flatten(Recipe())]
        if old and path.name == "config.toml":
            raise ValueError(
                f"this run is of an older version, whose {old[0]} is no field any more ({ADVICE[old[0]]}): resume or "
                "evaluate it with the version in its header, or start a new run"
            )
        return values
    except FileNotFoundError:
        names = recipe_names()
        raise ValueError(
            f"recipe {show(str(path))}: no such file; pass a TOML file, or a built-in recipe: {', '.join(names)}"
            + did_you_mean(str(path), names)
        ) from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"recipe {show(str(path))}: {one_line(str(error))}") from None


def _below(values: Mapping[str, Any], changes: Mapping[str, Any], path: Path | None = None) -> dict[str, Any]:
    """What a file or recipe says below changes: nothing about a method, optimizer or data set that is replaced."""
    gone = set(changes)
    changed = {key: str(value) for key, value in changes.items()}
    if changed.get("batch_size", "").isdecimal() and isinstance(values.get("chunk_size"), int) and values["chunk_size"]:
        gone |= {"chunk_size"} if int(changed["batch_size"]) % values["chunk_size"] else set()
    if changed.get("method", before := str(values.get("method", "conadv"))) != before:
        gone |= {"delay"}
    if changed.get("optimizer.name", before := str(values.get("optimizer.name", "muon"))) != before:
        gone |= {"optimizer.lr"}
    own_data = str(values.get("data.path", "none")) != "none"
    if changed.get("data.path", "none") != "none" and not own_data:
        gone |= {"data.name", "data.train_size"}
    name = changed.get("data.name", "none")
    if name != "none" and (own_data or name != values.get("data.name", "digits")):
        gone |= {"data.path", "data.train_size"}
    kept = {key: value for key, value in values.items() if key not in gone}
    for key, names_code in (("model", is_callable), ("data.path", names_dataset)):
        if path and names_code(str(kept.get(key, ""))):
            raise ValueError(
                f"{show(str(path))} names code to import, which a file may not: if you trust it, pass "
                f"--{key} {show(str(kept[key]))}"
            )
    return kept


def _without_none(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: "none" if value is None else value for key, value in values.items()}


def _source(values: Mapping[str, Any], path: Path | None) -> Dict:
    return Dict(dict(values), source=f"recipe {show(str(path))}" if path else "cli", use_commands_as_keys=False)


def _parse(changes: Mapping[str, Any], values: Mapping[str, Any], path: Path | None) -> Recipe:
    """The recipe with these changes over these values, each of them converted and checked by cyclopts."""

    def build(*, recipe: Annotated[Recipe, Parameter(name="*")] = Recipe()) -> Recipe:  # noqa: B008
        return recipe

    app = App(config=[_source(changes, None), _source(values, path)], help_flags=(), version_flags=())
    app.default(build)
    try:
        _, bound, _ = app.parse_args([], print_error=False, exit_on_error=False)
    except CycloptsError as error:
        raise ValueError(explain(error)) from None
    except ValueError as error:
        raise ValueError(one_line(str(error))) from None
    recipe: Recipe = bound.arguments.get("recipe", Recipe())
    return recipe
