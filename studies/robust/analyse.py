"""The tests of the robust study, and its figure: robust accuracy against step time, and what each delay costs.

python studies/robust/analyse.py [RESULTS.jsonl] [--figure FILE.svg]
"""

from __future__ import annotations

import argparse
import json
import math
from collections import defaultdict
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

from scipy import stats

HERE = Path(__file__).parent
MARGIN = 1.0  # points, written down before the first final cell
# Arms that are compared with one that attacks the current weights; the first two are tested, the others described.
PAIRS = (
    ("one step, delay 1", "one step, fresh"),
    ("three steps, delay 2", "three steps, fresh"),
    ("one step, delay 2", "one step, fresh"),
    ("one step, delay 4", "one step, fresh"),
    ("one step, delay 8", "one step, fresh"),
    ("recycled", "one step, fresh"),
)
GREY, ORANGE, BLUE, INK = "#7a828c", "#d55e00", "#0072b2", "#1b1e23"


# The shortest step with enough devices: learning costs 3, each step of a fresh attack 2 before it.
STEP = {"one step, fresh": 5 / 3, "three steps, fresh": 9 / 3}


class Shown(NamedTuple):
    """How the left half of the figure shows an arm."""

    arm: str
    place: float
    """Its step time; arms of the same step time stand side by side."""
    colour: str
    marker: str


SHOWN = (
    Shown("vanilla", 1.0, GREY, "D"),
    Shown("one step, delay 1", 0.94, BLUE, "o"),
    Shown("three steps, delay 2", 1.06, BLUE, "s"),
    Shown("one step, fresh", STEP["one step, fresh"], ORANGE, "o"),
    Shown("three steps, fresh", STEP["three steps, fresh"], ORANGE, "s"),
)

Figures = dict[str, dict[int, float]]
"""By arm and seed."""


class Comparison(NamedTuple):
    """A delay against no delay, in points of accuracy."""

    seeds: int
    mean: float
    low: float
    high: float

    @property
    def equivalent(self) -> bool:
        """Whether the 95 % interval lies within the margin: two one-sided tests at 2.5 % each."""
        return self.low > -MARGIN and self.high < MARGIN


def read(path: Path, metric: str = "robust_top1") -> Figures:
    """Read the finished cells of the final grids; a cell of another learning rate or radius is not one of them."""
    found: Figures = defaultdict(dict)
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if row["summary"] and any(grid.startswith("final") for grid in row["grids"]):
            found[row["arm"]][row["summary"]["seed"]] = row["summary"][metric]
    return dict(found)


def differences(own: dict[int, float], base: dict[int, float]) -> list[float]:
    """The differences of the seeds that both have."""
    return [own[seed] - base[seed] for seed in sorted(own.keys() & base.keys())]


def half_width(values: list[float]) -> float:
    """Half of the 95 % interval of the mean, by Student's t."""
    return float(stats.t.ppf(0.975, len(values) - 1)) * stdev(values) / math.sqrt(len(values))


def compare(own: dict[int, float], base: dict[int, float]) -> Comparison | None:
    """Compare the seeds that both have; None: fewer than two."""
    found = differences(own, base)
    if len(found) < 2:
        return None
    mean, half = fmean(found), half_width(found)
    return Comparison(len(found), mean, mean - half, mean + half)


