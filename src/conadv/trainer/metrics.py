"""metrics.jsonl: one line per step, written so that a resumed run has no gap and no duplicate.

A line ends with a checksum of itself, `"crc": "1c291ca3"`: a flipped bit is noticed even where it is still JSON.
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

# A line has a few hundred bytes; more than this was not written by us.
_LONGEST_LINE = 2**16
_CHECKSUM = re.compile(rb', "crc": "([0-9a-f]{8})"}\n$')


class Metrics:
    """The sink metrics.jsonl: one line per step, no gap and no duplicate, however often the run was stopped."""

    def __init__(self, path: Path, start: int) -> None:
        self._path = path
        kept = list(_kept_lines(path, start))
        self.missing = start - len(kept)
        """Steps before `start` that have no line, because the file was damaged."""
        write_atomically(path, "".join(kept))
        self._file = path.open("ab", buffering=0)

    def write(self, **line: Any) -> None:
        data = _sealed({key: _or_null(value) for key, value in line.items()})
        before = self._file.tell()
        with writing(self._path):
            try:
                while data:
                    data = data[self._file.write(data) :]
            except OSError:
                self._file.truncate(before)  # no half line on a disk that is full
                raise

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        self.write(step=step, **metrics)

    def flush(self) -> None:
        """To the disk: a checkpoint must never be newer than the lines before it. Any thread may ask for it."""
        with writing(self._path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read the whole lines of a metrics file, up to the first that is damaged or was left half written.

    Args:
        path: The file; a missing one has no lines.

    Returns:
        One dictionary per line, without its checksum. Lines of versions that wrote none are read too.
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
    """None instead of a number that is not finite: JSON has no infinity and no NaN."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _kept_lines(path: Path, start: int) -> Iterator[str]:
    """The lines of the steps before `start`, each once and in order; those after it are taken again."""
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
    """One line of JSON whose last field is the CRC-32 of the line without it."""
    body = json.dumps(line).encode()
    return body[:-1] + b', "crc": "%08x"}\n' % crc32(body)


def _unsealed(data: bytes) -> dict[str, Any] | None:
    """The fields of a line without its checksum; None: it is damaged."""
    checksum = _CHECKSUM.search(data)
    body = data[: checksum.start()] + b"}" if checksum else data
    if not data.endswith(b"\n") or (checksum and int(checksum[1], 16) != crc32(body)):
        return None
    try:
        line = json.loads(body)
    except (ValueError, RecursionError):
        return None
    # Without a checksum it is a line of an earlier version, which held numbers alone: a text is what is left of one.
    if not isinstance(line, dict) or (not checksum and any(isinstance(value, str) for value in line.values())):
        return None
    return line if isinstance(line.get("step"), int) else None
