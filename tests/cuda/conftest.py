"""Tests for a node with GPUs: `make test-cuda`. Elsewhere each is skipped, and says why."""

from __future__ import annotations

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests below this folder need as many GPUs as their mark `gpus` says, one without it."""
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for item in items:
        if "cuda" not in item.path.parent.name:
            continue
        mark = item.get_closest_marker("gpus")
        needed = mark.args[0] if mark else 1
        if found < needed:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} GPUs, and this machine has {found}"))
