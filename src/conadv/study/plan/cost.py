"""What a device takes for the passes of a network, and for the duties that are made of them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

Method = Literal["vanilla", "disadv", "conadv", "recycled"]


@dataclass(frozen=True)
class PassTimes:
    """Seconds an image and pass on one device; a pass over n images takes overhead + n × seconds."""

    forward: float
    input_backward: float
    """Gradients of the activations, down to the pixels."""
    weight_backward: float
    pixel_backward: float = 0.0
    """The last product of input_backward, from the first layer to the pixels: learning alone does without it."""
    overhead: float = 0.0
    """Seconds a pass, whatever its size; 0 where the times were measured at the chunk size to plan for."""
    update: float = 0.0
    """Seconds a step for the optimizer."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not 0 <= value < math.inf:
                raise ValueError(f"{field.name} {value}: give seconds, 0 or more")
        for name in ("forward", "input_backward", "weight_backward"):
            if getattr(self, name) == 0:
                raise ValueError(f"{name} 0: give seconds an image, more than 0")
        if self.pixel_backward > self.input_backward:
            raise ValueError(
                f"pixel_backward {self.pixel_backward}: it is a part of input_backward ({self.input_backward}); "
                "give at most that"
            )

    def learning(self, images: int) -> float:
        """Forward and backward pass over a chunk, without gradients for its pixels."""
        return self.recycling(images) - images * self.pixel_backward

    def recycling(self, images: int) -> float:
        """Forward and backward pass over a chunk, down to its pixels."""
        return 3 * self.overhead + images * (self.forward + self.input_backward + self.weight_backward)

    def attacking(self, images: int, steps: int, full: bool) -> float:
        """An attack on a chunk; `full`: with the weight gradients that it does not need."""
        if full:
            return steps * self.recycling(images)
        return steps * (2 * self.overhead + images * (self.forward + self.input_backward))

    def backward(self, images: int) -> float:
        """The part of `learning` beside which the reduction can run."""
        return self.learning(images) - self.overhead - images * self.forward


def duty_seconds(method: Method, times: PassTimes, images: int, steps: int, full: bool) -> dict[str, float]:
    """Seconds a chunk for each duty of a method."""
    learn = times.learning(images)
    if method == "vanilla":
        return {"clean": learn}
    if method == "recycled":
        return {"clean": times.recycling(images), "adv": learn}
    return {"clean": learn, "adv": learn, "attack": times.attacking(images, steps, full)}


# The entries of a measurement and the unit in which each is given.
_UNITS = {
    "forward": "seconds_per_image",
    "input_backward": "seconds_per_image",
    "weight_backward": "seconds_per_image",
    "pixel_backward": "seconds_per_image",
    "overhead": "seconds",
    "update": "seconds",
}
_NEEDED = ("forward", "input_backward", "weight_backward")


def read_measurement(path: Path) -> Mapping[str, Any]:
    """A file that `conadv bench --json` wrote: {"machine": {…}, "results": [{"name": …, …}, …]}."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read {path} ({error}): give a file written by conadv bench --json") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON ({error}): give a file written by conadv bench --json") from None
    results = document.get("results") if isinstance(document, dict) else None
    if not isinstance(results, list) or not all(isinstance(entry, dict) for entry in results):
        raise ValueError(f'{path} has no list "results" of objects: give a file written by conadv bench --json')
    return {**document}


def times_in(document: Mapping[str, Any]) -> dict[str, float]:
    """The fields of PassTimes that a measurement holds."""
    found: dict[str, float] = {}
    for entry in document["results"]:
        name = entry.get("name")
        unit = _UNITS.get(name) if isinstance(name, str) else None
        if unit is None:
            continue
        value = entry.get(unit)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(
                f'the result "{name}" needs a number "{unit}": measure again with conadv bench step --json'
            )
        found[str(name)] = float(value)
    missing = [name for name in _NEEDED if name not in found]
    if missing:
        flags = ", ".join("--" + name.replace("_", "-") for name in missing)
        raise ValueError(f"the measurement has no {', '.join(missing)}: run conadv bench step --json, or give {flags}")
    return found
