"""Draw accuracy by batch size, from the results of cifar10-batch: every run, their means and 95 % intervals.

python studies/earlier/figure.py docs/images/accuracy-by-batch.svg
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure
from scipy import stats

from conadv.study.compare import cells, main_cells
from conadv.study.results import read_results

METHODS = ("vanilla", "ConAdv", "recycled", "SAM", "vanilla + AutoAugment", "ConAdv + AutoAugment")
BATCHES = (125, 250, 500, 1000)


def main(out: Path) -> None:
    matplotlib.rcParams["svg.hashsalt"] = "by batch"  # the same file from the same results
    runs_of = main_cells(cells(read_results(Path(__file__).parent / "cifar10-batch")))
    figure = Figure(figsize=(5.2, 4.2), layout="constrained")
    axis = figure.add_subplot(xlabel="batch size", ylabel="test accuracy, %")
    for number, method in enumerate(METHODS):
        places = [batch * 1.04 ** (number - 2.5) for batch in BATCHES]  # side by side
        runs = [runs_of[runs_of.label == f"{method}, batch {batch:,}"].test_top1 for batch in BATCHES]
        halves = [stats.t.ppf(0.975, len(run) - 1) * run.std() / math.sqrt(len(run)) for run in runs]
        for place, run in zip(places, runs, strict=True):
            axis.scatter([place] * len(run), run, s=14, facecolors="none", edgecolors=f"C{number}", linewidths=0.7)
        means = [run.mean() for run in runs]
        axis.errorbar(places, means, halves, color=f"C{number}", marker="osD^vP"[number], ms=4, lw=1, label=method)
    axis.set_xscale("log", base=2)
    axis.set_xticks(BATCHES, [f"{batch:,}" for batch in BATCHES])
    axis.minorticks_off()
    axis.grid(axis="y", color="#d9dde3", linewidth=0.6)
    axis.spines[["top", "right"]].set_visible(False)
    figure.legend(fontsize=9, frameon=False, loc="outside lower center", ncols=2)
    figure.savefig(out, metadata={"Date": None})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
