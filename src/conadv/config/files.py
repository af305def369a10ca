"""Recipes to and from TOML, with flags on top; every mistake is a ValueError of one line.

digits.toml ──► {"attack.epsilon": ...} ──► flags on top ──► Recipe ──► config.toml of the run
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any, NoReturn, TypeGuard

from conadv.catalog import is_callable, names_dataset
from conadv.setting import Setting, Value, descriptions, did_you_mean, settings_of, show
from conadv.toml_file import read_toml

from .recipe import Attack, Checkpoint, Data, Optimizer, Recipe, Schedule

TABLES = {"attack": Attack, "optimizer": Optimizer, "schedule": Schedule, "data": Data, "checkpoint": Checkpoint}

# What may change when a run is resumed: it does not affect the results.
RESUMABLE = (
    "layout", "threads", "timeout", "max_steps", "eval_every", "eval_train", "eval_robust", "log", "profile",
    "data.path", "data.workers", "data.memory",
    "checkpoint.every", "checkpoint.minutes", "checkpoint.keep",
)  # fmt: skip

# Fields added later. Runs from before behaved as the default says, so their checkpoints still resume.
ADDED = (
    "ema", "rho", "twin_share", "attack.name", "attack.grid", "optimizer.beta1", "optimizer.beta2", "optimizer.eps",
    "data.mixup", "data.cutmix", "deterministic", "tf32", "compile", "twin_branch",
    "attack.statistics", "data.held_out", "data.copies", "adv_until", "scale_norms", "clip_norm", "shuffle_twins",
    "optimizer.gsnr",
)  # fmt: skip

# Before the digest of what follows, in the first line of a config.toml.
_SEAL = "# sha256 "


@cache
def settings() -> dict[str, Setting]:
    """Every field of a recipe by its dotted key, in order."""
    tables = [settings_of(Recipe), *(settings_of(table, f"{name}.") for name, table in TABLES.items())]
    return {setting.key: setting for table in tables for setting in table}


def description(key: str) -> str:
    """What the field with this dotted key means."""
    table, _, name = key.rpartition(".")
    owner = TABLES[table] if table else Recipe
    return descriptions(owner.__module__)[f"{owner.__name__}.{name}"]


def flatten(recipe: Recipe) -> dict[str, Value]:
    """The values of a recipe by their dotted keys."""
    values: dict[str, Value] = {}
    for key in settings():
        table, _, name = key.rpartition(".")
        values[key] = getattr(getattr(recipe, table) if table else recipe, name)
    return values


def added_values() -> dict[str, Value]:
    """The fields that were added later (`ADDED`), with the values that older runs stand for."""
    return {key: value for key, value in flatten(Recipe()).items() if key in ADDED}


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
    changes = _typed(overrides or {})
    if name is None and changes.get("data.path") is not None:
        return _build(changes)
    name = "digits" if name is None else name
    path = find_recipe(name)
    values = _read(path)
    for key, names_code in (("model", is_callable), ("data.path", names_dataset)):
        value = str(values.get(key) or "")
        if names_code(value) and key not in changes:
            flag = f"--{key} {show(value)}"
            raise ValueError(
                f"{show(str(path))} names code to import, which a file may not: if you trust it, pass {flag}"
            )
    return _build(_combine(values, changes))


def override(recipe: Recipe, overrides: Mapping[str, object]) -> Recipe:
    """The recipe with some values changed, by dotted key, under the same rules as flags over a file."""
    return _build(_combine(flatten(recipe), _typed(overrides)))


def check_run_folder(run: str | Path) -> Path:
    """The recipe file of a run folder; a ValueError if the folder has none."""
    path = Path(run) / "config.toml"
    if not os.access(path, os.R_OK):
        raise ValueError(f"{show(str(run))} is not a run folder (no config.toml): pass one written by conadv train")
    return path


def recipe_of_run(run: str | Path, overrides: Mapping[str, object] | None = None) -> Recipe:
    """The recipe in a run folder; `overrides` may change only what does not change the results (`RESUMABLE`)."""
    path = check_run_folder(run)
    recipe = load_recipe(path, overrides)
    _check_seal(path)
    before, after = flatten(_build(_read(path))), flatten(recipe)
    changed = [settings()[key].flag for key in after if after[key] != before[key] and key not in RESUMABLE]
    if changed:
        raise ValueError(
            f"{', '.join(changed)} would change the results of the run {show(str(run))}: start a new run, or change "
            f"only {', '.join(settings()[key].flag for key in RESUMABLE)}"
        )
    return recipe


def sealed(text: str) -> str:
    """The text of a config.toml with its checksum as first line, so that damage and edits are detected."""
    return f"{_SEAL}{sha256(text.encode()).hexdigest()}\n{text}"


def _check_seal(path: Path) -> None:
    """Refuse a config.toml that was damaged or edited. Older versions wrote no checksum, but every field."""
    text, tables = read_toml(path)
    first, _, rest = text.partition("\n")
    if text != sealed(rest) if first.startswith(_SEAL) else "method" not in tables:
        raise ValueError(
            f"{show(str(path))} is damaged or was edited after the run wrote it: restore it and pass changes as flags, "
            "or remove its first line to accept it as it is"
        )


def dump_recipe(recipe: Recipe, header: str = "") -> str:
    """TOML that loads back as an equal recipe, every field written out; `header` becomes comments at its top."""
    lines = [f"# {line}" for line in header.splitlines()]
    previous = ""
    for key, value in flatten(recipe).items():
        table, _, name = key.rpartition(".")
        if table != previous:
            lines += ["", f"[{table}]"]
            previous = table
        lines.append(f"{name} = {toml_value(value)}")
    return "\n".join(lines) + "\n"


def toml_value(value: Value) -> str:
    """The shortest exact spelling: 24/255 as a fraction, 0.8 (which is 204/255) as it is."""
    match value:
        case None:
            return '"none"'
        case bool():
            return "true" if value else "false"
        case float():
            level = round(min(abs(value), 1.0) * 255)
            return min(repr(value), f'"{level}/255"', key=len) if level / 255 == value else repr(value)
        case str():
            # JSON's escapes are TOML's, but for DEL, which JSON leaves as it is.
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case int():
            return str(value)
        case tuple():
            return f"[{', '.join(map(toml_value, value))}]"


def _folder() -> Path:
    """The folder of the built-in recipes: in the package, or next to src in a clone."""
    package = Path(__file__).parents[1]
    inside = package / "recipes"
    return inside if inside.is_dir() else package.parents[1] / "recipes"


def _read(path: Path) -> dict[str, Value]:
    """The checked values of a recipe file by their dotted keys."""
    try:
        _, tables = read_toml(path)
        return {key: settings()[key].check(value) for key, value in _flat(tables).items()}
    except FileNotFoundError:
        names = recipe_names()
        raise ValueError(
            f"recipe {show(str(path))}: no such file; pass a TOML file, or a built-in recipe: {', '.join(names)}"
            + did_you_mean(str(path), names)
        ) from None
    except ValueError as error:
        raise ValueError(f"recipe {show(str(path))}: {' '.join(str(error).split())}") from None


def _flat(tables: Mapping[str, Any]) -> dict[str, object]:
    """Values by dotted key; a key that no recipe has is an error."""
    values: dict[str, object] = {}
    for name, value in tables.items():
        if name in TABLES and not isinstance(value, dict):
            raise ValueError(f"{name} is {show(value)} but must be a table: write [{name}] and its keys below it")
        entries = {f"{name}.{key}": entry for key, entry in value.items()} if name in TABLES else {name: value}
        for key, entry in entries.items():
            # A quoted key with a dot in it, "attack.epsilon" = 0, would otherwise be kept next to the table's own.
            if key not in settings() or key.count(".") != (name in TABLES):
                _unknown(key)
            values[key] = entry
    return values


def _unknown(key: str) -> NoReturn:
    """Suggest a similar key, first by its last part: for `lr`, `optimizer.lr`."""
    known = list(settings())
    same = [other for other in known if other.rpartition(".")[2] == key.rpartition(".")[2] and other != key]
    raise ValueError(f"unknown key {show(key)}" + did_you_mean(same[0] if same else key, known))


def _typed(overrides: Mapping[str, object]) -> dict[str, Value]:
    changes: dict[str, Value] = {}
    for key, value in overrides.items():
        if key not in settings():
            _unknown(key)
        setting = settings()[key]
        changes[key] = setting.parse(value) if _is_text(value) else setting.check(value)
    return changes


def _is_text(value: object) -> TypeGuard[str | list[str]]:
    """Whether a value is a string, or a list of strings, as flags give it."""
    return isinstance(value, str) or (isinstance(value, list) and all(isinstance(item, str) for item in value))


def _combine(values: dict[str, Value], changes: dict[str, Value]) -> dict[str, Value]:
    """Apply changes to values. Settings of a method, batch or data set that is replaced are dropped."""
    gone: set[str] = set()
    batch_size, chunk_size = changes.get("batch_size"), values.get("chunk_size")
    if isinstance(batch_size, int) and isinstance(chunk_size, int) and chunk_size and batch_size % chunk_size:
        gone = {"chunk_size"}
    if changes.get("method", values.get("method", "conadv")) != values.get("method", "conadv"):
        gone |= {"delay"}
    own_data = values.get("data.path") is not None
    if changes.get("data.path") is not None and not own_data:
        gone |= {"data.name", "data.train_size"}
    if changes.get("data.name") is not None and (own_data or changes["data.name"] != values.get("data.name", "digits")):
        gone |= {"data.path", "data.train_size"}
    return {key: value for key, value in values.items() if key not in gone} | changes


def _build(values: Mapping[str, Value]) -> Recipe:
    arguments: dict[str, Any] = {name: {} for name in TABLES}
    for key, value in values.items():
        table, _, name = key.rpartition(".")
        (arguments[table] if table else arguments)[name] = value
    tables = {name: table(**arguments[name]) for name, table in TABLES.items() if arguments[name]}
    return Recipe(**{key: value for key, value in arguments.items() if key not in TABLES}, **tables)
