"""Other libraries. They are no dependencies: without them this folder is left out, and `make integrations` has them."""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from support import ranks, torchvision_ops

if find_spec("lightning") is None:
    collect_ignore_glob = ["test_*.py"]
torchvision_ops.declare()


@pytest.fixture(scope="session")
def pool() -> Iterator[ranks.Pool]:
    """Two rank processes that have imported the libraries."""
    with pytest.MonkeyPatch.context() as patch:
        # The server that ranks are forked from looks for modules only where the interpreter does.
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[1]), prepend=":")
        two = ranks.Pool(2, ["support.integrations_preload"])
    yield two
    two.close()
