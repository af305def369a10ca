"""Read TOML files that users write, up to a maximum size. Anything wrong with one is a ValueError."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

# Recipes and studies have a few thousand bytes: an archive that is named by mistake is not read to its end.
_LARGEST = 1_000_000


def read_toml(path: Path) -> tuple[str, dict[str, Any]]:
    """The text of a file, and its tables. A missing file is a FileNotFoundError."""
    text = _text(path)
    try:
        return text, tomllib.loads(text)
    except RecursionError:
        raise ValueError("brackets nested too deeply") from None


def _text(path: Path) -> str:
    try:
        if path.exists() and not path.is_file() and not path.is_dir():  # opening a pipe would wait forever
            raise OSError("not a regular file")
        with path.open("rb") as file:
            content = file.read(_LARGEST + 1)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ValueError(f"{error.strerror or error}; pass a TOML file that can be read") from None
    if len(content) > _LARGEST:
        raise ValueError(f"larger than {_LARGEST} bytes; pass a TOML file")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError("not UTF-8 text; pass a TOML file") from None
