"""Parquet tables as the Hugging Face hub stores image data sets: image {bytes, path} and label, held in memory."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from conadv.task.data.encoded import Listing
from conadv.task.data.source import DamagedError

# A row cannot be read without the hundreds around it, so the encoded images of all files are kept in memory.
MAX_BYTES = 16 * 2**30
_LABEL_NAMES = ("label", "labels", "fine_label", "cls", "class")


def list_tables(files: Sequence[Path]) -> Listing:
    """The rows of these files, in order."""
    size = sum(file.stat().st_size for file in files)
    if size > MAX_BYTES:
        raise ValueError(
            f"{files[0].parent}: {size / 2**30:.0f} GiB of Parquet would be held in memory, more than "
            f"{MAX_BYTES >> 30}: write its images to tar shards once (conadv.task.data.write_shards)"
        )
    chunks: list[Any] = []
    names: list[str] = []
    labels: list[int] = []
    for file in files:
        table = _read(file)
        chunks += [_encoded(chunk) for chunk in table.column(0).chunks]
        names += [f"{file} row {row}" for row in range(table.num_rows)]
        labels += [-1 if label is None else label for label in table.column(1).to_pylist()]
    starts = np.cumsum([0, *(len(chunk) for chunk in chunks)])

    def read(index: int) -> bytes:
        place = int(np.searchsorted(starts, index, side="right")) - 1
        data: bytes | None = chunks[place][index - int(starts[place])].as_py()
        if data is None:
            raise DamagedError(names[index], "the row has no bytes")
        return data

    return Listing(names, np.array(labels, np.int64), read)


def table_classes(file: Path) -> tuple[str, ...] | None:
    """The names that the hub's own note in the schema gives to the classes."""
    schema = _schema(file)
    note = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
    feature = note.get("info", {}).get("features", {}).get(_columns(schema, file)[1], {})
    names = feature.get("names") or feature.get("feature", {}).get("names")
    return tuple(names) if names else None


def _read(file: Path) -> Any:
    columns = _columns(_schema(file), file)
    with _named_errors(file):
        return _pyarrow().parquet.read_table(file, columns=columns)


def _schema(file: Path) -> Any:
    with _named_errors(file):
        return _pyarrow().parquet.read_schema(file)


def _pyarrow() -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ValueError("Parquet needs pyarrow: pip install 'conadv[parquet]'") from None
    return pyarrow


@contextmanager
def _named_errors(file: Path) -> Iterator[None]:
    """What goes wrong inside pyarrow, with the name of the file."""
    failures = (_pyarrow().ArrowException, OSError)
    try:
        yield
    except failures as error:
        raise ValueError(f"{file}: no Parquet file, or a damaged one ({str(error).splitlines()[0]})") from error


def _columns(schema: Any, file: Path) -> list[str]:
    """The names of the image's and the label's column."""
    types = _pyarrow().types
    image = next(
        (
            f.name
            for f in schema
            if types.is_binary(f.type) or (types.is_struct(f.type) and f.type.get_field_index("bytes") >= 0)
        ),
        None,
    )
    whole = [f.name for f in schema if types.is_integer(f.type)]
    label = next((name for name in _LABEL_NAMES if name in whole), None)
    if image is None or label is None:
        raise ValueError(
            f"{file}: columns {', '.join(schema.names)}; an image column with bytes and, in whole numbers, "
            f"one of {', '.join(_LABEL_NAMES)} are needed"
        )
    return [image, label]


def _encoded(chunk: Any) -> Any:
    types = _pyarrow().types
    return chunk.field("bytes") if types.is_struct(chunk.type) else chunk
