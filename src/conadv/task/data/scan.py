"""Every image decoded once, to know which cannot be."""

from __future__ import annotations

import numpy as np

from conadv.task.data.ahead import ordered_map
from conadv.task.data.cache import Table, cached, pack_strings, unpack_strings
from conadv.task.data.encoded import Encoded
from conadv.task.data.source import DamagedError


def damaged_images(source: Encoded, stamp: str, workers: int) -> dict[int, str]:
    """The reason by index; found out once for the state of the files that `stamp` names."""

    def build() -> Table:
        reasons = ordered_map(lambda index: _reason(source, index), range(len(source)), workers, 64 * workers)
        found = {index: reason for index, reason in enumerate(reasons) if reason is not None}
        return {"index": np.array(list(found), np.int64), "reason": pack_strings(found.values())}

    table = cached("damaged", stamp, build)
    indices = table["index"].tolist()
    return dict(zip(indices, unpack_strings(table["reason"], len(indices)), strict=True))


def _reason(source: Encoded, index: int) -> str | None:
    try:
        source.image(index)
    except DamagedError as error:
        return error.reason
    return None
