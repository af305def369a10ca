"""The releases of PyTorch that are tested are the same wherever they are named."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def found(path: str, pattern: str) -> str:
    match = re.search(pattern, (ROOT / path).read_text())
    assert match, f"{path} does not name the versions"
    return match[1]


def test_the_tested_range_of_pytorch_is_the_same_everywhere():
    floor, tested = found("pyproject.toml", r'"torch>=([\d.]+)"'), found("pyproject.toml", r"# tested: ([\d., ]+\d) ")
    oldest, usual, newest = tested.split(", ")
    assert oldest.startswith(floor)
    assert found("constraints.txt", r"(?m)^torch==(.+)$") == usual
    assert found("Makefile", r"TORCH \?= (.+)") == newest
    assert found(".github/workflows/test.yml", r"torch: \[(.+)\]") == f'"{oldest}", "{newest}"'
    short = [version.removesuffix(".0") for version in (oldest, newest)]
    assert found("README.md", r"PyTorch (.+) is tested") == " to ".join(short)
    assert re.findall(r"[\d.]*\d", found("docs/index.md", r"PyTorch (.+)\)")) == short
    assert re.findall(r"[\d.]*\d", found("CONTRIBUTING.md", r"and PyTorch (.+) \(`make test-torch`\)")) == short
