"""The profile of a run as one picture: a row per rank, time to the right, one step marked."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conadv.trainer.files import read_bounded, replace_file

# As core/spans.py names them, which needs torch.
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
_LARGEST_TRACE = 2**30


@dataclass(frozen=True)
class Span:
    """What a rank did from `start` to `end`, in milliseconds."""

    name: str
    start: float
    end: float


Timeline = dict[int, list[Span]]


def read_timeline(run: Path) -> Timeline:
    """The spans of each rank of a run that was profiled with `conadv train --profile STEPS`.

    Args:
        run: the folder of the run.

    Returns:
        Spans by rank. Time 0 is the start of the last step that all ranks recorded.
    """
    files = {int(found[1]): path for path in (run / "traces").glob("*.json") if (found := _rank_of(path))}
    if not files:
        raise ValueError(f"{run} has no traces: profile some steps with conadv train --profile 5 --run {run}")
    spans = {rank: _spans(path) for rank, path in sorted(files.items())}
    zero = max(_starts(rank_spans)[-1] for rank_spans in spans.values())
    return {
        rank: [Span(one.name, one.start - zero, one.end - zero) for one in rank_spans]
        for rank, rank_spans in spans.items()
    }


def draw_timeline(timelines: Sequence[tuple[str, Timeline]], out: Path) -> dict[str, object]:
    """Draw the last recorded step of some runs, one below the other, on one scale.

    Args:
        timelines: titles and what `read_timeline` returned.
        out: the picture to write; its suffix (.svg, .png, .pdf) says which kind.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError:
        raise ValueError("a timeline needs matplotlib: pip install 'conadv[plots]'") from None
    steps = [_last_step(timeline) for _, timeline in timelines]
    end = max(step.end for step in steps)
    rows = [len(timeline) for _, timeline in timelines]
    figure = Figure(figsize=(9, 0.9 + sum(0.42 * count + 0.55 for count in rows)), layout="constrained")
    axes = figure.subplots(len(timelines), 1, sharex=True, squeeze=False, height_ratios=[count + 1 for count in rows])
    for (title, timeline), step, plot in zip(timelines, steps, axes[:, 0], strict=True):
        plot.set_title(f"{title}: {step.end:.0f} ms per step", loc="left", fontsize=10)
        for row, spans in enumerate(timeline.values()):
            for one in spans:
                if one.name in COLOURS and one.end > -0.1 * end and one.start < 1.1 * end:
                    plot.barh(row, one.end - one.start, left=one.start, height=0.72, color=COLOURS[one.name])
        plot.axvline(0, color="black", linewidth=1)
        plot.axvline(step.end, color="black", linewidth=1)
        plot.set_yticks(range(len(timeline)), [f"rank {rank}" for rank in timeline], fontsize=9)
        plot.set_ylim(len(timeline) - 0.4, -0.6)
        plot.set_xlim(-0.05 * end, 1.08 * end)
        plot.spines[["top", "right"]].set_visible(False)
    axes[-1, 0].set_xlabel("milliseconds from the start of a step")
    figure.legend(
        handles=[Patch(color=colour, label=name) for name, colour in COLOURS.items()],
        loc="outside lower center",
        ncols=4,
        frameon=False,
        fontsize=9,
    )
    _write(figure, out)
    return {
        "file": str(out),
        **{f"{title}, ms per step": step.end for (title, _), step in zip(timelines, steps, strict=True)},
    }


def _write(figure: Any, out: Path) -> None:
    from io import BytesIO

    import matplotlib

    data = BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "conadv"}):
        figure.savefig(data, format=out.suffix[1:] or "svg", metadata={"Date": None} if out.suffix == ".svg" else None)
    try:
        replace_file(out, data.getvalue())
    except OSError as error:
        raise ValueError(f"cannot write {out} ({error.strerror or error}): name another file") from None


def _rank_of(path: Path) -> re.Match[str] | None:
    return re.fullmatch(r"rank-(\d{1,6})\.json", path.name)


def _spans(path: Path) -> list[Span]:
    """Our spans of a Chrome trace, on the clock that all processes of a machine share."""
    try:
        document = json.loads(read_bounded(path, _LARGEST_TRACE))
        base = float(document.get("baseTimeNanoseconds", 0)) / 1e6
        found = [
            Span(
                event["name"].removeprefix(PREFIX), base + event["ts"] / 1e3, base + (event["ts"] + event["dur"]) / 1e3
            )
            for event in document["traceEvents"]
            if event.get("cat") == "user_annotation" and str(event.get("name", "")).startswith(PREFIX)
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ValueError(f"{path} is not a trace that conadv train --profile wrote: profile the run again") from None
    if not _starts(found):
        raise ValueError(f"{path} has no whole step in it: profile more steps")
    return found


def _span(event: dict[str, Any], base: float) -> Span:
    start = base + float(event["ts"]) / 1e3
    return Span(event["name"].removeprefix(PREFIX), start, start + float(event["dur"]) / 1e3)


def _starts(spans: list[Span]) -> list[float]:
    return sorted(one.start for one in spans if one.name == STEP)


def _last_step(timeline: Timeline) -> Span:
    """From the start of the last step to its end on the rank that takes longest."""
    ends = [max(one.end for one in spans if one.name == STEP) for spans in timeline.values()]
    return Span(STEP, 0.0, max(ends))
