"""The tests of the robust study, and its figure: robust accuracy against the shortest step with enough devices.

python studies/robust/analyse.py [RESULTS.jsonl] [--figure FILE.svg]
"""

from __future__ import annotations

import argparse
import json
import math
from collections import defaultdict
from pathlib import Path
from statistics import fmean, stdev
from typing import NamedTuple

from scipy import stats

HERE = Path(__file__).parent
MARGIN = 1.0  # points, written down before the first result
# Arms that are compared with one that attacks the current weights; the first two are tested, the others described.
PAIRS = (
    ("one step, delay 1", "one step, fresh"),
    ("five steps, delay 4", "five steps, fresh"),
    ("one step, delay 2", "one step, fresh"),
    ("one step, delay 4", "one step, fresh"),
    ("one step, delay 8", "one step, fresh"),
    ("recycled", "one step, fresh"),
)
# The arms as the figure draws them.
ORDER = (
    "vanilla",
    "one step, fresh",
    "one step, delay 1",
    "one step, delay 2",
    "one step, delay 4",
    "one step, delay 8",
    "five steps, fresh",
    "five steps, delay 4",
    "recycled",
)
# The shortest step with enough devices: learning costs 3, each step of a fresh attack 2 before it.
STEP = {"one step, fresh": 5 / 3, "five steps, fresh": 13 / 3}

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


def compare(own: dict[int, float], base: dict[int, float]) -> Comparison | None:
    """Compare the seeds that both have; None: fewer than two."""
    differences = [own[seed] - base[seed] for seed in sorted(own.keys() & base.keys())]
    if len(differences) < 2:
        return None
    mean = fmean(differences)
    half = stats.t.ppf(0.975, len(differences) - 1) * stdev(differences) / math.sqrt(len(differences))
    return Comparison(len(differences), mean, mean - half, mean + half)


def draw(figures: Figures, out: Path) -> None:
    """Draw robust accuracy against step time: every run hollow, the mean filled, its 95 % interval as a bar."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams["svg.hashsalt"] = "robust"  # the same file from the same results
    figure = Figure(figsize=(5.2, 4.2), layout="constrained")
    axis = figure.add_subplot(xlabel="shortest step with enough devices (vanilla = 1)", ylabel="accuracy under PGD, %")
    arms = [arm for arm in ORDER if arm in figures]
    beside = [
        arm for arm in arms if arm not in STEP and arm != "vanilla"
    ]  # these have vanilla's step: set side by side
    for number, arm in enumerate(arms):
        values = list(figures[arm].values())
        place = STEP.get(arm, 1.0) + (0.09 * (beside.index(arm) - (len(beside) - 1) / 2) if arm in beside else 0)
        colour, marker = f"C{number}", "o" if arm in STEP else "^"
        axis.scatter([place] * len(values), values, s=26, marker=marker, facecolors="none", edgecolors=colour)
        half = stats.t.ppf(0.975, len(values) - 1) * stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
        axis.errorbar(place, fmean(values), yerr=half, color=colour, marker=marker, ms=5, capsize=3, ls="", label=arm)
    axis.set(xlim=(0.5, max(STEP.get(arm, 1.0) for arm in arms) + 0.3), ylim=(-2, None))
    axis.grid(axis="y", color="#d9dde3", linewidth=0.6)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    figure.legend(fontsize=9, frameon=False, loc="outside lower center", ncols=3)
    figure.savefig(out, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="?", type=Path, default=HERE / "results.jsonl")
    parser.add_argument("--figure", type=Path)
    given = parser.parse_args()
    figures, clean = read(given.results), read(given.results, "test_top1")
    for arm, seeds in figures.items():
        robust = " ".join(f"{seeds[seed]:.1f}" for seed in sorted(seeds))
        print(f"{arm}: under PGD {robust}; clean {fmean(clean[arm].values()):.1f}")
    for arm, base in PAIRS:
        found = compare(figures.get(arm, {}), figures.get(base, {}))
        if found is not None:
            verdict = "equivalent" if found.equivalent else "not shown to be equivalent"
            interval = f"{found.mean:+.2f} ({found.low:+.2f} to {found.high:+.2f}, {found.seeds} seeds)"
            print(f"{arm} - {base}: {interval}, margin {MARGIN:g}: {verdict}")
    if given.figure:
        draw(figures, given.figure)


if __name__ == "__main__":
    main()
