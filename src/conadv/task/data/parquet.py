"""Parquet tables as the Hugging Face hub stores image data sets: image {bytes, path} and label, held in memory."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conadv.task.data.bounds import MAX_CLASSES, MAX_ENCODED, free_memory
from conadv.task.data.encoded import Listing
from conadv.task.data.regular import open_regular
from conadv.task.data.source import DamagedError, one_line

# Rows cannot be read one by one, so the encoded images of all files are kept in memory.
MAX_BYTES = 16 * 2**30
_LABEL_NAMES = ("label", "labels", "fine_label", "cls", "class")
_BATCH_BYTES = 2**26  # about the largest batch of rows, even if one row is as large as its row group
_MAX_BATCH = 1024
_FEW_ROWS = 10_000
_MAX_RATIO = 100  # of uncompressed to compressed size; encoded images hardly compress
_BYTES_PER_ROW = 4  # in a file with many rows; no image is smaller, however well it is compressed


class Tables:
    """Encoded images by index; those of all files are in memory.

    Args:
        files: The paths of the files.
        columns: The encoded images of each file, in chunks of rows.
        rows: The rows to use, counted over all files; None: all of them.
    """

    def __init__(self, files: Sequence[str], columns: Sequence[list[Any]], rows: NDArray[np.int64] | None = None):
        self.files, self._columns = files, columns
        self.counts = [sum(map(len, column)) for column in columns]
        self._chunks = [chunk for column in columns for chunk in column]
        self._starts = np.cumsum([0, *map(len, self._chunks)])
        self.rows = np.arange(sum(self.counts)) if rows is None else rows

    @classmethod
    def read_again(cls, files: Sequence[str], counts: Sequence[int], rows: NDArray[np.int64]) -> Tables:
        """Read the images of files, but not their labels, and check the number of rows against rank 0's."""
        columns = [[chunk for chunk, _ in part] for part in _read_files(list(map(Path, files)), labelled=False)]
        tables = cls(files, columns, rows)
        for file, expected, found in zip(files, counts, tables.counts, strict=True):
            if expected != found:
                raise ValueError(f"{file}: {found:,} rows where rank 0 has {expected:,}: give all ranks the same data")
        return tables

    def __call__(self, index: int) -> bytes:
        row = int(self.rows[index])
        place = int(np.searchsorted(self._starts, row, side="right")) - 1
        buffer = self._chunks[place][row - int(self._starts[place])].as_buffer()
        if buffer is None:
            raise DamagedError(self.name(index), "the row has no bytes")
        if buffer.size > MAX_ENCODED:
            raise DamagedError(self.name(index), f"{buffer.size:,} bytes are more than the limit of {MAX_ENCODED:,}")
        return bytes(buffer)

    def name(self, index: int) -> str:
        """The name of an image in error messages."""
        ends = np.cumsum(self.counts)
        row = int(self.rows[index])
        file = int(np.searchsorted(ends, row, side="right"))
        return f"{self.files[file]} row {row - int(ends[file]) + self.counts[file]}"

    def take(self, indices: Sequence[int]) -> Tables:
        """These images alone, in this order."""
        return Tables(self.files, self._columns, self.rows[np.asarray(indices, np.int64)])


def list_tables(files: Sequence[Path]) -> Listing:
    """List the rows of these files, in order."""
    parts = _read_files(files, labelled=True)
    labels = [np.zeros(0, np.int64), *(own for part in parts for _, own in part)]
    tables = Tables(list(map(str, files)), [[chunk for chunk, _ in part] for part in parts])
    names = [f"{file} row {row}" for file, count in zip(files, tables.counts, strict=True) for row in range(count)]
    return Listing(names, np.concatenate(labels), tables)


def _read_files(files: Sequence[Path], labelled: bool) -> list[list[tuple[Any, NDArray[np.int64]]]]:
    """The encoded images and labels of each file, in chunks of rows."""
    _check_size(sum(file.stat().st_size for file in files), files[0])
    parts: list[list[tuple[Any, NDArray[np.int64]]]] = []
    held = 0
    for file in files:
        parts.append([])
        for chunk in _read(file, labelled):
            held += chunk[0].nbytes
            _check_size(held, file)
            parts[-1].append(chunk)
    return parts


def table_classes(file: Path) -> tuple[str, ...] | None:
    """Class names from the hub's metadata in the schema, or None."""
    with _opened(file) as table:
        schema = table.schema_arrow
        label = _columns(schema, file)[1]
        note = (schema.metadata or {}).get(b"huggingface", b"{}")
    match _parsed(note):
        case {"info": {"features": {**features}}}:
            return _names_of(features.get(label))
    return None


def _parsed(note: bytes) -> object:
    try:
        return json.loads(note)
    except (ValueError, RecursionError):
        return None  # not written by the hub


def _names_of(feature: object) -> tuple[str, ...] | None:
    """The classes of a label, or of a list of labels."""
    match feature:
        case {"names": [*names]} | {"feature": {"names": [*names]}}:
            if 0 < len(names) <= MAX_CLASSES and all(isinstance(name, str) for name in names):
                return tuple(names)
    return None


