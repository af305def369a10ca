"""What the network costs: links with latency and bandwidth, all-reduce over nodes, and the way of a twin."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal, get_args

Algorithm = Literal["auto", "ring", "tree"]
ALGORITHMS: tuple[Algorithm, ...] = get_args(Algorithm)


@dataclass(frozen=True)
class Link:
    """One direction of a connection; a message of s bytes takes latency + s / bandwidth."""

    latency: float
    """Seconds before the first byte arrives."""
    bandwidth: float
    """Bytes a second; infinite is allowed."""

    def __post_init__(self) -> None:
        if not 0 <= self.latency < math.inf:
            raise ValueError(f"latency {self.latency}: give seconds, 0 or more")
        if not self.bandwidth > 0:
            raise ValueError(f"bandwidth {self.bandwidth}: give bytes a second, more than 0")

    def transfer(self, size: float) -> float:
        """Seconds for one message of `size` bytes."""
        return self.latency + size / self.bandwidth


@dataclass(frozen=True)
class Machine:
    """Equal nodes of equal devices; ranks fill one node after the other."""

    devices_per_node: int
    nodes: int
    inside: Link
    """Between two devices of a node."""
    between: Link
    """Between two nodes; the devices of a node share it."""

    def __post_init__(self) -> None:
        for name in ("devices_per_node", "nodes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)}: give a whole number, 1 or more")

    @property
    def devices(self) -> int:
        return self.devices_per_node * self.nodes

    def nodes_for(self, ranks: int) -> int:
        return -(-ranks // self.devices_per_node)


def ring_seconds(size: float, ranks: int, link: Link) -> float:
    """Ring all-reduce: 2(n - 1) rounds, each of a message of size / n."""
    return 2 * (ranks - 1) * link.transfer(size / ranks)


def tree_seconds(size: float, ranks: int, link: Link) -> float:
    """Pipelined double binary tree: up and down ⌈log2 n⌉ levels, every byte crossing a link twice."""
    if ranks == 1:
        return 0.0
    levels = (ranks - 1).bit_length()
    return 2 * levels * link.latency + 2 * size / link.bandwidth


def all_reduce_seconds(size: float, ranks: int, machine: Machine, algorithm: Algorithm = "auto") -> float:
    """All-reduce inside each node, then between the nodes.

    With rings the first level is a reduce-scatter before and an all-gather after the second, in which each device
    reduces its part of the gradient with its peers; together the parts of a node cross the node's link once.
    """
    inside = min(ranks, machine.devices_per_node)
    nodes = machine.nodes_for(ranks)
    return _level(size, inside, machine.inside, algorithm) + _level(size, nodes, machine.between, algorithm)


def _level(size: float, ranks: int, link: Link, algorithm: Algorithm) -> float:
    if algorithm == "ring":
        return ring_seconds(size, ranks, link)
    if algorithm == "tree":
        return tree_seconds(size, ranks, link)
    return min(ring_seconds(size, ranks, link), tree_seconds(size, ranks, link))


def lanes_cross_nodes(machine: Machine, width: int, lanes: int) -> bool:
    """Whether some lane of `width` neighbouring ranks has ranks on two nodes."""
    return machine.nodes_for(width * lanes) > 1 and machine.devices_per_node % width != 0


def handoff_link(machine: Machine, width: int, lanes: int, size: float) -> Link:
    """The link on the way of the slowest twin: the step waits for every lane."""
    if not lanes_cross_nodes(machine, width, lanes):
        return machine.inside
    return max(machine.inside, machine.between, key=lambda link: link.transfer(size))


_TIME = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_RATE = {"MB/s": 1e6, "GB/s": 1e9, "Mbit/s": 1e6 / 8, "Gbit/s": 1e9 / 8}
_NUMBER = r"(\d+(?:\.\d+)?(?:e-?\d+)?)"
_LINK = re.compile(rf"{_NUMBER}\s*({'|'.join(_TIME)})[\s,]+{_NUMBER}\s*({'|'.join(_RATE)})")


def parse_link(text: str, known: dict[str, Link]) -> Link:
    """A link by name, or as latency and bandwidth: "2us 25GB/s"."""
    if text in known:
        return known[text]
    match = _LINK.fullmatch(text.strip())
    if match is None:
        names = ", ".join(sorted(known))
        raise ValueError(f'link "{text}": give latency and bandwidth, as in "2us 25GB/s", or one of {names}')
    latency, time_unit, bandwidth, rate_unit = match.groups()
    return Link(float(latency) * _TIME[time_unit], float(bandwidth) * _RATE[rate_unit])
