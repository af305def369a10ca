"""The commands of studies: sweep, report and timeline. The text of a command is its help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from conadv.config.fields import number
from conadv.printing import report as report_result
from conadv.printing import say

Switch = Annotated[bool, Parameter(negative="", show_default=False)]
Json = Annotated[Switch, Parameter(help="Print one JSON object on standard output, and nothing else there.")]
Out = Parameter(name=("--out", "-o"))


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
    tell = (lambda text: None) if quiet else say
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
