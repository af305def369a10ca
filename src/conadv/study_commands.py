"""The commands of studies: sweep, report and timeline."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from conadv import config
from conadv.flags import Json, option
from conadv.printing import report as report_result
from conadv.printing import say

_OUT = ("--out", "-o")


def sweep(
    study: Annotated[Path, Parameter(help="A study file (TOML): a base, arms and a grid.")],
    /,
    *,
    out: Annotated[Path | None, option("The folder to write.", "DIR", "runs/STUDY")] = None,
    jobs: Annotated[int | None, option("How many cells to run at a time.", "N", "as many as the cores allow")] = None,
    nice: Annotated[int, option("Niceness of the cells, from 0 to 19.", "N", "0")] = 0,
    quiet: Annotated[bool, option("Print no progress.")] = False,
    json: Json = False,
) -> int:
    """Run the cells of a study as ordinary runs. Finished cells are skipped, and stopped ones are resumed.

    The exit status is 1 if cells failed.
    """
    from conadv.study.study_file import read_study
    from conadv.study.sweep import sweep as run_sweep

    folder = out or Path("runs") / study.stem
    tell = (lambda text: None) if quiet else say

    def work() -> Mapping[str, object]:
        return run_sweep(read_study(study, resolve), folder, resolve, config.added_values(), jobs, nice, tell)

    return 1 if report_result(work, json)["failed"] else 0


def report(
    folder: Annotated[Path, Parameter(help="The folder of a study, written by conadv sweep.")],
    /,
    *,
    out: Annotated[
        Path | None,
        option("The page to write; a CSV file of all cells goes next to it.", "FILE.html", "FOLDER/report.html", _OUT),
    ] = None,
    paper: Annotated[bool, option("Add the numbers of the paper.")] = False,
    json: Json = False,
) -> None:
    """Write the results of a study as one self-contained HTML page."""
    try:
        from conadv.study.report import write_report
    except ImportError as error:
        raise ValueError(f"a report needs {error.name}: pip install 'conadv[study]'") from None
    report_result(lambda: write_report(folder, out, paper), json)


def timeline(
    runs: Annotated[list[Path], Parameter(help="Folders of runs that were profiled with conadv train --profile 5.")],
    /,
    *,
    out: Annotated[Path, option("The picture to write: .svg, .png or .pdf.", "FILE", "timeline.svg", _OUT)] = Path(
        "timeline.svg"
    ),
    json: Json = False,
) -> None:
    """Draw what each rank does during one step: one row per rank, time from left to right, for one or more runs."""
    from conadv.study.timeline import draw_timeline, read_timeline

    report_result(lambda: draw_timeline([(run.name, read_timeline(run)) for run in runs], out), json)


def resolve(recipe: str, overrides: Mapping[str, str]) -> dict[str, Any]:
    """All values of a recipe, by dotted key, with changes on top."""
    return dict(config.flatten(config.load_recipe(recipe, overrides)))
