"""The time of communication: links with latency and bandwidth, all-reduce, and the hand-off of twins."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal

Algorithm = Literal["auto", "ring", "tree"]


@dataclass(frozen=True)
class Link:
    """One direction of a connection; a message of s bytes takes latency + s / bandwidth."""

    latency: float
    """Seconds before the first byte arrives."""
    bandwidth: float
    """Bytes per second; may be infinite."""

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

    @property
    def devices(self) -> int:
        return self.devices_per_node * self.nodes

    def nodes_for(self, ranks: int) -> int:
        return -(-ranks // self.devices_per_node)


def ring_seconds(size: float, ranks: int, link: Link) -> float:
    """Ring all-reduce: 2(n - 1) rounds, each of a message of size / n."""
    return 2 * (ranks - 1) * link.transfer(size / ranks)


def tree_seconds(size: float, ranks: int, link: Link) -> float:
    """Pipelined double binary tree: up and down ⌈log2 n⌉ levels; each byte crosses a link twice."""
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
    """Whether a lane of `width` consecutive ranks has ranks on two nodes."""
    return machine.nodes_for(width * lanes) > 1 and machine.devices_per_node % width != 0


def handoff_link(machine: Machine, width: int, lanes: int, size: float) -> Link:
    """The slowest link that a twin crosses, because the step waits for every lane."""
    if not lanes_cross_nodes(machine, width, lanes):
        return machine.inside
    return max(machine.inside, machine.between, key=lambda link: link.transfer(size))


# Bandwidths are nominal and of one direction; latencies are assumptions unless a source is named.
LINKS = {
    "nvlink2": Link(3e-6, 150e9),  # V100 data sheet: 300 GB/s both ways
    "nvlink3": Link(3e-6, 300e9),  # A100 data sheet: 600 GB/s both ways
    "nvlink4": Link(3e-6, 450e9),  # H100 data sheet: 900 GB/s both ways
    "pcie3": Link(5e-6, 16e9),  # 16 lanes
    "pcie4": Link(5e-6, 32e9),  # 16 lanes
    "ethernet-10g": Link(30e-6, 1.25e9),
    "ethernet-100g": Link(20e-6, 12.5e9),
    "infiniband-hdr": Link(5e-6, 25e9),  # 200 Gbit/s
    "infiniband-hdr-x8": Link(5e-6, 200e9),  # a node with one adapter per device, as DGX A100 has
    "tpu-v3-ici": Link(1e-6, 83e9),  # cloud.google.com/tpu/docs/v3: all-reduce 340 TB/s over 1024 chips of 4 links
    # PyTorch's gloo over loopback, 2 processes: 0.14 s for an all-reduce of 100 MB, 0.5 ms for one of a single number.
    "gloo-loopback": Link(0.25e-3, 0.71e9),
    "free": Link(0.0, math.inf),  # communication that costs nothing: what the method alone allows
}
_TIME = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_RATE = {"MB/s": 1e6, "GB/s": 1e9, "Mbit/s": 1e6 / 8, "Gbit/s": 1e9 / 8}
_NUMBER = r"(\d+(?:\.\d+)?(?:e[+-]?\d+)?)"
_LINK = re.compile(rf"{_NUMBER}\s*({'|'.join(_TIME)})[\s,]+{_NUMBER}\s*({'|'.join(_RATE)})", re.ASCII)


def parse_link(text: str) -> Link:
    """A link by name, or as latency and bandwidth: "2us 25GB/s"."""
    if text in LINKS:
        return LINKS[text]
    match = _LINK.fullmatch(text.strip())
    if match is None:
        raise ValueError(f'write latency and bandwidth, as in "2us 25GB/s", or one of {", ".join(LINKS)}')
    latency, time_unit, bandwidth, rate_unit = match.groups()
    link = Link(float(latency) * _TIME[time_unit], float(bandwidth) * _RATE[rate_unit])
    if link.latency > 1e6 or not 1 <= link.bandwidth <= 1e18:
        raise ValueError("take a latency of at most 1e6 s, and a bandwidth from 1 byte to 1e12 MB per second")
    return link
