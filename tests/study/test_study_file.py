"""Study files: what they expand to, and what is said of those that are wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from conadv.config import flatten, load_recipe
from conadv.study.results import Cell
from conadv.study.study_file import Study, read_study


def study_of(folder: Path, text: str) -> Study:
    path = folder / "study.toml"
    path.write_text(text, encoding="utf-8")
    return read_study(path)


def points(cells: tuple[Cell, ...], *keys: str) -> list[tuple[Any, ...]]:
    return [(cell.arm, *(cell.values[key] for key in keys)) for cell in cells]


def test_a_grid_is_the_product_of_its_lists_in_their_order_and_without_one_there_is_one_cell(tmp_path: Path) -> None:
    study = study_of(tmp_path, '[grid]\nmethod = ["vanilla", "recycled"]\nseed = [3, 1]\n')
    methods = [(name, name, seed) for name in ("vanilla", "recycled") for seed in (3, 1)]
    assert points(study.cells, "method", "seed") == methods
    (cell,) = study_of(tmp_path, "").cells
    assert (cell.command, cell.arm) == ("conadv train digits --threads 1", "conadv")


def test_tuning_has_its_own_learning_rates_and_seeds_and_the_arm_keeps_its_own_elsewhere(tmp_path: Path) -> None:
    study = study_of(
        tmp_path,
        """
        [base]
        optimizer.lr = 1
        [[arm]]
        name = "plain"
        method = "vanilla"
        optimizer.lr = 7
        [[arm]]
        name = "delay 2"
        delay = 2
        [[grid]]
        name = "tuning"
        seed = [100]
        optimizer.lr = [2, 4]
        [[grid]]
        name = "final"
        seed = [0, 1]
        """,
    )
    tuning = [(arm, 100, rate) for arm in ("plain", "delay 2") for rate in (2.0, 4.0)]
    final = [(arm, seed, rate) for arm, rate in (("plain", 7.0), ("delay 2", 1.0)) for seed in (0, 1)]
    assert points(study.cells, "seed", "optimizer.lr") == tuning + final


def test_an_arm_may_widen_the_grid_and_stay_out_of_one(tmp_path: Path) -> None:
    study = study_of(
        tmp_path,
        """
        arm = [
          {name = "noise", attack.direction = "noise", grids = ["final"], grid = {attack.epsilon = ["1/255", "2/255"]}},
          {name = "clean", method = "vanilla"},
        ]
        grid = [{name = "tuning", seed = [9]}, {name = "final", seed = [0]}]
        """,
    )
    assert points(study.cells, "seed", "attack.epsilon") == [
        ("clean", 9, 24 / 255),
        ("noise", 0, 1 / 255),
        ("noise", 0, 2 / 255),
        ("clean", 0, 24 / 255),
    ]


def test_a_cell_that_two_grids_ask_for_is_run_once(tmp_path: Path) -> None:
    study = study_of(
        tmp_path,
        '[base]\noptimizer.lr = 4\n[[grid]]\nname = "tuning"\nseed = [0]\noptimizer.lr = [2, 4.0]\n'
        '[[grid]]\nname = "final"\nseed = [0, 1]\n',
    )
    assert [(cell.values["seed"], cell.values["optimizer.lr"], cell.grids) for cell in study.cells] == [
        (0, 2.0, ["tuning"]),
        (0, 4.0, ["tuning", "final"]),
        (1, 4.0, ["final"]),
    ]


@pytest.mark.parametrize("spelling", ["optimizer.lr = 3", '"optimizer.lr" = 3', "[base.optimizer]\nlr = 3"])
def test_a_dotted_key_may_be_written_in_three_ways(tmp_path: Path, spelling: str) -> None:
    (cell,) = study_of(tmp_path, f"[base]\n{spelling}\n").cells
    assert cell.values["optimizer.lr"] == 3.0


def test_a_recipe_is_found_beside_the_study(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text("epochs = 50\n", encoding="utf-8")
    (cell,) = study_of(tmp_path, '[base]\nrecipe = "mine.toml"\n').cells
    assert cell.values["epochs"] == 50
    assert cell.command == f"conadv train {tmp_path / 'mine.toml'} --threads 1"


def test_without_a_recipe_your_own_data_has_the_defaults_of_train(tmp_path: Path) -> None:
    (cell,) = study_of(tmp_path, '[base]\n"data.path" = "photos"\n').cells
    wanted = flatten(load_recipe(None, {"data.path": "photos", "threads": "1"}))
    assert cell.values == wanted
    assert wanted["attack.epsilon"] != flatten(load_recipe("digits"))["attack.epsilon"]
    assert cell.command == "conadv train --data.path photos --threads 1"


def test_folders_differ_where_numbers_do_and_only_there(tmp_path: Path) -> None:
    def slug(base: str) -> str:
        (cell,) = study_of(tmp_path, f"[base]\n{base}\n[grid]\nseed = [0]\n").cells
        return cell.cell

    assert slug("epochs = 50") != slug("epochs = 60")
    assert slug("epochs = 50\ndelay = 2") == slug("delay = 2\nepochs = 50")
    assert slug("epochs = 50\nthreads = 1") == slug("epochs = 50\ncheckpoint.every = 3\nthreads = 2")


def test_names_of_folders_are_safe_and_not_too_long(tmp_path: Path) -> None:
    study = study_of(tmp_path, f'[[arm]]\nname = "../É/{"x" * 400}"\n[grid]\nattack.epsilon = ["4/255"]\n')
    (cell,) = study.cells
    assert "/" not in cell.cell
    assert not cell.cell.startswith(".")
    assert len(cell.cell.encode()) < 200


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[gird]\nseed = [0]", "did you mean grid?"),
        ("[grid]\nsead = [0]", "did you mean seed?"),
        ("[base]\noptimiser.lr = 3", "did you mean optimizer.lr?"),
        ('[base]\nrecipe = "digit"', "did you mean digits?"),
        ("[grid]\nseed = 3", "seed is 3 but must be a list"),
        ("[grid]\nseed = [[0]]", "must be a number, a text"),
        ("[grid]\nseed = [-1]", '"-1" for seed'),
        ("arm = 3", "write [[arm]]"),
        ('[[arm]]\nmethod = "vanilla"', "arm 1 needs a name"),
        ("[[grid]]\nseed = [0]", "needs a name"),
        ('[[grid]]\nname = "a"\n[[grid]]\nname = "a"', "the same name"),
        ('[[arm]]\nname = "a"\ngrids = ["finals"]\n[[grid]]\nname = "final"\nseed = [0]', "did you mean final?"),
        ('[[arm]]\nname = "a"\ngrids = "final"', "must be a list of names"),
        ("keep_checkpoints = 1", "must be true or false"),
        ("title = 3", "must be a text"),
        ('[base]\nmodel = "os:system"', "which a study file may not"),
        ('[base]\ndata.path = "os:system"', "which a study file may not"),
        ('[grid]\nmodel = ["os:system"]', "which a study file may not"),
        ('[[arm]]\nname = "A"\n[[arm]]\nname = "a"', "share the folder"),
        ("a = ", "Invalid"),
        (f"[grid]\nseed = {list(range(400))}\nepochs = {list(range(36, 336))}", "120000 cells"),
        ('[base]\nmethod = "vanilla"\n[grid]\ndelay = [0, 3]', "not 3"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_in_one_line(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(ValueError, match="study") as caught:
        study_of(tmp_path, text)
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_is_no_study_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "study.toml"
    for content in (b"\xff\xfe\x00", b"#" * 1_000_001, b"x = " + b"[" * 5000):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="study"):
            read_study(path)
    with pytest.raises(ValueError, match="no such file"):
        read_study(tmp_path / "none.toml")
    with pytest.raises(ValueError, match="directory"):
        read_study(tmp_path)
