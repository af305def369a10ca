"""One row of a plan: a method in a layout on a number of lanes, with the parts of its step."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from conadv.core.catalog import METHODS
from conadv.parallel.layout import Layout

from .devices import duty_seconds
from .lane import LEARNING, Chain, Lane, fit_lane
from .network import handoff_link, lanes_cross_nodes
from .request import PlanRequest


@dataclass(frozen=True)
class HandoffNeed:
    """What the twins of one lane need from the network. Bandwidths in bytes per second."""

    crosses_nodes: bool
    bytes_per_step: int
    """Of a lane, in the format of --wire."""
    load_as_bytes: float
    """Of a lane, mean over a step."""
    load_as_floats: float
    hides_as_bytes: float | None
    """The smallest bandwidth at which the hand-off does not lengthen the step; None: there is none."""
    hides_as_floats: float | None


@dataclass(frozen=True)
class PlanRow:
    """One method in one layout on the machine. The first four times add up to the step."""

    method: str
    layout: str
    twin_share: str
    """The part of the chunks with twins, such as 1/4."""
    batch_size: int
    lanes: int
    roles: dict[str, int]
    """Ranks of each role."""
    ranks: int
    idle: int
    """Devices of the machine without a rank."""
    nodes: int
    ranks_at_most: int
    """The most ranks that this batch can keep busy."""
    chunks_per_lane: int
    compute_seconds: float
    reduction_seconds: float
    handoff_seconds: float
    straggler_seconds: float
    step_seconds: float
    images_per_second: float
    steps: int
    hours: float
    device_hours: float
    """Without the idle devices of the machine."""
    busy: float
    """The share of the ranks' time in which they compute."""
    time_ratio: float
    """Step time relative to vanilla on the same machine."""
    cost_ratio: float
    """Device-hours relative to vanilla on the same machine."""
    best: bool
    """The fastest layout of its method."""
    handoff: HandoffNeed | None


def evaluate(
    request: PlanRequest,
    method: str,
    layout: str,
    lanes: int,
    batch_size: int | None = None,
    twin_share: Fraction | None = None,
) -> PlanRow:
    """One method in one layout on a given number of lanes; the ratios are 1 until `plan` compares with vanilla."""
    share = (request.share if twin_share is None else twin_share) if METHODS[method].maker else Fraction(1)
    batch_size = request.batch_size if batch_size is None else batch_size
    chunks = batch_size // request.chunk_size
    assert batch_size % request.chunk_size == 0 and chunks % lanes == 0
    one_lane = fit_lane(layout, METHODS[method].duties)
    assert one_lane is not None
    lane = _lane(request, method, one_lane, chunks // lanes, share)
    ranks = lanes * lane.width
    roles = [name.lstrip("0123456789 ") for name in str(one_lane).split(" | ")]
    parts = _step_parts(request, lane, lanes)
    step = sum(parts)
    steps = request.steps(batch_size)
    hours = steps * step / 3600
    return PlanRow(
        method=method,
        layout=str(one_lane),
        twin_share=str(share),
        batch_size=batch_size,
        lanes=lanes,
        roles=dict(zip(roles, (lanes * count for count in lane.ranks), strict=True)),
        ranks=ranks,
        idle=max(0, request.machine.devices - ranks),
        nodes=request.machine.nodes_for(ranks),
        ranks_at_most=chunks // one_lane.smallest(share.denominator) * lane.width,
        chunks_per_lane=lane.chunks,
        compute_seconds=parts[0],
        reduction_seconds=parts[1],
        handoff_seconds=parts[2],
        straggler_seconds=parts[3],
        step_seconds=step,
        images_per_second=batch_size / step,
        steps=steps,
        hours=hours,
        device_hours=ranks * hours,
        busy=lane.work / (lane.width * step),
        time_ratio=1.0,
        cost_ratio=1.0,
        best=False,
        handoff=_handoff_need(request, lane, lanes, step, parts[0] + parts[1]) if lane.route else None,
    )


def exposed_reduction(request: PlanRequest, lane: Lane, ranks: int) -> float:
    """Seconds of the all-reduce that are not hidden by the backward pass of the last chunk."""
    total = request.reduction_seconds(ranks)
    learning = min(len(role & LEARNING) for role in lane.roles if role & LEARNING)
    hidden = learning * request.times.backward(request.chunk_size)
    overlap = min(request.overlap, 1 - 1 / request.buckets)  # the last bucket is full when the backward pass ends
    return total - min(overlap * total, hidden)


def _lane(request: PlanRequest, method: str, layout: Layout, chunks: int, share: Fraction) -> Lane:
    info = METHODS[method]
    duties = duty_seconds(info, request.times, request.chunk_size, request.attack_steps, request.full_attack)
    delay = layout.ahead(request.delay if info.delay is None else info.delay)
    counts, twins = layout.counts, (share.numerator, share.denominator)
    return Lane(tuple(counts), info.maker, delay, chunks, duties, tuple(counts.values()), twins)


def _step_parts(request: PlanRequest, lane: Lane, lanes: int) -> tuple[float, float, float, float]:
    """Seconds of compute, reduction, hand-off and stragglers: how much each lengthens the critical path."""
    reduction = exposed_reduction(request, lane, lanes * lane.width)
    update = request.times.update
    size = request.twin_size(request.wire)
    transfer = 0.0
    if lane.route:
        transfer = handoff_link(request.machine, lane.width, lanes, size).transfer(size)
    chains = lane.chains(transfer, reduction, update)
    compute = _longest(lane.chains(0.0, 0.0, update))
    reduced = _longest(lane.chains(0.0, reduction, update))
    handed = _longest(chains)
    return compute, reduced - compute, handed - reduced, _mean_longest(request, chains, lane, lanes) - handed


def _longest(chains: tuple[Chain, ...]) -> float:
    return max(chain.seconds for chain in chains)


def _mean_longest(request: PlanRequest, chains: tuple[Chain, ...], lane: Lane, lanes: int) -> float:
    """The mean critical path over simulated steps, in which each role is as slow as its slowest rank."""
    if request.jitter == 0:
        return _longest(chains)
    draws = zip(lane.ranks, request.stragglers.draws, strict=False)
    slowest = [request.stragglers.slowest(lanes * count, uniform) for count, uniform in draws]
    simulated: NDArray[np.float64] = np.zeros(request.samples)
    for chain in chains:
        work = sum(slowest[role] * seconds for role, seconds in chain.work.items())
        simulated = np.maximum(simulated, work + chain.wait)
    return float(simulated.mean())


def _handoff_need(request: PlanRequest, lane: Lane, lanes: int, step: float, undisturbed: float) -> HandoffNeed:
    """`undisturbed`: the step without hand-off and stragglers."""
    machine, width = request.machine, lane.width
    reduction = exposed_reduction(request, lane, lanes * width)
    hidden = lane.hidden_transfer(undisturbed, reduction, request.times.update)

    def hides(size: int) -> float | None:
        left = hidden - handoff_link(machine, width, lanes, size).latency
        return size / left if left > 1e-9 * undisturbed else None  # it may be a rounding error of 0

    sent = lane.chunks * lane.twins[0] / lane.twins[1]
    as_bytes, as_floats = request.twin_size("bytes"), request.twin_size("floats")
    return HandoffNeed(
        crosses_nodes=lanes_cross_nodes(machine, width, lanes),
        bytes_per_step=round(sent * request.twin_size(request.wire)),
        load_as_bytes=sent * as_bytes / step,
        load_as_floats=sent * as_floats / step,
        hides_as_bytes=hides(as_bytes),
        hides_as_floats=hides(as_floats),
    )
