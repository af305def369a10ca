"""When does robust training collapse? Accuracy under PGD on held-out images after each epoch of the runs of a sweep.

python studies/robust/overfitting.py [--runs runs/robust-overfitting] [--figure docs/images/overfitting.svg]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pandas as pd

HERE = Path(__file__).parent
EPOCHS = HERE / "overfitting.csv"  # arm, seed, epochs of the run, epoch, and accuracies in percent
MEASURES = ["held_out_robust_top1", "held_out_top1", "adv_top1"]
COLOURS = {"one step, fresh": "#d55e00", "one step, delay 1": "#0072b2", "one step, delay 4": "#009e73"}


def read_runs(folder: Path) -> pd.DataFrame:
    """Read every evaluation of the finished runs of a sweep: during the run, and at its end."""
    rows = []
    for line in (folder / "results.jsonl").read_text(encoding="utf-8").splitlines():
        cell = json.loads(line)
        if not cell["summary"]:
            continue
        about = {"arm": cell["arm"], "seed": cell["summary"]["seed"], "epochs": cell["summary"]["epochs"]}
        steps = map(json.loads, (folder / "runs" / cell["cell"] / "metrics.jsonl").read_text().splitlines())
        found = [step for step in steps if MEASURES[0] in step] + [{**cell["summary"], "epoch": about["epochs"]}]
        rows += [{**about, **{name: step[name] for name in ("epoch", *MEASURES)}} for step in found]
    rows.sort(key=lambda row: (row["epochs"], list(COLOURS).index(row["arm"]), row["seed"], row["epoch"]))
    return pd.DataFrame(rows).astype({"epoch": int}).round(2)


def collapse(run: pd.DataFrame) -> int | None:
    """The first epoch after which accuracy under PGD is below half of the best one so far; None: there is none."""
    robust = run.sort_values("epoch").set_index("epoch")[MEASURES[0]]
    below = robust[robust < robust.cummax() / 2]
    return None if below.empty else int(below.index[0])


def table(epochs: pd.DataFrame) -> str:
    """One row per run: its best and last accuracy under PGD, and when it collapsed."""
    lines = ["| arm | seed | epochs | best under PGD, % | last, % | collapsed in epoch |", "|---|--:|--:|--:|--:|---|"]
    for (length, arm, seed), run in epochs.groupby(["epochs", "arm", "seed"], sort=False):
        robust, when = run.sort_values("epoch")[MEASURES[0]], collapse(run)
        lines.append(f"| {arm} | {seed} | {length} | {robust.max():.1f} | {robust.iloc[-1]:.1f} | {when or 'no'} |")
    return "\n".join(lines) + "\n"


def draw(epochs: pd.DataFrame, out: Path) -> None:
    """Draw one line per run; the longer runs are dashed."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams["svg.hashsalt"] = "overfitting"  # the same file from the same results
    figure = Figure(figsize=(7.2, 3.4), layout="constrained", facecolor="white")
    axis = figure.subplots()
    named = set()
    for (length, arm, _), run in epochs.groupby(["epochs", "arm", "seed"], sort=False):
        run = run.sort_values("epoch")
        style = {"color": COLOURS[arm], "linewidth": 1.4, "marker": "o", "ms": 3}
        label = None if arm in named else arm.removeprefix("one step, ")
        axis.plot(run["epoch"], run[MEASURES[0]], "-" if length == 6 else "--", label=label, **style)
        named.add(arm)
    axis.set(xlabel="epoch", ylabel="held-out accuracy under PGD, %", ylim=(-1, None))
    axis.set_xticks(range(2, 21, 2))
    axis.grid(axis="y", color="#d9dde3", linewidth=0.6)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False)
    figure.savefig(out, metadata={"Date": None} if out.suffix == ".svg" else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, help="the folder of the sweep, to write overfitting.csv from")
    parser.add_argument("--figure", type=Path)
    given = parser.parse_args()
    if given.runs:
        read_runs(given.runs).to_csv(EPOCHS, index=False)
    epochs = pd.read_csv(EPOCHS)
    print(table(epochs))
    if given.figure:
        draw(epochs, given.figure)


if __name__ == "__main__":
    main()