def draw(figures: Figures, out: Path) -> None:
    """Draw both halves of the figure: every seed hollow, the mean filled, its 95 % interval as a bar."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams["svg.hashsalt"] = "robust"  # the same file from the same results
    with matplotlib.rc_context({"font.size": 9.5, "text.color": INK, "axes.labelcolor": INK, "axes.titlesize": 10.5}):
        figure = Figure(figsize=(8.4, 4.0), layout="constrained", facecolor="white")
        left, right = figure.subplots(1, 2, width_ratios=(1.55, 1))
        _draw_steps(left, figures)
        _draw_costs(right, figures)
        figure.savefig(out, metadata={"Date": None} if out.suffix == ".svg" else None)


def _draw_steps(axis: Any, figures: Figures) -> None:
    """Robust accuracy against step time: an arrow from each fresh attack to the same attack beside the update."""
    shown = [one for one in SHOWN if one.arm in figures]
    top = max((fmean(figures[one.arm].values()) for one in shown), default=1.0)
    for one in shown:
        values = list(figures[one.arm].values())
        aside = one.place + (0.06 if one.place >= 1 else -0.06)
        _draw_values(axis, values, one.place, aside, one.colour, one.marker, vertical=True)
    for height, far, text in ((0.8, 5 / 3, "one attack step, delay 1"), (0.62, 3.0, "three attack steps, delay 2")):
        arrow = {"arrowstyle": "->", "color": INK, "linewidth": 1.0, "shrinkA": 0, "shrinkB": 0}
        axis.annotate("", (1.0, height * top), (far, height * top), arrowprops=arrow)
        axis.annotate(text, (1.04, height * top), (0, -4), textcoords="offset points", va="top")
    for place, height, colour, text in (
        (1.0, 1.08 * top, BLUE, "attack beside\nthe update"),
        ((5 / 3 + 3) / 2, 1.08 * top, ORANGE, "attack before the update"),
        (1.15, 0.0, GREY, "plain training"),
    ):
        where = {"ha": "left", "va": "center"} if colour == GREY else {"ha": "center", "va": "bottom"}
        axis.text(place, height, text, color=colour, fontweight="bold", **where)
    axis.set(
        title="Robust accuracy against step time",
        xlabel="shortest step with enough devices (plain training = 1)",
        ylabel="test accuracy under attack, %",
        xlim=(0.55, 3.3),
        xticks=(1, 5 / 3, 3),
        xticklabels=("1", "1.67", "3"),
        ylim=(-0.05 * top, 1.3 * top),
    )
    _tidy(axis, "y")


def _draw_costs(axis: Any, figures: Figures) -> None:
    """What each delay costs: the differences from the fresh attack, seed by seed, and the margin as a band."""
    axis.axvspan(-MARGIN, MARGIN, color="#e8eef4", linewidth=0)
    axis.axvline(0, color=GREY, linewidth=0.8)
    names: list[str] = []
    for arm, base in PAIRS[:-1]:
        found = differences(figures.get(arm, {}), figures.get(base, {}))
        if found:
            marker = "s" if arm.startswith("three") else "o"
            _draw_values(axis, found, len(names), len(names) - 0.2, BLUE, marker, vertical=False)
            names.append(arm.replace(", ", ",\n"))
    axis.set_yticks(range(len(names)), names)
    axis.set(
        title="What a delay costs",
        xlabel=f"difference from no delay, points\n(shaded: the margin of {MARGIN:g} point)",
        ylim=(max(len(names), 1) - 0.5, -0.6),
    )
    reach = max([1.5 * MARGIN, *(abs(edge) for edge in axis.get_xlim())])
    axis.set_xlim(-reach, reach)
    _tidy(axis, "x")


def _draw_values(
    axis: Any, values: list[float], place: float, aside: float, colour: str, marker: str, *, vertical: bool
) -> None:
    """Every value hollow, aside from the mean, which is filled; its 95 % interval as a bar if there are two or more."""
    several, mean = ([aside] * len(values), values), (place, fmean(values))
    bar = {"yerr" if vertical else "xerr": half_width(values)} if len(values) > 1 else {}
    step = 1 if vertical else -1  # the axis of the values comes second, or first
    axis.scatter(*several[::step], s=24, marker=marker, facecolors="none", edgecolors=colour, linewidths=0.9)
    axis.errorbar(*mean[::step], **bar, color=colour, marker=marker, ms=6, capsize=3, ls="")


def _tidy(axis: Any, grid: str) -> None:
    axis.grid(axis=grid, color="#d9dde3", linewidth=0.6)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)


def table(path: Path) -> str:
    """The results as Markdown: the mean over the seeds, and their standard deviation where there are two or more."""
    robust, clean = read(path), read(path, "test_top1")
    order = ["vanilla", *(arm for pair in PAIRS[:2] for arm in reversed(pair)), *(arm for arm, _ in PAIRS)]
    lines = ["| training | seeds | clean, % | under PGD, % | shortest step |", "|---|--:|--:|--:|--:|"]
    for arm in dict.fromkeys(order):
        if arm in robust:
            step = f"{STEP.get(arm, 1):.3g}"
            lines.append(f"| {arm} | {len(robust[arm])} | {_spread(clean[arm])} | {_spread(robust[arm])} | {step} |")
    return "\n".join(lines) + "\n"


def _spread(seeds: dict[int, float]) -> str:
    values = list(seeds.values())
    return f"{fmean(values):.1f}" + (f" ± {stdev(values):.1f}" if len(values) > 1 else "")


def verdicts(path: Path) -> str:
    """The comparisons as Markdown, the two that are tested with their verdict."""
    robust, clean = read(path), read(path, "test_top1")
    lines = ["| comparison | seeds | under PGD, points | clean, points | within 1 point |", "|---|--:|--:|--:|---|"]
    for number, (arm, base) in enumerate(PAIRS):
        found, beside = (compare(values.get(arm, {}), values.get(base, {})) for values in (robust, clean))
        if found and beside:
            verdict = ("yes" if found.equivalent else "not shown") if number < 2 else "not tested"
            lines.append(f"| {arm} − fresh | {found.seeds} | {_interval(found)} | {_interval(beside)} | {verdict} |")
    return "\n".join(lines) + "\n"


def _interval(found: Comparison) -> str:
    return f"{found.mean:+.2f} ({found.low:+.2f} to {found.high:+.2f})".replace("-", "−")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="?", type=Path, default=HERE / "results.jsonl")
    parser.add_argument("--figure", type=Path)
    given = parser.parse_args()
    print(table(given.results))
    print(verdicts(given.results))
    if given.figure:
        draw(read(given.results), given.figure)


if __name__ == "__main__":
    main()
