"""What a run is, in frozen dataclasses: from a TOML file, then from flags."""

from .files import (
    RESUMABLE,
    check_run_folder,
    dump_recipe,
    find_recipe,
    load_recipe,
    override,
    read_toml,
    recipe_names,
    recipe_of_run,
)
from .recipe import AttackFields, CheckpointFields, Data, Optimizer, Recipe, Schedule, attackers_of, flag, flatten

__all__ = [
    "RESUMABLE", "AttackFields", "CheckpointFields", "Data", "Optimizer", "Recipe", "Schedule", "attackers_of",
    "check_run_folder", "dump_recipe", "find_recipe", "flag", "flatten", "load_recipe", "override", "read_toml",
    "recipe_names", "recipe_of_run",
]  # fmt: skip
