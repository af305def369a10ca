"""From the flags of `conadv plan` to a request: names become figures, and what is given by hand comes first."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from .catalogue import LINKS, ModelSize, named_device, named_model
from .cost import Method, PassTimes, read_measurement, times_in
from .network import Algorithm, Machine, parse_link
from .path import LAYOUTS, METHODS
from .request import PlanRequest, Wire
from .stragglers import Stragglers


def build_request(
    *,
    batch_size: int = 32768,
    chunk_size: int = 64,
    epochs: float = 90.0,
    data_size: int = 1_281_167,
    model: str = "resnet50",
    parameters: int | None = None,
    image_shape: tuple[int, int, int] | None = None,
    flops: float | None = None,
    device: str = "a100",
    measured: Path | None = None,
    forward: float | None = None,
    input_backward: float | None = None,
    weight_backward: float | None = None,
    overhead: float | None = None,
    update: float | None = None,
    nodes: int = 8,
    devices_per_node: int = 8,
    inside: str = "nvlink3",
    between: str = "infiniband-hdr-x8",
    methods: tuple[Method, ...] = METHODS,
    layouts: tuple[str, ...] = LAYOUTS,
    delay: int = 1,
    attack_steps: int = 1,
    full_attack: bool = False,
    wire: Wire = "bytes",
    gradient_bytes: int = 4,
    algorithm: Algorithm = "auto",
    overlap: float = 0.5,
    jitter: float = 0.005,
    seed: int = 0,
    sweep: tuple[int, ...] = (),
) -> PlanRequest:
    """Times in seconds: those given by hand, then those of the file `measured`, then those of the device table."""
    size = _model_size(model, parameters, image_shape, flops)
    by_hand = {
        "forward": forward,
        "input_backward": input_backward,
        "weight_backward": weight_backward,
        "overhead": overhead,
        "update": update,
    }
    return PlanRequest(
        times=_times(size, device, measured, {name: value for name, value in by_hand.items() if value is not None}),
        model=size,
        machine=Machine(devices_per_node, nodes, parse_link(inside, LINKS), parse_link(between, LINKS)),
        batch_size=batch_size,
        chunk_size=chunk_size,
        epochs=epochs,
        data_size=data_size,
        methods=methods,
        layouts=layouts,
        delay=delay,
        attack_steps=attack_steps,
        full_attack=full_attack,
        wire=wire,
        gradient_bytes=gradient_bytes,
        algorithm=algorithm,
        overlap=overlap,
        stragglers=Stragglers(jitter, seed=seed),
        sweep=sweep,
    )


def _model_size(
    name: str, parameters: int | None, image_shape: tuple[int, int, int] | None, flops: float | None
) -> ModelSize:
    """A model of the table; or one of one's own, whose name is then only a name."""
    if parameters is None and image_shape is None:
        known = named_model(name)
        return known if flops is None else replace(known, forward_flops=flops, pixel_flops=0.0)
    if parameters is None or image_shape is None:
        raise ValueError("a model of your own needs both --parameters and --image-shape (channels, height, width)")
    channels, height, width = image_shape
    return ModelSize(parameters, channels * height * width, flops or 0.0)


def _times(size: ModelSize, device: str, measured: Path | None, by_hand: dict[str, float]) -> PassTimes:
    if measured is not None:
        return PassTimes(**(times_in(read_measurement(measured)) | by_hand))
    if {"forward", "input_backward", "weight_backward"} <= by_hand.keys():
        return PassTimes(**by_hand)
    times = named_device(device).times(size)
    return replace(times, **by_hand)
