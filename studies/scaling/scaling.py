"""Estimate the time and cost of a training on a cluster, by method and layout, and compare the model with the paper.

    python studies/scaling/scaling.py --batch-size 32768 --nodes 192
    python studies/scaling/scaling.py --paper

chunks of a rank × passes of its duties ──► the longest role ──► + reduction ──► + stragglers ──► time of a step
twins: generated ──► sent ──► learnt from, `delay` steps later ──────────┘ may be longer
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass, replace

IMAGES = 1_281_167  # of ImageNet's training set
PARAMETERS, FLOPS, PIXELS = 25_557_032, 2 * 4.09e9, 3 * 224 * 224  # ResNet-50: torchvision's model pages
BUCKETS = 4  # all_reduce calls of 25 MiB

# Passes over a chunk for each duty: forward, gradient of the input, gradient of the weights. An attack needs two.
METHODS = {
    "vanilla": ({"clean": 3}, ["clean"]),
    "disadv": ({"clean": 3, "adv": 3, "attack": 2}, ["clean+adv+attack", "clean | adv+attack"]),
    "conadv": (
        {"clean": 3, "adv": 3, "attack": 2},
        ["clean+adv+attack", "clean | adv+attack", "clean+adv | attack", "clean | adv | attack"],
    ),
    "recycled": ({"clean": 3, "adv": 3}, ["clean+adv", "clean | adv"]),
    "sam": ({"clean": 6}, ["clean"]),
}


@dataclass(frozen=True)
class Link:
    """A message of s bytes takes latency + s / bandwidth seconds."""

    latency: float
    bandwidth: float

    def transfer(self, size: float) -> float:
        return self.latency + size / self.bandwidth

    def all_reduce(self, size: float, ranks: int) -> float:
        """The faster of a ring and of a pipelined double binary tree, for one bucket."""
        if ranks == 1:
            return 0.0
        ring = 2 * (ranks - 1) * self.transfer(size / ranks)
        return min(ring, 2 * (ranks - 1).bit_length() * self.latency + 2 * size / self.bandwidth)


@dataclass(frozen=True)
class Machine:
    """Equal nodes of equal devices. The sources of the numbers are in README.md."""

    nodes: int
    devices: int
    """Per node."""
    overhead: float
    """Seconds per pass."""
    seconds: float
    """Per image and pass."""
    inside: Link
    between: Link
    jitter: float = 0.005
    """A rank's work takes its time × (1 + jitter × e), e exponential with mean 1."""

    def chunk_pass(self, images: int) -> float:
        return self.overhead + images * self.seconds

    def all_reduce(self, ranks: int) -> float:
        """Seconds to sum the gradients: within each node, then between the nodes."""
        nodes = math.ceil(ranks / self.devices)
        size = 4 * PARAMETERS / BUCKETS
        inside = self.inside.all_reduce(size, min(ranks, self.devices))
        return BUCKETS * (inside + self.between.all_reduce(size, nodes))


# Peak FLOP/s × utilisation, seconds of overhead per pass, link within a node.
DEVICES = {
    "v100": (125e12 * 0.25, 3e-3, Link(3e-6, 150e9)),
    "a100": (312e12 * 0.21, 3e-3, Link(3e-6, 300e9)),
    "h100": (989e12 * 0.12, 3e-3, Link(3e-6, 450e9)),
}
INFINIBAND = Link(5e-6, 200e9)


@dataclass(frozen=True)
class Row:
    """One method in one layout."""

    method: str
    layout: str
    lanes: int
    ranks: int
    step: float
    """Seconds."""
    hours: float
    twins: float
    """Bytes that a lane sends per step; 0: no twin leaves its rank."""

    @property
    def device_hours(self) -> float:
        return self.ranks * self.hours


def roles_of(layout: str) -> list[tuple[int, list[str]]]:
    """The roles of a lane, "3 clean+adv | attack": the number of ranks of each, and its duties."""
    words = [part.split() for part in layout.split("|")]
    return [(int(word[0]) if len(word) == 2 else 1, word[-1].split("+")) for word in words]


