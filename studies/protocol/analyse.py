"""The tables of the protocol study, and its figure: each arm's accuracy minus vanilla's, seed by seed.

python studies/protocol/analyse.py [RESULTS.jsonl] [--figure FILE.svg]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pandas as pd
from scipy import stats

from conadv.study.compare import holm, interval

HERE = Path(__file__).parent
MARGIN = 0.5  # points, written down before the first result
CONTROLS = ("second crop", "no adversary", "AutoAugment", "three views, no adversary")
GREY, BLUE, INK = "#7a828c", "#0072b2", "#1b1e23"


def read(path: Path) -> pd.DataFrame:
    """One row per finished cell: part of the study, arm, ε in 255ths (empty: no twins), rate, seed and accuracies."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        cell = json.loads(line)
        values, summary = cell["values"], cell["summary"]
        if summary:
            part = min(cell["grids"], key=lambda grid: "rate" in grid)  # a cell may be of the screen and of a rate
            named = (name for name in ("final", "rate", "SGD") if name in part)
            part = next(named, "screen")
            known = {"part": part, "arm": cell["arm"], "seed": values["seed"], "rate": values["optimizer.lr"]}
            known["epsilon"] = "" if values["method"] == "vanilla" else f"{255 * values['attack.epsilon']:.0f}"
            known["accuracy"] = summary["test_top1" if part == "final" else "held_out_top1"]
            rows.append({**known, **{name: summary.get(name) for name in ("train_top1", "adv_top1")}})
    return pd.DataFrame(rows)


def differences(cells: pd.DataFrame) -> pd.DataFrame:
    """The cells of one part without vanilla, each with its accuracy minus that of vanilla with the same seed."""
    base = cells[cells.arm == "vanilla"].set_index("seed").accuracy
    rest = cells[cells.arm != "vanilla"]
    return rest.assign(difference=rest.accuracy - rest.seed.map(base))


def screen_table(cells: pd.DataFrame) -> str:
    """The screen as Markdown, best arm first: means over the seeds."""
    cells = cells[cells.part == "screen"]
    lines = [
        "| arm | ε, 255ths | seeds | held-out, % | minus vanilla, points | training images, % | twins in training, % |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    gains = differences(cells).groupby(["arm", "epsilon"]).difference.mean()
    groups = cells.groupby(["arm", "epsilon"])
    for (arm, epsilon), own in sorted(groups, key=lambda item: -gains.get(item[0], 0.0)):
        gain = "" if arm == "vanilla" else f"{gains[arm, epsilon]:+.2f}".replace("-", "−")
        numbers = [own.accuracy.mean(), own.train_top1.mean(), own.adv_top1.mean()]
        held_out, train, twins = ("" if pd.isna(number) else f"{number:.1f}" for number in numbers)
        lines.append(f"| {arm} | {epsilon} | {len(own)} | {held_out} | {gain} | {train} | {twins} |")
    return "\n".join(lines) + "\n"


def final_table(cells: pd.DataFrame) -> str:
    """The final runs as Markdown: paired differences from vanilla, tested for the arms that survived."""
    cells = cells[cells.part == "final"]
    lines = [
        "| arm | seeds | test, % | minus vanilla, points | 95 % interval | p, Holm | 90 % interval above −0.5 |",
        "|---|--:|--:|--:|--:|--:|---|",
    ]
    gains = differences(cells).groupby("arm", sort=False).difference
    tested = gains.apply(lambda own: stats.ttest_1samp(own, 0).pvalue)
    corrected = holm(tested.drop(labels=[arm for arm in CONTROLS if arm in tested.index]))
    for arm, own in cells.groupby("arm", sort=False):
        start = f"| {arm} | {len(own)} | {own.accuracy.mean():.2f} ± {own.accuracy.std():.2f} |"
        if arm == "vanilla":
            lines.append(f"{start} | | | |")
            continue
        gain = gains.get_group(arm)
        low, high = interval(gain)
        bound = stats.t.interval(0.9, len(gain) - 1, gain.mean(), stats.sem(gain))[0]
        p = f"{corrected[arm]:.3f}" if arm in corrected.index else "not tested"
        verdict = "yes" if bound > -MARGIN else "no"
        text = f"{start} {gain.mean():+.2f} | {low:+.2f} to {high:+.2f} | {p} | {verdict} |"
        lines.append(text.replace(" -", " −"))
    return "\n".join(lines) + "\n"


def draw(cells: pd.DataFrame, out: Path) -> None:
    """Draw each arm's differences from vanilla: every seed hollow, the mean filled, the final runs with their bars."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams["svg.hashsalt"] = "protocol"  # the same file from the same results
    parts = [part for part in ("screen", "final") if (cells.part == part).any()]
    found = {part: differences(cells[cells.part == part]) for part in parts}
    heights = [own.groupby(["arm", "epsilon"]).ngroups for own in found.values()]
    with matplotlib.rc_context({"font.size": 9.5, "text.color": INK, "axes.labelcolor": INK, "axes.titlesize": 10.5}):
        figure = Figure(figsize=(8.4, 1.3 + 0.27 * sum(heights)), layout="constrained", facecolor="white")
        axes = figure.subplots(len(parts), 1, squeeze=False, sharex=True, height_ratios=heights)[:, 0]
        for axis, part in zip(axes, parts, strict=True):
            _draw_part(axis, found[part], final=part == "final")
        axes[-1].set_xlabel("accuracy minus vanilla's of the same seed, points")
        figure.savefig(out, metadata={"Date": None} if out.suffix == ".svg" else None)


def _draw_part(axis: Any, cells: pd.DataFrame, final: bool) -> None:
    order = cells.groupby(["arm", "epsilon"]).difference.mean().sort_values()
    names = []
    for place, (arm, epsilon) in enumerate(order.index):
        values = cells[(cells.arm == arm) & (cells.epsilon == epsilon)].difference
        colour = GREY if arm in CONTROLS else BLUE
        axis.scatter(values, [place] * len(values), s=20, facecolors="none", edgecolors=colour, linewidths=0.9)
        if final and len(values) > 1:
            axis.plot(interval(values), [place] * 2, color=colour, linewidth=2.2, alpha=0.55)
        axis.plot([values.mean()], [place], "D", color=colour, ms=5)
        names.append(arm if arm in CONTROLS else f"{arm}, ε = {epsilon}/255")
    axis.set_yticks(range(len(names)), names)
    axis.axvline(0, color=INK, linewidth=0.8)
    axis.set_title("Final runs: test images" if final else "Screen: held-out training images", loc="left")
    axis.grid(axis="x", color="#d9dde3", linewidth=0.6)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="?", type=Path, default=HERE / "results.jsonl")
    parser.add_argument("--figure", type=Path)
    given = parser.parse_args()
    cells = read(given.results)
    print(screen_table(cells))
    if (cells.part == "final").any():
        print(final_table(cells))
    if given.figure:
        draw(cells, given.figure)


if __name__ == "__main__":
    main()
