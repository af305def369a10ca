"""What the tests of plans share: requests of plain numbers."""

from conadv.study.plan.request import PlanRequest

FREE = "free"
BY_HAND = ("vanilla", "disadv", "conadv", "recycled")
"""The methods whose plans the tests compute by hand."""


def link(latency: float, bandwidth: float) -> str:
    """A link as a flag writes it: seconds, and bytes per second."""
    return f"{latency!r}s {bandwidth / 1e6!r}MB/s"


def machine(devices_per_node: int, nodes: int, inside: str, between: str) -> dict[str, object]:
    return {"devices_per_node": devices_per_node, "nodes": nodes, "inside": inside, "between": between}


def passes(forward: float = 1.0, input_backward: float = 1.0, weight_backward: float = 1.0) -> dict[str, object]:
    return {"forward": forward, "input_backward": input_backward, "weight_backward": weight_backward}


def model(parameters: int = 1000, image_values: int = 12) -> dict[str, object]:
    return {"parameters": parameters, "image_shape": (1, 1, image_values)}


def request(**changes: object) -> PlanRequest:
    """24 chunks of 4 images on 32 devices, passes of one second, communication that is free, no stragglers."""
    fields = {"batch_size": 96, "chunk_size": 4, "epochs": 2.0, "data_size": 1000, "jitter": 0.0}
    fields["methods"] = BY_HAND
    return PlanRequest(**(fields | passes() | model() | machine(8, 4, FREE, FREE) | changes))
