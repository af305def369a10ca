"""What a run is, in frozen dataclasses: from a TOML file, then from flags."""

from conadv.setting import Setting

from .files import (
    RESUMABLE,
    TABLES,
    added_values,
    check_run_folder,
    description,
    dump_recipe,
    find_recipe,
    flatten,
    load_recipe,
    override,
    recipe_names,
    recipe_of_run,
    sealed,
    settings,
    toml_value,
)
from .recipe import Attack, Checkpoint, Data, Optimizer, Recipe, Schedule

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
    "added_values",
    "check_run_folder",
    "description",
    "dump_recipe",
    "find_recipe",
    "flatten",
    "load_recipe",
    "override",
    "recipe_names",
    "recipe_of_run",
    "sealed",
    "settings",
    "toml_value",
]