def _check_size(size: int, file: Path) -> None:
    if size > min(MAX_BYTES, free_memory()):
        raise ValueError(
            f"{file.parent}: {size / 2**30:.1f} GiB of Parquet would be held in memory, more than is free or than "
            f"{MAX_BYTES >> 30} GiB: convert it to tar shards or an image folder, which are read one image at a time"
        )


def _read(file: Path, labelled: bool) -> Iterator[tuple[Any, NDArray[np.int64]]]:
    """Yield encoded images and labels in chunks of rows; the label is -1 if it is missing or not `labelled`."""
    with _opened(file) as table:
        image, label = _columns(table.schema_arrow, file)
        rows = _batch_rows(table.metadata, image, file)
        whole = _pyarrow().int64()
        room = _MAX_RATIO * file.stat().st_size + _BATCH_BYTES
        for batch in table.iter_batches(rows, columns=[image, label][: 1 + labelled], use_threads=False):
            room -= batch.nbytes
            if room < 0:
                raise ValueError(f"its rows unpack to more than {_MAX_RATIO} times the bytes of the file")
            batch.validate(full=True)
            labels = np.full(len(batch), -1)
            if labelled:
                labels = batch.column(label).cast(whole).fill_null(-1).to_numpy(zero_copy_only=False)
            yield _encoded(batch.column(image)), labels.astype(np.int64)


def _batch_rows(metadata: Any, image: str, file: Path) -> int:
    """Check the sizes in the metadata, and return how many rows to read at a time."""
    length = file.stat().st_size
    if metadata.num_rows > max(_FEW_ROWS, length // _BYTES_PER_ROW) or metadata.num_rows < 0:
        raise ValueError(f"{metadata.num_rows:,} rows in {length:,} bytes")
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    columns = [group.column(number) for group in groups for number in range(group.num_columns)]
    for column in columns:
        if not 0 <= column.total_compressed_size <= length or column.total_uncompressed_size < 0:
            raise ValueError("columns that are larger than the file")
    largest = max((c.total_uncompressed_size for c in columns if c.path_in_schema.split(".")[0] == image), default=0)
    return int(min(_MAX_BATCH, max(1, _BATCH_BYTES // (largest + 1))))


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    """Open a file; errors of pyarrow become a ValueError that names the file."""
    parquet = _pyarrow().parquet
    try:
        with open_regular(file) as stored:
            _check_ends(stored)
            yield parquet.ParquetFile(stored, thrift_string_size_limit=2**26, thrift_container_size_limit=2**20)
    except (DamagedError, _ColumnsError):
        raise
    except MemoryError:
        raise ValueError(
            f"{file}: not enough memory to read it; close other programs, or download it again if it is damaged"
        ) from None
    except Exception as error:
        raise ValueError(f"{file}: not a Parquet file, or damaged ({one_line(error)}); download it again") from error


def _check_ends(stored: FileIO) -> None:
    """Check the magic bytes at both ends, and that the metadata fits between them."""
    length = os.fstat(stored.fileno()).st_size
    start = stored.read(4)
    stored.seek(max(0, length - 8))
    end = stored.read(8)
    if length < 12 or start != b"PAR1" or end[4:] != b"PAR1" or int.from_bytes(end[:4], "little") > length - 12:
        raise ValueError("no PAR1 at its start and end")
    stored.seek(0)


class _ColumnsError(ValueError):
    """A table without images or labels."""


def _pyarrow() -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ValueError("Parquet needs pyarrow: pip install 'conadv[parquet]'") from None
    return pyarrow


def _columns(schema: Any, file: Path) -> tuple[str, str]:
    """The names of the image column and the label column."""
    image = next((f.name for f in schema if _holds_bytes(f.type)), None)
    whole = [f.name for f in schema if _pyarrow().types.is_integer(f.type)]
    label = next((name for name in _LABEL_NAMES if name in whole), None)
    if image is None or label is None or schema.names.count(image) > 1 or schema.names.count(label) > 1:
        raise _ColumnsError(
            f"{file}: columns {one_line(', '.join(schema.names))}; it needs an image column with bytes, and an integer "
            f"column called {', '.join(_LABEL_NAMES[:-1])} or {_LABEL_NAMES[-1]}"
        )
    return image, label


def _holds_bytes(kind: Any) -> bool:
    types = _pyarrow().types
    if types.is_struct(kind):
        place = kind.get_field_index("bytes")
        return place >= 0 and _holds_bytes(kind.field(place).type) and not types.is_struct(kind.field(place).type)
    return bool(types.is_binary(kind) or types.is_large_binary(kind))


def _encoded(column: Any) -> Any:
    """The bytes of each row; a row without an image has none."""
    if not _pyarrow().types.is_struct(column.type):
        return column
    import pyarrow.compute

    return pyarrow.compute.struct_field(column, "bytes")
