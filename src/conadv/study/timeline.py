"""Draw the profile of a step: one row per rank, time from left to right."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from statistics import median_low
from typing import Any, NamedTuple

from conadv.atomic import read_text, write_output

# As core/step.py names them, which needs torch.
PREFIX, STEP = "conadv: ", "step"
COLOURS = {
    "load": "#9aa0a6",
    "attack": "#d1495b",
    "clean pass": "#2e6fbb",
    "adversarial pass": "#edae49",
    "hand-off": "#7b5ea7",
    "gradient sum": "#3a9d6e",
    "update": "#5b5b5b",
}


class Span(NamedTuple):
    """Something that a rank did from `start` to `end`, in milliseconds."""

    name: str
    start: float
    end: float


Timeline = dict[int | str, list[Span]]
"""The spans of each rank, and of each attacker of a pool by its name."""


def read_timeline(run: Path) -> Timeline:
    """The spans of each rank in a run folder that was profiled with `conadv train --profile STEPS`.

    Time 0 is the start of a typical step: when the last rank starts the step of median length among those recorded.
    """
    paths = (run / "traces").glob("*.json")
    files = {int(found[1]): path for path in paths if (found := re.fullmatch(r"rank-(\d{1,6})\.json", path.name))}
    if not files:
        raise ValueError(f"{run} has no traces: train in a new folder with conadv train --profile 5")
    spans = {rank: [span for _, span in _events(path)] for rank, path in sorted(files.items())}
    steps = [sorted((one.start, one.end) for one in own if one.name == STEP) for own in spans.values()]
    last = min(map(len, steps))  # ranks are matched by counting from the end
    if last == 0:
        raise ValueError(f"{run} has a trace without a whole step in it: profile more steps")
    begun = [max(start for start, _ in same) for same in zip(*(own[-last:] for own in steps), strict=True)]
    ended = [max(end for _, end in same) for same in zip(*(own[-last:] for own in steps), strict=True)]
    lengths = [end - start for start, end in zip(begun, ended, strict=True)]
    zero = begun[lengths.index(median_low(lengths))]
    rows: list[tuple[int | str, list[Span]]] = [*spans.items(), *_attackers(run, list(spans))]
    return {row: [Span(name, start - zero, end - zero) for name, start, end in own] for row, own in rows}


def _attackers(run: Path, ranks: Sequence[int]) -> list[tuple[str, list[Span]]]:
    """The spans of the attackers of each rank, by their names."""
    found: dict[str, list[Span]] = {}
    for rank in ranks:
        path = run / "traces" / f"rank-{rank}-attackers.json"
        for number, span in _events(path) if path.exists() else ():
            name = f"attacker {number}" if len(ranks) == 1 else f"rank {rank}, attacker {number}"
            found.setdefault(name, []).append(span)
    return sorted(found.items())


def draw_timeline(timelines: Sequence[tuple[str, Timeline]], out: Path) -> dict[str, object]:
    """Draw a typical step of each run, with its title, below each other on one time scale, as .svg, .png or .pdf."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("a timeline needs matplotlib: pip install 'conadv[study]'") from None
    rows = sum(0.42 * len(timeline) + 0.55 for _, timeline in timelines)
    figure = Figure(figsize=(9, 0.9 + rows), layout="constrained")
    lengths = draw_steps(figure, timelines)
    data = BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "conadv"}):
        figure.savefig(data, format=out.suffix[1:] or "svg", metadata={"Date": None} if out.suffix == ".svg" else None)
    write_output(out, data.getvalue())
    titles = [f"{title}, ms per step" for title, _ in timelines]
    return {"file": str(out), **dict(zip(titles, lengths, strict=True))}


def draw_steps(figure: Any, timelines: Sequence[tuple[str, Timeline]]) -> list[float]:
    """Draw the steps into a matplotlib figure or subfigure, and return the milliseconds of each."""
    from matplotlib.patches import Patch

    lengths = [_step_end(timeline) for _, timeline in timelines]
    heights = [len(timeline) + 1 for _, timeline in timelines]
    axes = figure.subplots(len(timelines), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for (title, timeline), length, axis in zip(timelines, lengths, axes, strict=True):
        axis.set_title(f"{title}: {length:.0f} ms per step", loc="left", fontsize=10)
        _draw_ranks(axis, timeline, length, max(lengths))
    axes[-1].set_xlabel("milliseconds from the start of a step (the gradient sum includes the wait for other ranks)")
    handles = [Patch(color=colour, label=name) for name, colour in COLOURS.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    return lengths


def _draw_ranks(axis: Any, timeline: Timeline, length: float, longest: float) -> None:
    """One row per rank; vertical lines mark the start and the end of the step."""
    for row, spans in enumerate(timeline.values()):
        for name, start, end in spans:
            if name in COLOURS and end > -0.1 * longest and start < 1.1 * longest:
                axis.barh(row, end - start, left=start, height=0.72, color=COLOURS[name])
    for time in (0, length):
        axis.axvline(time, color="black", linewidth=1)
    axis.set_yticks(
        range(len(timeline)), [f"rank {row}" if isinstance(row, int) else row for row in timeline], fontsize=9
    )
    axis.set(ylim=(len(timeline) - 0.4, -0.6), xlim=(-0.05 * longest, 1.08 * longest))
    axis.spines[["top", "right"]].set_visible(False)


def _step_end(timeline: Timeline) -> float:
    """The end, on the slowest rank, of the step that every rank has started by time 0."""
    steps = ([one for one in spans if one.name == STEP and one.start <= 0] for spans in timeline.values())
    return max(max(own, key=lambda one: one.start).end for own in steps if own)


def _events(path: Path) -> list[tuple[int, Span]]:
    """Our spans of a Chrome trace, by process, on the clock that all processes of a machine share."""
    found = []
    try:
        document = json.loads(read_text(path))
        base = float(document.get("baseTimeNanoseconds", 0)) / 1e6
        for event in document["traceEvents"]:
            name = str(event.get("name", ""))
            if event.get("cat") == "user_annotation" and name.startswith(PREFIX):
                start, end = event["ts"] / 1e3, (event["ts"] + event["dur"]) / 1e3
                found.append((int(event.get("pid", 0)), Span(name.removeprefix(PREFIX), base + start, base + end)))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):
        raise ValueError(f"{path} is not a trace that conadv train --profile wrote: profile the run again") from None
    return found
