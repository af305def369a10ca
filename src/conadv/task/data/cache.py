"""A cache of facts about data sets, in the user's cache folder, never next to the data."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from conadv.atomic import replacing
from conadv.task.data.regular import open_regular

Table = dict[str, NDArray[np.generic]]
"""Named columns."""

_FORMAT = 1


def cache_folder() -> Path:
    """$CONADV_CACHE, else `conadv` in the user's cache folder."""
    if chosen := os.environ.get("CONADV_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "conadv"


def stamp_of(files: Iterable[Path]) -> str:
    """A digest of the state of these files: paths, sizes and modification times."""
    digest = hashlib.sha256(str(_FORMAT).encode())
    for file in files:
        status = file.stat()
        digest.update(f"\0{file.absolute()}\0{status.st_size}\0{status.st_mtime_ns}".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def cached(kind: str, stamp: str, build: Callable[[], Table]) -> Table:
    """The cached table for this stamp, or a new one."""
    path = cache_folder() / f"{kind}-{stamp[:40]}.npz"
    try:
        with open_regular(path) as stored, np.load(stored, allow_pickle=False) as kept:
            return dict(kept)
    except Exception:
        pass  # missing or damaged: build it again
    table = build()
    with suppress(OSError):  # a full disk or no permission: build it again next time
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            np.savez(file, **table)  # type: ignore[arg-type]  # its stub takes the columns for allow_pickle
    return table


def pack_strings(strings: Iterable[str]) -> NDArray[np.uint8]:
    """Strings as one array of bytes, which needs no pickle and no fixed width."""
    return np.frombuffer("\0".join(strings).encode("utf-8", "surrogateescape"), np.uint8)


def unpack_strings(packed: NDArray[np.generic], count: int) -> list[str]:
    """The packed strings; `count` tells no strings from one empty string."""
    return packed.tobytes().decode("utf-8", "surrogateescape").split("\0") if count else []
