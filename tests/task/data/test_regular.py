"""Files are opened only if they are regular, read only as far as they should be, and named in every error."""

from __future__ import annotations

import gzip
import io
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conadv.task.data.bounds import check_memory, free_memory
from conadv.task.data.gunzip import Gunzip
from conadv.task.data.regular import named_damage, open_regular, plain_errors, read_exactly, read_whole
from conadv.task.data.source import DamagedError


def test_a_link_to_a_file_is_followed(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    assert read_whole(tmp_path / "link", 7) == b"content"


def test_a_file_larger_than_the_limit_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    os.truncate(tmp_path / "file", 2**40)
    with pytest.raises(OSError, match=r"1,099,511,627,776 bytes are more than the limit of 10"):
        read_whole(tmp_path / "file", 10)


@pytest.mark.timeout(20)
def test_no_handle_is_left_open_for_what_is_not_regular(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    before = len(list(Path("/proc/self/fd").iterdir()))
    for path in (tmp_path, tmp_path / "fifo", Path("/dev/zero")):
        with pytest.raises(OSError, match="not a regular file"):
            open_regular(path)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


@pytest.mark.timeout(20)
def test_what_takes_the_place_of_a_file_while_it_is_opened_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A FIFO without a writer, which an ordinary open would wait for."""
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "file").touch()
    looked_at = os.stat(tmp_path / "file")  # noqa: PTH116
    before = len(list(Path("/proc/self/fd").iterdir()))
    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", lambda path: looked_at)
        with pytest.raises(OSError, match="not a regular file"):
            open_regular(tmp_path / "fifo")
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_file_that_ends_early_is_noticed() -> None:
    assert read_exactly(io.BytesIO(b"abc"), 3).tobytes() == b"abc"
    with pytest.raises(EOFError, match="fewer bytes than its header's 4"):
        read_exactly(io.BytesIO(b"abc"), 4)


@pytest.mark.parametrize("error", [KeyError("x"), RecursionError(), TypeError("a\nb"), DamagedError("file", "why")])
def test_whatever_goes_wrong_is_damage_with_the_name_of_the_file(error: Exception) -> None:
    with pytest.raises(DamagedError, match=r"^file: .*") as caught, named_damage("file", "do this"):
        raise error
    assert str(caught.value).isprintable()


def test_a_lack_of_memory_is_no_damage() -> None:
    with pytest.raises(ValueError, match="file: not enough memory") as caught, named_damage("file", "do this"):
        raise MemoryError
    assert not isinstance(caught.value, DamagedError)


def test_what_the_system_refuses_is_one_line() -> None:
    with pytest.raises(ValueError, match=r"^/a/b\?c: Permission denied; check"), plain_errors("/a"):
        raise PermissionError(13, "Permission denied", "/a/b\x1bc")


def test_memory_is_counted_before_it_is_asked_for() -> None:
    check_memory(free_memory() // 2, "half", "none")
    with pytest.raises(ValueError, match=r"x\.npz: needs 1048576\.0 GiB of memory, and .* are free; use less"):
        check_memory(2**50, "x.npz", "use less")


@given(st.binary(max_size=5000), st.lists(st.integers(1, 900), max_size=8), st.integers(0, 9))
def test_gzip_is_read_forward_as_gzip_reads_it(content: bytes, steps: list[int], level: int) -> None:
    with gzip.GzipFile(fileobj=io.BytesIO(gzip.compress(content, level))) as expected:
        ours, place = Gunzip(io.BytesIO(gzip.compress(content, level))), 0
        for step in steps:
            assert ours.read(step) == expected.read(step)
            place = min(len(content), place + 2 * step)
            ours.seek(place)
            expected.seek(place)


def test_damaged_gzip_is_an_error() -> None:
    whole = gzip.compress(bytes(range(256)) * 40)
    for broken, error in ((whole[:-9], EOFError), (whole[:-1] + b"?", OSError), (b"plain", OSError)):
        with pytest.raises(error):
            Gunzip(io.BytesIO(broken)).read(10**6)
