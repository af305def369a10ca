"""The inputs of a plan. A field is a flag of `conadv plan`: its type is its check, the text below it is its help."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields, replace
from fractions import Fraction
from functools import cached_property
from typing import Annotated, Any, Literal

from conadv.core.catalog import METHODS
from conadv.setting import BelowOne, OneOf, PositiveShare, Seed, Share, normalise, show, within

from .devices import DEVICES, MODELS, ModelSize, PassTimes, Stragglers
from .lane import fit_lane
from .network import Algorithm, Link, Machine, all_reduce_seconds, parse_link

Wire = Literal["bytes", "floats"]
_WIRE_BYTES: dict[Wire, int] = {"bytes": 1, "floats": 4}
_LABEL_BYTES = 8
_MOST_CHUNKS = 2**20
MOST_NODES = 10**6
_LAYOUTS = tuple(dict.fromkeys(layout for method in METHODS.values() for layout in method.layouts))

# Large enough for any cluster, and small enough that nothing overflows or takes minutes.
Number = Annotated[int, within(1, 1e6)]
Images = Annotated[int, within(1, 1e12)]
Seconds = Annotated[float, within(1e-12, 1e6)]
AnySeconds = Annotated[float, within(0, 1e6)]
# Inputs that the JSON of a plan shows resolved, as the model, the machine, the times and the stragglers.
_RESOLVED = {"model", "parameters", "image_shape", "flops", "device", *(field.name for field in fields(PassTimes))}
_RESOLVED |= {"nodes", "devices_per_node", "inside", "between", *(field.name for field in fields(Stragglers))}


@dataclass(frozen=True)
class PlanRequest:
    """All inputs of a plan. The defaults are the paper's training: ResNet-50 on ImageNet."""

    batch_size: Images = 32768
    """Images per step, over all ranks."""
    chunk_size: Images = 64
    """Images that a device processes at once, with their own BatchNorm statistics; it divides the batch size."""
    epochs: Annotated[float, within(1e-3, 1e6)] = 90.0
    """Passes over the training images."""
    data_size: Images = 1_281_167
    """Training images."""
    model: str = "resnet50"
    """A network of the table: resnet18, resnet34 or resnet50. For one of your own: any name, with --parameters and
    --image-shape."""
    parameters: Annotated[int, within(1, 1e15)] | None = None
    """Number of weights of your own network."""
    image_shape: tuple[Number, Number, Number] | None = None
    """Channels, height and width of its images, such as 3 32 32."""
    flops: Annotated[float, within(1, 1e21)] | None = None
    """Floating-point operations of its forward pass on one image, two per multiply-add, such as 8.2e9."""

    device: Annotated[str, OneOf(tuple(DEVICES))] = "a100"
    """A device of the table; not used if the three times per image are given."""
    forward: Seconds | None = None
    """Seconds per image of a forward pass, such as 1.3e-4. none: from the table, as for the times below."""
    input_backward: Seconds | None = None
    """Seconds per image of the gradients of the activations, down to the pixels."""
    weight_backward: Seconds | None = None
    """Seconds per image of the gradients of the weights."""
    pixel_backward: AnySeconds | None = None
    """Seconds per image of the last part of input-backward, from the first layer to the pixels."""
    overhead: AnySeconds | None = None
    """Seconds per pass, independent of the number of images."""
    update: AnySeconds | None = None
    """Seconds per step for the optimizer. none: 0."""
    nodes: Annotated[int, within(1, MOST_NODES)] = 8
    """Machines."""
    devices_per_node: Number = 8
    """Devices per machine."""
    inside: str = "nvlink3"
    """The link between two devices of a node: a name of the table, such as pcie4, or latency and bandwidth, such as
    "2us 25GB/s". Units: s, ms, us, ns; MB/s, GB/s, Mbit/s, Gbit/s."""
    between: str = "infiniband-hdr-x8"
    """The link between two nodes, which the devices of a node share: written as for --inside, such as
    "20us 100Gbit/s". free: it costs nothing."""

    methods: tuple[Annotated[str, OneOf(tuple(METHODS))], ...] = tuple(METHODS)
    """Methods to compare, such as vanilla recycled."""
    layouts: tuple[str, ...] = _LAYOUTS
    """Layouts to compare, such as clean "clean | adv"."""
    twin_share: PositiveShare = 1.0
    """Share of a batch's chunks that get twins, such as 1/4."""
    search: bool = False
    """Search over counts of ranks ("3 clean | 3 adv | 2 attack") and over shares: the best layout of each method, and
    the frontier of step time against devices."""
    shares: tuple[PositiveShare, ...] = (1.0, 0.5, 0.25)
    """Shares of chunks with twins to search over. A small share may cost accuracy, which has to be measured."""
    lane_ranks: Annotated[int, within(1, 16)] = 8
    """Maximum number of ranks per lane in the search; within a node, twins use its fast links."""
    deadline: Annotated[float, within(1e-6, 1e9)] | None = None
    """Hours within which training must end; --search then minimizes devices. none: it minimizes the step time."""
    delay: Number = 1
    """Steps between making a twin and learning from it, for methods that let you choose."""
    attack_steps: Number = 1
    """Gradient steps of the attack."""
    full_attack: bool = False
    """Assume that the attack also computes weight gradients, as attack libraries do."""
    wire: Wire = "bytes"
    """How the pixels of a twin are sent from rank to rank."""
    gradient_bytes: Annotated[int, within(1, 16)] = 4
    """Bytes per weight in the all-reduce."""
    bucket_mib: Annotated[float, within(1e-3, 1e6)] = 25.0
    """MiB of gradients per all-reduce. conadv train uses 25 on GPUs and 1 on CPUs; 1 is also the default if
    --measured comes from a machine without a GPU."""
    algorithm: Algorithm = "auto"
    """How gradients are reduced; auto: the faster of ring and tree."""
    overlap: Share = 0.5
    """Share of the all-reduce that can run during the backward pass of the last chunk; the last bucket never can."""
    jitter: BelowOne = 0.005
    """Mean random delay of a rank, relative to its work; delays are exponential and independent."""
    samples: Annotated[int, within(1, 1e5)] = 1000
    """Number of steps to simulate with these delays."""
    seed: Seed = 0
    """Seed of the simulated delays."""
    sweep: tuple[Images, ...] = ()
    """Batch sizes to compare, to find where a larger batch stops paying, such as 4096 8192. Default: doublings of the
    chunk size."""

    def __post_init__(self) -> None:
        normalise(self)
        for name in ("methods", "layouts", "sweep", "shares"):
            object.__setattr__(self, name, tuple(dict.fromkeys(getattr(self, name))))
        for batch_size in (self.batch_size, *self.sweep):
            self._check_batch(batch_size)
        self._check_layouts()
        assert self.machine and self.network  # computed now, so that mistakes in them are reported
        if self.times.pixel_backward > self.times.input_backward:
            raise ValueError(
                f"pixel_backward {self.times.pixel_backward:g} is more than the {self.times.input_backward:g} s of "
                "input_backward, of which it is a part: change --pixel-backward or --input-backward"
            )

    @property
    def share(self) -> Fraction:
        """The share of chunks with twins as a fraction."""
        return Fraction(self.twin_share).limit_denominator(1000)

    @cached_property
    def network(self) -> ModelSize:
        """The size of the model."""
        if self.parameters is not None and self.image_shape is not None:
            return ModelSize(self.parameters, math.prod(self.image_shape), self.flops or 0.0)
        if self.parameters is not None or self.image_shape is not None:
            raise ValueError("a model of your own needs both --parameters and --image-shape (channels, height, width)")
        if self.model not in MODELS:
            known = ", ".join(MODELS)
            raise ValueError(
                f"model {show(self.model)} is not in the table: take one of {known}, or give --parameters and "
                "--image-shape of your own"
            )
        known_size = MODELS[self.model]
        return known_size if self.flops is None else replace(known_size, forward_flops=self.flops, pixel_flops=0.0)

    @cached_property
    def times(self) -> PassTimes:
        """Seconds per pass: the given ones, and the others from the table of devices."""
        named = ((field.name, getattr(self, field.name)) for field in fields(PassTimes))
        given = {name: seconds for name, seconds in named if seconds is not None}
        if {"forward", "input_backward", "weight_backward"} <= given.keys():
            return PassTimes(**given)
        return replace(DEVICES[self.device].times(self.network), **given)

    @cached_property
    def machine(self) -> Machine:
        return Machine(self.devices_per_node, self.nodes, self._link("inside"), self._link("between"))

    @cached_property
    def stragglers(self) -> Stragglers:
        return Stragglers(self.jitter, self.samples, self.seed)

    @property
    def gradient_size(self) -> int:
        """Bytes that a rank puts into the all-reduce."""
        return self.network.parameters * self.gradient_bytes

    @property
    def buckets(self) -> int:
        """Number of all-reduces per step."""
        return math.ceil(self.gradient_size / (self.bucket_mib * 2**20))

    def reduction_seconds(self, ranks: int) -> float:
        """Seconds of the all-reduces of all buckets, one after the other."""
        each = self.gradient_size / self.buckets
        return self.buckets * all_reduce_seconds(each, ranks, self.machine, self.algorithm)

    def twin_size(self, wire: Wire) -> int:
        """Bytes of a chunk's twin with its labels."""
        return self.chunk_size * (self.network.image_values * _WIRE_BYTES[wire] + _LABEL_BYTES)

    def steps(self, batch_size: int) -> int:
        """Steps of the training; the remainder of an epoch that fills no batch is left out."""
        return math.ceil(self.epochs * (self.data_size // batch_size))

    def batches(self) -> tuple[int, ...]:
        """The batch sizes of the sweep; by default doublings of the chunk up to eight times the batch."""
        if self.sweep:
            return tuple(sorted({self.batch_size, *self.sweep}))
        most = min(self.data_size // self.chunk_size, 8 * self.batch_size // self.chunk_size, _MOST_CHUNKS)
        doublings = (self.chunk_size << power for power in range(most.bit_length()))
        return tuple(sorted({self.batch_size, *doublings}))

    def to_json(self) -> dict[str, Any]:
        """The inputs of the plan; an infinite bandwidth is null, because JSON has no infinity."""
        machine = asdict(self.machine)
        for link in (machine["inside"], machine["between"]):
            link["bandwidth"] = None if math.isinf(link["bandwidth"]) else link["bandwidth"]
        sizes = {"model": asdict(self.network), "times": asdict(self.times), "stragglers": asdict(self.stragglers)}
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in _RESOLVED}
        listed = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
        return {"machine": machine, **sizes, **listed}

    def _link(self, name: Literal["inside", "between"]) -> Link:
        text = getattr(self, name)
        try:
            return parse_link(text)
        except ValueError as error:
            raise ValueError(f"{name} {show(text)} is not a link: change --{name}; {error}") from None

    def _check_layouts(self) -> None:
        for layout in self.layouts:
            if not any(fit_lane(layout, method.duties) for method in METHODS.values()):
                raise ValueError(
                    f"layout {show(layout)} fits no method: change --layouts; join the duties of a method, each once, "
                    'with + and |, as in "clean+adv | attack"'
                )
        for name in self.methods:
            if not any(fit_lane(layout, METHODS[name].duties) for layout in self.layouts):
                raise ValueError(
                    f'no layout given fits {name}: add one to --layouts, such as "{METHODS[name].layouts[0]}"'
                )
        if not self.methods:
            raise ValueError(f"no methods to compare: give some of {', '.join(METHODS)}")

    def _check_batch(self, batch_size: int) -> None:
        if batch_size % self.chunk_size:
            raise ValueError(
                f"a batch of {batch_size} is not a whole number of chunks of {self.chunk_size}: "
                "change --batch-size or --chunk-size"
            )
        if batch_size > self.data_size:
            raise ValueError(
                f"a batch of {batch_size} is larger than the data ({self.data_size}): choose a smaller one"
            )
        if batch_size // self.chunk_size > _MOST_CHUNKS:
            raise ValueError(
                f"a batch of {batch_size} has more than {_MOST_CHUNKS} chunks of {self.chunk_size}: "
                "choose a smaller batch or larger chunks"
            )
