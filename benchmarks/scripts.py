"""What the scripts of this folder share: a flag for each size, and one line for bad input."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace

from cyclopts import App

from conadv.study.bench.command import Measurement, report
from conadv.study.bench.workload import Workload


def run_workload(name: str, measurement: Measurement, text: str | None) -> None:
    """Run a script that measures a workload: flags for its sizes, and `text` as its help."""
    sizes: Workload = measurement.sizes

    def main(
        *,
        rounds: int = measurement.rounds,
        model: str = sizes.model,
        width: int | None = None,
        chunk_size: int = sizes.chunk_size,
        image_size: int = sizes.image_size,
        json: bool = False,
    ) -> None:
        chosen = replace(sizes, model=model, width=width, chunk_size=chunk_size, image_size=image_size)
        report({name: measurement._replace(sizes=chosen, rounds=rounds)}, json)

    main.__doc__ = text
    run_script(main)


def run_script(main: Callable[..., None]) -> None:
    """Run the command of a script: bad input is one line and exit status 2."""
    app = App(help_format="plaintext")
    app.default(main)
    try:
        app()
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
