"""The cache is built once, survives damage, and never causes an error."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from conadv.task.data.cache import cache_folder, cached, pack_strings, stamp_of, unpack_strings

STAMP = "0123456789" * 6


def table() -> dict[str, np.ndarray]:
    return {"numbers": np.arange(3)}


def never() -> dict[str, np.ndarray]:
    raise AssertionError("it should have been there")


def test_a_table_is_built_once() -> None:
    cached("kind", STAMP, table)
    np.testing.assert_array_equal(cached("kind", STAMP, never)["numbers"], [0, 1, 2])


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"garbage", b"\x80\x04N."])
def test_a_damaged_table_is_built_again(cache: Path, content: bytes) -> None:
    cached("kind", STAMP, table)
    (file,) = cache.iterdir()
    file.write_bytes(content)
    np.testing.assert_array_equal(cached("kind", STAMP, table)["numbers"], [0, 1, 2])
    np.testing.assert_array_equal(cached("kind", STAMP, never)["numbers"], [0, 1, 2])


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("CONADV_CACHE", str(tmp_path / "file"))
    np.testing.assert_array_equal(cached("kind", STAMP, table)["numbers"], [0, 1, 2])


def test_a_stopped_write_leaves_nothing_behind(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(file: object, **columns: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(np, "savez", stop)
    with pytest.raises(KeyboardInterrupt):
        cached("kind", STAMP, table)
    assert list(cache.iterdir()) == []


def test_the_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CONADV_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache_folder() == Path("/somewhere/conadv")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert cache_folder() == Path("/home/me/.cache/conadv")


def test_a_stamp_follows_path_size_and_time(tmp_path: Path) -> None:
    file = tmp_path / "a"
    stamps = []
    for content, time in ((b"x", 1), (b"xy", 1), (b"yx", 2)):
        file.write_bytes(content)
        os.utime(file, ns=(time, time))
        stamps.append(stamp_of([file]))
    file.rename(tmp_path / "b")
    stamps.append(stamp_of([tmp_path / "b"]))
    assert len(set(stamps)) == 4
    assert stamp_of([tmp_path / "b"]) == stamps[-1]


@pytest.mark.parametrize("strings", [[], [""], ["", ""], ["a", "ü", "\udcff"]])
def test_strings_survive_packing(strings: list[str]) -> None:
    assert unpack_strings(pack_strings(strings), len(strings)) == strings
