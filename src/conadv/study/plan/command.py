"""`conadv plan`: the flags of a request, what each means, and what is printed."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Group, Parameter

from .cost import read_measurement
from .flags import build_request
from .measured import compare_layouts, render_comparison
from .paper import render_validation, validate
from .planner import plan
from .plot import plot as draw
from .table import render

_GROUPS = {
    "What is trained": {
        "batch_size": "Images a step, over all ranks.",
        "chunk_size": "Images that a device works on at once, with their own BatchNorm statistics.",
        "epochs": "Passes over the training images.",
        "data_size": "Training images.",
        "model": "A network of the table, such as resnet50; any name with --parameters and --image-shape.",
        "parameters": "Weights of a network of your own.",
        "image_shape": "Channels, height and width of its images.",
        "flops": "Operations of its forward pass on one image.",
    },
    "The machine": {
        "device": "A device of the table.",
        "measured": "Times from `conadv bench step --json`, instead of the table's.",
        "forward": "Seconds an image of a forward pass, instead of both.",
        "input_backward": "Seconds an image of the gradients by the inputs of the layers.",
        "weight_backward": "Seconds an image of the gradients by the weights.",
        "overhead": "Seconds of every pass, however few its images.",
        "update": "Seconds of an update of the weights.",
        "nodes": "Machines.",
        "devices_per_node": "Devices of each of them.",
        "inside": "The link within a node: a name of the table, or LATENCY_SECONDS:BYTES_A_SECOND.",
        "between": "The link between nodes, written likewise.",
    },
    "How": {
        "methods": "Methods to compare.",
        "layouts": "Layouts to compare.",
        "delay": "Steps between making a twin and learning from it, for conadv.",
        "attack_steps": "Gradient steps of the attack.",
        "full_attack": "Let the attack compute weight gradients too, as attack libraries do.",
        "wire": "Twins cross as bytes, or as floats.",
        "gradient_bytes": "Bytes a weight in the reduction.",
        "algorithm": "How gradients are reduced.",
        "overlap": "Share of the backward pass that the reduction can hide behind.",
        "jitter": "Spread of a rank's step time, relative to it; the slowest rank sets the pace.",
        "seed": "Decides the simulated stragglers.",
        "sweep": "Batch sizes for the question where a larger batch stops paying.",
    },
}


def plan_command(
    *,
    json_: Annotated[bool, Parameter(name="--json", help="Print one JSON object.", negative="")] = False,
    plot: Annotated[Path | None, Parameter(help="Draw it too: a .png, .svg or .pdf.")] = None,
    validate_: Annotated[
        bool, Parameter(name="--validate", help="Predict the paper's figures, and say how far off.", negative="")
    ] = False,
    compare: Annotated[Path | None, Parameter(help="Compare with a measured `conadv bench layout --json`.")] = None,
    **flags: Any,
) -> None:
    """Say before renting it what a cluster would do: ranks by role, time a step, hours, and the cost of each method."""
    given = {name: value for name, value in flags.items() if value is not None}
    if validate_:
        outcome = validate()
        _print(outcome.to_json, lambda: render_validation(outcome), json_)
        return
    request = build_request(**given)
    if compare is not None:
        rows = compare_layouts(request, read_measurement(compare))
        _print(lambda: {"rows": [row.to_json() for row in rows]}, lambda: render_comparison(rows), json_)
        return
    made = plan(request)
    if plot is not None:
        draw(made, plot)
    _print(made.to_json, lambda: render(made), json_)


def _print(as_json: Callable[[], Any], as_text: Callable[[], str], wanted_json: bool) -> None:
    print(json.dumps(as_json()) if wanted_json else as_text())


def _with_flags(command: Callable[..., None]) -> Callable[..., None]:
    """The command, whose `**flags` are now those of a request; None where one is not given."""
    signature = inspect.signature(command, eval_str=True)
    request = inspect.signature(build_request, eval_str=True).parameters
    own = [parameter for parameter in signature.parameters.values() if parameter.kind != parameter.VAR_KEYWORD]
    flags = []
    for order, (title, texts) in enumerate(_GROUPS.items()):
        for name, text in texts.items():
            default = request[name].default
            shown = " ".join(map(str, default)) if isinstance(default, tuple) else default
            option = Parameter(
                help=text, show_default=str(shown) if shown not in (None, "", False) else False,
                group=Group(title, sort_key=order + 1), negative="", consume_multiple=isinstance(default, tuple),
            )  # fmt: skip
            annotation = Annotated[request[name].annotation | None, option]  # type: ignore[valid-type]
            flags.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation))

    def with_flags(*arguments: Any, **values: Any) -> None:
        command(*arguments, **values)

    with_flags.__signature__ = signature.replace(parameters=[*own, *flags])  # type: ignore[attr-defined]
    with_flags.__doc__ = command.__doc__
    return with_flags


command = _with_flags(plan_command)
