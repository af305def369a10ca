"""Parquet tables as the hub writes them."""

from __future__ import annotations

import builtins
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from conadv.task.data import parquet
from conadv.task.data.parquet import list_tables, table_classes
from conadv.task.data.source import DamagedError
from task.data.samples import jpeg_set


def write_table(
    path: Path,
    samples: list[tuple[bytes | None, int | None]],
    names: list[str] | None = None,
    image: str = "image",
    label: str = "label",
    rows: int = 3,
) -> Path:
    """As the `datasets` library writes it: small row groups and a note of the features in the schema."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pictures = [{"bytes": data, "path": f"{i}.jpg"} for i, (data, _) in enumerate(samples)]
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    columns = {"id": pa.array(range(len(samples))), image: pa.array(pictures, kind)}
    table = pa.table({**columns, label: pa.array([label for _, label in samples], pa.int64())})
    if names is not None:
        note = {"info": {"features": {label: {"names": names, "_type": "ClassLabel"}}}}
        table = table.replace_schema_metadata({"huggingface": json.dumps(note)})
    pq.write_table(table, path, row_group_size=rows)
    return path


def test_rows_of_several_files_are_read_at_random(tmp_path: Path) -> None:
    samples = jpeg_set(11)
    files = [write_table(tmp_path / f"{n}.parquet", samples[n * 6 : n * 6 + 6]) for n in (0, 1)]
    listing = list_tables(files)
    assert [listing.read(i) for i in range(10, -1, -1)] == [data for data, _ in samples][::-1]
    assert listing.labels.tolist() == [label for _, label in samples]
    assert listing.names[7] == f"{files[1]} row 1"


def test_names_of_classes_come_from_the_hubs_note(tmp_path: Path) -> None:
    assert table_classes(write_table(tmp_path / "a.parquet", jpeg_set(2))) is None
    named = write_table(tmp_path / "b.parquet", jpeg_set(2), ["cat", "dog"], image="img", label="fine_label")
    assert table_classes(named) == ("cat", "dog")
    assert len(list_tables([named]).names) == 2


def test_images_may_be_plain_bytes(tmp_path: Path) -> None:
    pq.write_table(pa.table({"image": [b"one", b"two"], "label": [0, 1]}), tmp_path / "a.parquet")
    assert list_tables([tmp_path / "a.parquet"]).read(1) == b"two"


def test_rows_without_bytes_or_label_are_named(tmp_path: Path) -> None:
    data = jpeg_set(1)[0][0]
    listing = list_tables([write_table(tmp_path / "a.parquet", [(data, 0), (None, 0), (data, None), (data, 7)])])
    source, problems = listing.source(("cat", "dog"), 3)
    assert [problem.name[-5:] for problem in problems] == ["row 2", "row 3"]
    with pytest.raises(DamagedError, match="row 1: the row has no bytes"):
        source.image(1)


def test_tables_of_something_else_are_refused(tmp_path: Path) -> None:
    for columns in ({"text": ["a"], "label": [0]}, {"image": [b"a"], "label": ["cat"]}, {"image": [b"a"]}):
        pq.write_table(pa.table(columns), tmp_path / "a.parquet")
        with pytest.raises(
            ValueError, match=rf"a\.parquet: columns {', '.join(columns)}; it needs an image column with bytes"
        ):
            list_tables([tmp_path / "a.parquet"])


@pytest.mark.parametrize("content", [b"", b"PAR1", b"no parquet" * 20])
def test_damaged_files_are_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.parquet").write_bytes(content)
    for attempt in (lambda path: list_tables([path]), table_classes):
        with pytest.raises(ValueError, match=r"a\.parquet: not a Parquet file, or damaged"):
            attempt(tmp_path / "a.parquet")


def test_a_cut_file_is_named(tmp_path: Path) -> None:
    path = write_table(tmp_path / "a.parquet", jpeg_set(5))
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"a\.parquet: not a Parquet file"):
        list_tables([path])


def test_more_than_memory_should_hold_is_refused_with_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "MAX_BYTES", 2**30 // 2**20)
    with pytest.raises(ValueError, match="convert it to tar shards or an image folder"):
        list_tables([write_table(tmp_path / "a.parquet", jpeg_set(5))])


def test_without_pyarrow_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_table(tmp_path / "a.parquet", jpeg_set(2))
    real = builtins.__import__

    def without(name: str, *rest: object) -> object:
        if name.startswith("pyarrow"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    for attempt in (lambda path: list_tables([path]), table_classes):
        with pytest.raises(ValueError, match=r"pip install 'conadv\[parquet\]'"):
            attempt(path)
