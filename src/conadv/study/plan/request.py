"""What is asked of a plan: the batch, the model, the machine, and how fast its parts are."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from .catalogue import ModelSize
from .cost import Method, PassTimes
from .network import ALGORITHMS, Algorithm, Link, Machine
from .path import DUTIES, LAYOUTS, METHODS, fits, parse_layout
from .stragglers import Stragglers

Wire = Literal["bytes", "floats"]
WIRE_BYTES: dict[Wire, int] = {"bytes": 1, "floats": 4}
LABEL_BYTES = 8
_STRAGGLERS = Stragglers(jitter=0.005)


@dataclass(frozen=True)
class PlanRequest:
    """All inputs of a plan; what is not given is the paper's training of ResNet-50 on ImageNet."""

    times: PassTimes
    model: ModelSize
    machine: Machine
    batch_size: int = 32768
    chunk_size: int = 64
    epochs: float = 90.0
    data_size: int = 1_281_167
    methods: tuple[Method, ...] = METHODS
    layouts: tuple[str, ...] = LAYOUTS
    delay: int = 1
    """Of conadv; that of disadv is 0, of recycled 1."""
    attack_steps: int = 1
    full_attack: bool = False
    """The attack also computes weight gradients, as plain loops and attack libraries do."""
    wire: Wire = "bytes"
    """How a twin crosses from rank to rank."""
    gradient_bytes: int = 4
    """A parameter in the reduction."""
    algorithm: Algorithm = "auto"
    overlap: float = 0.5
    """The part of the reduction that can run beside the backward pass of the last chunk."""
    stragglers: Stragglers = _STRAGGLERS
    sweep: tuple[int, ...] = ()
    """Batch sizes to look at beside batch_size; none: doublings of the chunk up to eight times batch_size."""

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_names()
        for batch_size in (self.batch_size, *self.sweep):
            self._check_batch(batch_size)

    @property
    def gradient_size(self) -> int:
        """Bytes that a rank puts into the reduction."""
        return self.model.parameters * self.gradient_bytes

    def twin_size(self, wire: Wire) -> int:
        """Bytes of a chunk's twin with its labels."""
        return self.chunk_size * (self.model.image_values * WIRE_BYTES[wire] + LABEL_BYTES)

    def steps(self, batch_size: int) -> int:
        """Steps of the training; the remainder of an epoch that fills no batch is left out."""
        return math.ceil(self.epochs * (self.data_size // batch_size))

    def batches(self) -> tuple[int, ...]:
        """The batch sizes of the sweep."""
        if self.sweep:
            return tuple(sorted({self.batch_size, *self.sweep}))
        most = min(self.data_size, 8 * self.batch_size) // self.chunk_size
        doublings = (self.chunk_size << power for power in range(most.bit_length()))
        return tuple(sorted({self.batch_size, *doublings}))

    def to_json(self) -> dict[str, Any]:
        """Plain numbers, lists and strings; an infinite bandwidth, which JSON does not know, is null."""
        document = asdict(self)
        for name in ("inside", "between"):
            link = document["machine"][name]
            link["bandwidth"] = None if math.isinf(link["bandwidth"]) else link["bandwidth"]
        return {name: list(value) if isinstance(value, tuple) else value for name, value in document.items()}

    @staticmethod
    def from_json(document: Mapping[str, Any]) -> PlanRequest:
        """What `to_json` wrote."""
        values = dict(document)
        machine = dict(values["machine"])
        for name in ("inside", "between"):
            link = machine[name]
            machine[name] = Link(link["latency"], math.inf if link["bandwidth"] is None else link["bandwidth"])
        values["machine"] = Machine(**machine)
        values["times"] = PassTimes(**values["times"])
        values["model"] = ModelSize(**values["model"])
        values["stragglers"] = Stragglers(**values["stragglers"])
        for name in ("methods", "layouts", "sweep"):
            values[name] = tuple(values[name])
        return PlanRequest(**values)

    def _check_numbers(self) -> None:
        for name in ("batch_size", "chunk_size", "data_size", "attack_steps", "gradient_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)}: give a whole number, 1 or more")
        if self.delay < 1:
            raise ValueError(f"delay {self.delay}: give 1 or more; with 0 conadv is disadv, which has rows of its own")
        if not 0 < self.epochs < math.inf:
            raise ValueError(f"epochs {self.epochs}: give a number above 0")
        if not 0 <= self.overlap <= 1:
            raise ValueError(f"overlap {self.overlap}: give a fraction, from 0 to 1")

    def _check_names(self) -> None:
        for field in fields(self):
            allowed = {"methods": METHODS, "wire": tuple(WIRE_BYTES), "algorithm": ALGORITHMS}.get(field.name)
            value = getattr(self, field.name)
            for name in value if isinstance(value, tuple) else (value,):
                if allowed is not None and name not in allowed:
                    raise ValueError(f'{field.name} "{name}": take one of {", ".join(allowed)}')
        if not self.methods:
            raise ValueError(f"no methods: take some of {', '.join(METHODS)}")
        for method in self.methods:
            if not any(fits(method, parse_layout(layout)) for layout in self.layouts):
                duties = ", ".join(sorted(DUTIES[method]))
                raise ValueError(f"no layout given fits {method}: it needs one with the duties {duties}, and no other")

    def _check_batch(self, batch_size: int) -> None:
        if batch_size < 1 or batch_size % self.chunk_size:
            raise ValueError(
                f"a batch of {batch_size} is not a whole number of chunks of {self.chunk_size}: "
                "choose a batch size or a chunk size that divides"
            )
        if batch_size > self.data_size:
            raise ValueError(
                f"a batch of {batch_size} is larger than the data ({self.data_size}): choose a smaller one"
            )
