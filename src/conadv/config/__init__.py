"""What a run is, in frozen dataclasses: from a TOML file, then from flags."""

from .files import (
    RESUMABLE,
    TABLES,
    description,
    dump_recipe,
    find_recipe,
    flatten,
    load_recipe,
    override,
    recipe_names,
    recipe_of_run,
    settings,
    toml_value,
)
from .recipe import Attack, Checkpoint, Data, Optimizer, Recipe, Schedule
from .setting import Setting

__all__ = [
    "RESUMABLE",
    "TABLES",
    "Attack",
    "Checkpoint",
    "Data",
    "Optimizer",
    "Recipe",
    "Schedule",
    "Setting",
    "description",
    "dump_recipe",
    "find_recipe",
    "flatten",
    "load_recipe",
    "override",
    "recipe_names",
    "recipe_of_run",
    "settings",
    "toml_value",
]
