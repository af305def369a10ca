"""The picture of the README: what each rank does in one step of vanilla, DisAdv, recycled and ConAdv.

    python benchmarks/timelines.py --out docs/results/timelines.svg

Each rank has one chunk and one thread: the limit in which a batch cannot be divided further. It takes about a minute.
Run it on a machine that does nothing else; with fewer cores than ranks, the ranks share them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

from cyclopts import Parameter

from conadv.study.timeline import Timeline, draw_timeline, profile_run, read_timeline
from scripts import run_script

# Method, its name, layout, ranks, and chunks in a batch: one for each rank that learns from the images.
STEPS = (
    ("vanilla", "vanilla", "clean", 2, 2),
    ("disadv", "DisAdv", "clean | adv+attack", 2, 1),
    ("recycled", "recycled", "clean | adv", 2, 1),
    ("conadv", "ConAdv", "clean | adv | attack", 3, 1),
)


def timelines(
    *,
    out: Annotated[Path, Parameter(help="The picture to write: .svg, .png or .pdf.")] = Path("timelines.svg"),
    model: Annotated[str, Parameter(help="A network by its name.")] = "resnet20",
    width: Annotated[int, Parameter(help="Channels of its first stage.")] = 16,
    chunk_size: Annotated[int, Parameter(help="Images of each rank.")] = 64,
    image_size: Annotated[int, Parameter(help="Their height and width in pixels.")] = 32,
    profile: Annotated[int, Parameter(help="Steps to record; the one of median length is drawn.")] = 9,
) -> None:
    """Draw one step of each method, one below the other on one scale."""
    fields = {
        "model": model,
        "width": width,
        "chunk_size": chunk_size,
        "data.name": "synthetic",
        "data.image_size": image_size,
        "data.train_size": 2 * chunk_size,  # few, because a run ends with an evaluation
        "profile": profile,
        "max_steps": profile + 3,  # the first three are not recorded
    }
    with TemporaryDirectory() as folder:
        drawn = draw_timeline(list(_measured(Path(folder), fields, chunk_size, print)), out)
    for name, value in drawn.items():
        print(f"{name}: {value:.0f}" if isinstance(value, float) else f"{name}: {value}")


def _measured(
    folder: Path, fields: dict[str, object], chunk_size: int, tell: Callable[[str], None]
) -> Iterator[tuple[str, Timeline]]:
    for method, name, layout, ranks, chunks in STEPS:
        tell(f"{name} on {ranks} ranks ...")
        sizes = {"batch_size": chunks * chunk_size, "schedule.warmup_epochs": 0}
        profile_run(folder / method, method, layout, ranks, {**fields, **sizes})
        yield f"{name} on {ranks} ranks, {layout}", read_timeline(folder / method)


if __name__ == "__main__":
    run_script(timelines)
