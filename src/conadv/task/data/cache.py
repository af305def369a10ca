"""A cache of facts about data sets, in the user's cache folder, never next to the data."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conadv.atomic import replacing

_FORMAT = 2

Table = dict[str, NDArray[Any]]
"""Named columns."""


def stamp_of(files: Iterable[str | os.PathLike[str]]) -> str:
    """A digest of the state of these files: paths, sizes and modification times."""
    digest = hashlib.sha256()
    for file in files:
        status = os.stat(file)  # noqa: PTH116  # a Path for each of a million files takes longer
        state = f"\0{os.path.abspath(file)}\0{status.st_size}\0{status.st_mtime_ns}"  # noqa: PTH100
        digest.update(state.encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def cached(kind: str, stamp: str, build: Callable[[], Table]) -> Table:
    """The cached table for this stamp, or a new one."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    path = Path(os.environ.get("CONADV_CACHE") or home / "conadv") / f"{kind}{_FORMAT}-{stamp[:40]}.npz"
    with suppress(Exception), path.open("rb") as stored, np.load(stored, allow_pickle=False) as table:
        return dict(table)
    table = build()  # nothing is cached, or it is damaged
    with suppress(OSError):  # a full disk or no permission: build it again next time
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            np.savez(file, **table)  # type: ignore[arg-type]  # its stub takes the columns for allow_pickle
    return table
