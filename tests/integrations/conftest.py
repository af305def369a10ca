"""Other libraries. They are no dependencies: a test is skipped where its library is missing."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import ranks
import torchvision_ops

torchvision_ops.declare()


@pytest.fixture(scope="session")
def pool() -> Iterator[ranks.Pool]:
    """Two rank processes that have imported the libraries."""
    with pytest.MonkeyPatch.context() as patch:
        # The server that ranks are forked from looks for modules only where the interpreter does.
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[1]), prepend=":")
        two = ranks.Pool(2, ["integrations_preload"])
    yield two
    two.close()