def estimate(machine: Machine, method: str, layout: str, lanes: int, batch: int, chunk: int,
             epochs: int = 90, full_attack: bool = False) -> Row:  # fmt: skip
    """The time of a step: the longest role or round trip of twins, the reduction, and the slowest of all ranks."""
    passes = {**METHODS[method][0], **({"attack": 3} if full_attack and "attack" in METHODS[method][0] else {})}
    one, roles = machine.chunk_pass(chunk), roles_of(layout)
    ranks, chunks = lanes * sum(count for count, _ in roles), batch // chunk // lanes
    # Seconds per chunk of the lane, for each role: its ranks share the chunks.
    pace = [sum(passes[duty] for duty in duties) * one / count for count, duties in roles]
    reduction = machine.all_reduce(ranks)
    learning = [number for number, (_, duties) in enumerate(roles) if duties != ["attack"]]
    # Half of the reduction can hide behind the last backward pass.
    shown = reduction - min(0.5 * reduction, 2 * one)
    step = max(chunks * pace[number] + (shown if number in learning else 0.0) for number in range(len(roles)))
    route = [next((n for n, (_, duties) in enumerate(roles) if duty in duties), 0) for duty in _route(method)]
    sent = 0.0
    if len(set(route)) == 2:
        maker, taker = route
        size = chunk * (PIXELS + 8.0)
        width = ranks // lanes
        crosses = ranks > machine.devices and machine.devices % width != 0
        transfer = (machine.between if crosses else machine.inside).transfer(size)
        first = passes["attack"] * one if "attack" in roles[maker][1] else roles[maker][0] * pace[maker]
        late = max(first + n * pace[maker] + transfer - n * pace[taker] for n in (0, chunks - 1))
        delay = 0 if method == "disadv" else 1
        step = max(step, (late + chunks * pace[taker] + shown) / (delay + 1), chunks * transfer)
        sent = chunks * size
    slowest = step + machine.jitter * max(chunks * each for each in pace) * sum(1 / n for n in range(1, ranks + 1))
    hours = epochs * (IMAGES // batch) * slowest / 3600
    return Row(method, layout, lanes, ranks, slowest, hours, sent)


def _route(method: str) -> tuple[str, ...]:
    """The duty that generates twins, and the one that learns from them."""
    return {"disadv": ("attack", "adv"), "conadv": ("attack", "adv"), "recycled": ("clean", "adv")}.get(method, ())


def best_lanes(machine: Machine, method: str, layout: str, batch: int, chunk: int, epochs: int) -> Row | None:
    """The fastest number of lanes of those that fit the machine and share the chunks equally."""
    width, chunks = sum(count for count, _ in roles_of(layout)), batch // chunk
    most = machine.nodes * machine.devices // width
    lanes = [count for count in range(1, min(most, chunks) + 1) if chunks % count == 0]
    rows = [estimate(machine, method, layout, count, batch, chunk, epochs) for count in lanes]
    return min(rows, key=lambda row: (float(f"{row.step:.9g}"), row.ranks), default=None)


def plan(machine: Machine, batch: int, chunk: int, epochs: int) -> list[Row]:
    """A row for each method and layout that fits."""
    pairs = [(method, layout) for method, (_, layouts) in METHODS.items() for layout in layouts]
    rows = [best_lanes(machine, method, layout, batch, chunk, epochs) for method, layout in pairs]
    return [row for row in rows if row is not None]


def show(rows: list[Row], batch: int) -> str:
    vanilla = next(row for row in rows if row.method == "vanilla")
    lines = [f"{'method':9} {'layout':21} {'ranks':>6} {'ms/step':>8} {'images/s':>9} {'hours':>7} {'device-h':>9} "
             f"{'time ×':>7} {'cost ×':>7} {'MB/s of twins':>14}"]  # fmt: skip
    for row in rows:
        load = f"{row.twins / row.step / 1e6:.0f}" if row.twins else "-"
        lines.append(
            f"{row.method:9} {row.layout:21} {row.ranks:6} {1e3 * row.step:8.1f} {batch / row.step:9.0f} "
            f"{row.hours:7.3f} {row.device_hours:9.1f} {row.step / vanilla.step:7.2f} "
            f"{row.device_hours / vanilla.device_hours:7.2f} {load:>14}"
        )
    return "\n".join(lines)


# The paper's published speeds: (method, batch, layout, images per core and duty, unit, value). "The limit of workers"
# is batch 2k on 1,024 cores; elsewhere there are batch/64 cores per role. The first two calibrate the model.
PUBLISHED = (
    ("vanilla", 2048, "clean", 2, "images/ms", 75.7),
    ("vanilla", 32768, "clean", 64, "s", 622),
    ("conadv", 2048, "clean | adv | attack", 2, "images/ms", 71.3),
    ("disadv", 2048, "clean | adv+attack", 2, "images/ms", 36.1),
    ("conadv", 32768, "clean | adv | attack", 64, "s", 677),
    ("disadv", 32768, "clean | adv+attack", 64, "s", 1191),
    ("vanilla", 16384, "clean", 64, "s", 1194),
    ("conadv", 16384, "clean | adv | attack", 64, "s", 1277),
    ("disadv", 16384, "clean | adv+attack", 64, "s", 1657),
    ("conadv", 65536, "clean | adv | attack", 64, "s", 227),
    ("disadv", 65536, "clean | adv+attack", 64, "s", 592),
    ("disadv", 4096, "clean+adv+attack", 64, "images/ms", 10.3),
    ("disadv", 32768, "clean+adv+attack", 64, "images/ms", 81.7),
)
TPU = Link(1e-6, 83e9)
POD = Machine(nodes=1, devices=4096, overhead=0.0, seconds=0.0, inside=TPU, between=TPU, jitter=0.0)


def calibrated() -> Machine:
    """The paper's machine: overhead and seconds per image of a pass, from vanilla's two published speeds."""
    (_, few_batch, _, few, _, speed), (_, many_batch, _, many, _, seconds) = PUBLISHED[:2]
    steps = 90 * (IMAGES // many_batch)
    few_work = few_batch / speed / 1e3 - 0.5 * POD.all_reduce(few_batch // few)
    many_work = seconds / steps - 0.5 * POD.all_reduce(many_batch // many)
    per_image = (many_work - few_work) / (many - few) / 3
    return replace(POD, seconds=per_image, overhead=few_work / 3 - few * per_image)


def predict(
    machine: Machine, method: str, batch: int, layout: str, images: int, unit: str, full: bool = False
) -> float:
    row = estimate(machine, method, layout, batch // images, batch, images, full_attack=full)
    return batch / row.step / 1e3 if unit == "images/ms" else 3600 * row.hours


def against_paper() -> str:
    machine = calibrated()
    lines = [f"A pass takes {1e3 * machine.overhead:.3g} ms + {1e3 * machine.seconds:.3g} ms per image.",
             f"{'method':8} {'batch':>6} {'layout':21} {'unit':9} {'paper':>6} {'model':>7} {'off':>8} "
             f"{'six passes':>10} {'off':>8}"]  # fmt: skip
    for method, batch, layout, images, unit, value in PUBLISHED:
        own = predict(machine, method, batch, layout, images, unit)
        text = f"{method:8} {batch:6} {layout:21} {unit:9} {value:6g} {own:7.4g} {100 * (own / value - 1):+6.1f} %"
        if method == "disadv":
            full = predict(machine, method, batch, layout, images, unit, full=True)
            text += f" {full:10.4g} {100 * (full / value - 1):+6.1f} %"
        lines.append(text)
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--batch-size", type=int, default=32768)
    parser.add_argument("--chunk-size", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=90)
    parser.add_argument("--nodes", type=int, default=192, help="of 8 devices")
    parser.add_argument("--device", choices=DEVICES, default="a100")
    parser.add_argument("--paper", action="store_true", help="compare the model with the paper's published speeds")
    given = parser.parse_args()
    if given.paper:
        print(against_paper())
        return
    if min(given.batch_size, given.chunk_size, given.epochs, given.nodes) < 1 or given.batch_size % given.chunk_size:
        parser.error("take numbers from 1 on, and a batch size that is a multiple of the chunk size")
    rate, overhead, inside = DEVICES[given.device]
    machine = Machine(given.nodes, 8, overhead, FLOPS / rate, inside, INFINIBAND)
    print(show(plan(machine, given.batch_size, given.chunk_size, given.epochs), given.batch_size))


if __name__ == "__main__":
    main()
