"""IDX files, whole and damaged."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest

from conadv.task.data.idx import find_idx, open_idx, read_idx


def idx(array: np.ndarray, kind: int = 8) -> bytes:
    return struct.pack(f">HBB{array.ndim}I", 0, kind, array.ndim, *array.shape) + array.tobytes()


IMAGES = np.arange(6 * 5 * 4, dtype=np.uint8).reshape(6, 5, 4)
LABELS = np.array([0, 2, 1, 0, 1, 2], np.uint8)


def write(root: Path, mark: str = "-", end: str = "", test: str = "t10k") -> Path:
    pack = gzip.compress if end else bytes
    for part, count in (("train", 6), (test, 3)):
        (root / f"{part}-images{mark}idx3-ubyte{end}").write_bytes(pack(idx(IMAGES[:count])))
        (root / f"{part}-labels{mark}idx1-ubyte{end}").write_bytes(pack(idx(LABELS[:count])))
    return root


@pytest.mark.parametrize(("mark", "end"), [("-", ""), ("-", ".gz"), (".", ""), (".", ".gz")])
def test_both_parts_are_read(tmp_path: Path, mark: str, end: str) -> None:
    files = find_idx(write(tmp_path, mark, end))
    assert files is not None
    data = open_idx(files, "toy")
    np.testing.assert_array_equal(data.train.images, IMAGES[..., None])
    np.testing.assert_array_equal(data.test.labels, LABELS[:3])
    assert data.train.classes == ("0", "1", "2")


def test_a_missing_file_is_no_idx_data(tmp_path: Path) -> None:
    (write(tmp_path) / "t10k-labels-idx1-ubyte").unlink()
    assert find_idx(tmp_path) is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "unpack"),
        (b"\0\0\x08", "unpack"),
        (idx(LABELS)[:-1], "fewer bytes than its header's 6"),
        (idx(LABELS) + b"\0", "more bytes than its header's 6"),
        (idx(LABELS, kind=13), "not an IDX file"),
        (b"PNG!" + bytes(20), "not an IDX file|unpack"),
        (struct.pack(">HBB3I", 0, 8, 3, 2**32 - 1, 2**32 - 1, 2**32 - 1), "not an IDX file"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, content: bytes, message: str) -> None:
    for name, pack in (("a", bytes), ("a.gz", gzip.compress)):
        (tmp_path / name).write_bytes(pack(content))
        with pytest.raises(ValueError, match=f"{name}: .*({message}).*download it again"):
            read_idx(tmp_path / name)


def test_a_cut_or_false_gzip_file_is_named(tmp_path: Path) -> None:
    for content in (gzip.compress(idx(IMAGES))[:-12], idx(IMAGES), b"\x1f\x8b\x08\0\0\0\0\0\0\xff\xff\xff"):
        (tmp_path / "a.gz").write_bytes(content)
        with pytest.raises(ValueError, match=r"a\.gz: .*download it again"):
            read_idx(tmp_path / "a.gz")
