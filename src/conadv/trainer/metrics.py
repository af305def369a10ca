"""metrics.jsonl: one line per step, written so that a resumed run has no gap and no duplicate.

Each line ends with its own checksum, `"crc": "1c291ca3"`, so that a flipped bit is noticed even if the line is JSON.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from zlib import crc32

from .files import write_atomically, writing

# Ours have a few hundred bytes.
_LONGEST_LINE = 2**16
_CHECKSUM = re.compile(rb', "crc": "([0-9a-f]{8})"}\n$')


class Metrics:
    """The sink that writes metrics.jsonl.

    Args:
        path: The file. Lines of earlier steps stay.
        start: The step from which on lines are written; later lines in the file are dropped.
    """

    def __init__(self, path: Path, start: int) -> None:
        self._path = path
        kept = list(_kept_lines(path, start))
        self.missing = start - len(kept)
        """How many steps before `start` have no line, because the file was damaged."""
        write_atomically(path, "".join(kept))
        self._file = path.open("ab", buffering=0)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        data = _sealed({key: _or_null(value) for key, value in {"step": step, **metrics}.items()})
        before = self._file.tell()
        with writing(self._path):
            try:
                while data:
                    data = data[self._file.write(data) :]
            except OSError:
                self._file.truncate(before)  # leave no partial line on a full disk
                raise

    def flush(self) -> None:
        """Flush all lines to the disk, from any thread; called before a checkpoint is written."""
        with writing(self._path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read the lines of a metrics file, up to the first one that is damaged or incomplete.

    Args:
        path: The file; if it does not exist, there are no lines.

    Returns:
        One dictionary per line, without the checksum. Lines of older versions, which have none, are read too.
    """
    lines: list[dict[str, Any]] = []
    if _is_there(path):
        for data in path.read_bytes().splitlines(keepends=True):
            line = _unsealed(data)
            if line is None:
                break
            lines.append(line)
    return lines


def _or_null(value: Any) -> Any:
    """Replace NaN and infinity, which JSON does not have, by None."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _kept_lines(path: Path, start: int) -> Iterator[str]:
    """Yield the lines of the steps before `start`, each once and in order."""
    if not _is_there(path):
        return
    last = -1
    with path.open("rb") as file:
        while line := file.readline(_LONGEST_LINE):
            fields = _unsealed(line)
            if fields is not None and last < fields["step"] < start:
                last = fields["step"]
                yield line.decode()


def _is_there(path: Path) -> bool:
    """Whether the file exists; a ValueError for a pipe or a device, which would keep us waiting, or never end."""
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is not a regular file: remove it")
    return path.exists()


def _sealed(line: dict[str, Any]) -> bytes:
    """Serialize to one line of JSON whose last field is the CRC-32 of the line without it."""
    body = json.dumps(line).encode()
    return body[:-1] + b', "crc": "%08x"}\n' % crc32(body)


def _unsealed(data: bytes) -> dict[str, Any] | None:
    """Parse a line and remove its checksum; None if it is damaged."""
    checksum = _CHECKSUM.search(data)
    body = data[: checksum.start()] + b"}" if checksum else data
    if not data.endswith(b"\n") or (checksum and int(checksum[1], 16) != crc32(body)):
        return None
    try:
        line = json.loads(body)
    except (ValueError, RecursionError):
        return None
    # Lines of older versions have no checksum and only numbers: a string is the rest of a damaged checksum.
    if not isinstance(line, dict) or (not checksum and any(isinstance(value, str) for value in line.values())):
        return None
    return line if isinstance(line.get("step"), int) else None
