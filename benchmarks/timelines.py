"""The picture of the README: what each rank does in one step of vanilla, DisAdv, recycled and ConAdv.

    python benchmarks/timelines.py --out docs/images/timelines.svg

Each rank has one chunk and one thread: the limit in which a batch cannot be divided further. It takes about a minute.
Run it on a machine that does nothing else; with fewer cores than ranks, the ranks share them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from alternate import arguments
from conadv.study.timeline import Timeline, draw_timeline, read_timeline
from layout import train

# Method, its name, layout, ranks, and chunks in a batch: one for each rank that learns from the images.
STEPS = (
    ("vanilla", "vanilla", "clean", 2, 2),
    ("disadv", "DisAdv", "clean | adv+attack", 2, 1),
    ("recycled", "recycled", "clean | adv", 2, 1),
    ("conadv", "ConAdv", "clean | adv | attack", 3, 1),
)


def main() -> None:
    given = arguments(
        __doc__ or "", out="timelines.svg", model="resnet20", width=16, chunk_size=64, image_size=32, steps=9
    )
    fields = {
        "model": given.model,
        "width": given.width,
        "chunk_size": given.chunk_size,
        "data.name": "synthetic",
        "data.image_size": given.image_size,
        "data.train_size": 2 * given.chunk_size,  # few, because a run ends with an evaluation
        "profile": given.steps,
        "max_steps": given.steps + 3,  # the first three are not recorded
    }
    with TemporaryDirectory() as folder:
        drawn = draw_timeline(list(_measured(Path(folder), fields, given.chunk_size)), Path(given.out))
    print(", ".join(f"{name}: {value}" for name, value in drawn.items()))


def _measured(folder: Path, fields: dict[str, object], chunk_size: int) -> Iterator[tuple[str, Timeline]]:
    for method, name, layout, ranks, chunks in STEPS:
        print(f"{name} on {ranks} ranks ...")
        sizes = {"batch_size": chunks * chunk_size, "schedule.warmup_epochs": 0}
        train(folder / method, ranks, method, layout, {**fields, **sizes})
        yield f"{name} on {ranks} ranks, {layout}", read_timeline(folder / method)


if __name__ == "__main__":
    main()
