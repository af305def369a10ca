"""A file is there whole or not at all, with the rights that a new file has."""

from __future__ import annotations

from pathlib import Path

import pytest

from conadv.atomic import replacing


def test_a_file_appears_whole(tmp_path: Path) -> None:
    with replacing(tmp_path / "a") as file:
        file.write_bytes(b"new")
        assert not (tmp_path / "a").exists()
    assert (tmp_path / "a").read_bytes() == b"new"
    (tmp_path / "b").write_bytes(b"")
    assert (tmp_path / "a").stat().st_mode == (tmp_path / "b").stat().st_mode


def test_an_error_leaves_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"old")

    def write() -> None:
        with replacing(tmp_path / "a") as file:
            file.write_bytes(b"half of the n")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write()
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"old"]
