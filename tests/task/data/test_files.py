"""Encoded images on disk: folders, tar shards, single files, and the cache of what was found in them."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from conadv.task.data import shards as shards_module
from conadv.task.data.bounds import check_memory, free_memory
from conadv.task.data.cache import cached, stamp_of
from conadv.task.data.files import read_file
from conadv.task.data.folder import find_folders, folder_classes, list_folder
from conadv.task.data.shards import list_shards
from conadv.task.data.source import DamagedError, naming
from task.data.samples import encode, jpeg_set, members_of, picture, write_folder, write_tar


def listed(*paths: Path) -> tuple[list[str], list[bytes], list[int]]:
    """Names below the folder of the first shard, contents and labels."""
    files, labels, _ = list_shards(paths[0].parent, paths, 3)
    return list(files.names), [files.read(row) for row in range(len(labels))], labels.tolist()


def problems_of(path: Path) -> dict[str, str]:
    found = list_shards(path.parent, [path], 3)[2]
    return {problem.name.removeprefix(str(path)).lstrip("/"): problem.reason for problem in found}


def test_a_folder_is_sorted_by_class_and_name(tmp_path: Path) -> None:
    for name in ("b/2.jpg", "b/1.PNG", "a/sub/9.jpeg", "a/0.webp", "a/notes.txt", "a/.hidden.jpg", "a/._1.jpg"):
        (tmp_path / "train" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "train" / name).write_bytes(name.encode())
    files, labels, problems = list_folder(tmp_path, tmp_path / "train", ("a", "b", "c"), 3)
    names = ["a/0.webp", "a/sub/9.jpeg", "b/1.PNG", "b/2.jpg"]
    assert [files.name(row) for row in range(4)] == [f"{tmp_path}/train/{name}" for name in names]
    assert labels.tolist() == [0, 0, 1, 1]
    assert files.read(1) == b"a/sub/9.jpeg"
    assert [str(problem) for problem in problems] == [f"{tmp_path}/train/c: a class without images"]


@pytest.mark.parametrize("test", ["val", "valid", "validation", "test"])
def test_the_folders_have_the_usual_names(tmp_path: Path, test: str) -> None:
    (tmp_path / test).mkdir()
    assert find_folders(tmp_path) is None
    (tmp_path / "train").mkdir()
    assert find_folders(tmp_path) == (tmp_path / "train", tmp_path / test)


def test_classes_are_folders_that_training_knows(tmp_path: Path) -> None:
    write_folder(tmp_path, jpeg_set(4), jpeg_set(2))
    assert folder_classes(tmp_path / "train", tmp_path / "val") == ("class0", "class1")
    (tmp_path / "val" / "zebra").mkdir()
    with pytest.raises(ValueError, match=r"val: .*train has no class 'zebra' \(1 such folders\)"):
        folder_classes(tmp_path / "train", tmp_path / "val")
    with pytest.raises(ValueError, match="zebra: no class folders; put"):
        folder_classes(tmp_path / "val" / "zebra", None)


def test_shards_are_read_at_random_in_the_order_in_which_they_are_stored(tmp_path: Path) -> None:
    samples = jpeg_set(7)
    paths = [write_tar(tmp_path / f"{n}.tar", members_of(samples[n::2], 10 * n)) for n in (0, 1)]
    names, contents, labels = listed(*paths)
    assert contents == [data for data, _ in samples[0::2] + samples[1::2]]
    assert labels == [label for _, label in samples[0::2] + samples[1::2]]
    assert names[4] == "1.tar/0010.jpg"


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_samples_may_lie_apart_have_long_names_and_other_members(tmp_path: Path, form: int) -> None:
    key = "k" * 90 if form == tarfile.USTAR_FORMAT else "schlüssel" * 30
    members = [
        ("a/x.cls", b"1\n"),
        (f"{key}.jpg", b"red"),
        ("a/x.png", b"blue"),
        ("b.json", b"{}"),
        (f"{key}.cls", b"0"),
    ]
    with tarfile.open(tmp_path / "s.tar", "w", format=form) as archive:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    assert listed(tmp_path / "s.tar") == ([f"s.tar/{key}.jpg", "s.tar/a/x.png"], [b"red", b"blue"], [0, 1])
    assert problems_of(tmp_path / "s.tar") == {}


def test_an_index_is_built_once_and_again_when_the_shard_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    built = []
    index = shards_module._index
    monkeypatch.setattr(shards_module, "_index", lambda path: built.append(path) or index(path))
    path = write_tar(tmp_path / "s.tar", [*members_of(jpeg_set(3)), ("lost.jpg", b"x")])
    assert listed(path) == listed(path)
    assert problems_of(path) == {"lost.jpg": "lost.cls is missing"}
    assert built == [path]
    write_tar(path, members_of(jpeg_set(4)))
    assert len(listed(path)[0]) == 4
    os.utime(path, ns=(1, 1))
    listed(path)
    assert len(built) == 3
    assert {file.suffix for file in cache.iterdir()} == {".npz"}


def test_what_is_wrong_in_a_shard_is_named(tmp_path: Path) -> None:
    first = jpeg_set(2)
    members = [*members_of(first), ("0001.png", b"another"), ("0001.cls", b"5"), ("a.jpg", b""), ("b.cls", b"0")]
    members += [("c.jpg", b"x"), ("c.cls", b"cat"), ("d.jpg", b"x"), ("d.cls", b""), ("e.jpg", b"x"), ("e.cls", b"-1")]
    path = write_tar(tmp_path / "s.tar", members)
    assert problems_of(path) == {
        "0001.png": "the key 0001 occurs twice",
        "0001.cls": "the key 0001 occurs twice",
        "a.jpg": "a.cls is missing",
        "b.cls": "its image is missing",
        "c.cls": "b'cat' is not a class number",
        "c.jpg": "c.cls is missing",
        "d.cls": "b'' is not a class number",
        "d.jpg": "d.cls is missing",
        "e.cls": "b'-1' is not a class number",
        "e.jpg": "e.cls is missing",
    }
    assert listed(path)[1] == [data for data, _ in first]


@pytest.mark.parametrize("where", [0, 100, 700, 0.2, 0.4, 0.5])
def test_a_shard_cut_anywhere_is_named_and_its_whole_images_remain(tmp_path: Path, where: float) -> None:
    samples = jpeg_set(8)
    path = write_tar(tmp_path / "s.tar", members_of(samples))
    os.truncate(path, int(where * path.stat().st_size if 0 < where < 1 else where))
    assert problems_of(path)[""].startswith("the shard is truncated or not a tar file (")
    _, contents, _ = listed(path)
    assert contents == [data for data, _ in samples[: len(contents)]]
    assert len(contents) < 8


def test_a_shard_that_ends_without_its_mark_is_noticed(tmp_path: Path) -> None:
    whole, part = (write_tar(tmp_path / f"{n}.tar", members_of(jpeg_set(4)[:n])) for n in (4, 2))
    kept = len(part.read_bytes().rstrip(b"\0"))
    os.truncate(whole, -(-kept // 512) * 512)  # between two images
    assert "no end mark" in problems_of(whole)[""]
    content = bytearray(write_tar(tmp_path / "6.tar", members_of(jpeg_set(6))).read_bytes())
    place = content.index(b"0003.jpg")
    content[place : place + 200] = b"\x55" * 200  # a damaged header, which tarfile takes for the end
    (tmp_path / "6.tar").write_bytes(content)
    assert "no end mark" in problems_of(tmp_path / "6.tar")[""]
    assert len(listed(tmp_path / "6.tar")[0]) == 3


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.floats(0, 0.999), st.integers(0, 255)), min_size=1, max_size=30))
def test_a_damaged_shard_never_crashes(tmp_path: Path, changes: list[tuple[float, int]]) -> None:
    content = bytearray(write_tar(tmp_path / "s.tar", members_of(jpeg_set(3))).read_bytes())
    for place, value in changes:
        content[int(place * len(content))] = value
    (tmp_path / "s.tar").write_bytes(content)
    names, contents, labels = listed(tmp_path / "s.tar")
    assert len(names) == len(contents) == len(labels)


def test_a_shard_that_shrank_since_it_was_listed(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "s.tar", members_of(jpeg_set(3)))
    files, *_ = list_shards(tmp_path, [path], 3)
    os.truncate(path, 2000)
    with pytest.raises(DamagedError, match=r"s\.tar/0002\.jpg: the file is truncated"):
        files.picture(2)


def test_members_that_point_elsewhere_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "secret.jpg").write_bytes(encode(picture(0)))
    with tarfile.open(tmp_path / "s.tar", "w") as archive:
        for kind, name in ((tarfile.SYMTYPE, "a.jpg"), (tarfile.LNKTYPE, "../b.jpg"), (tarfile.DIRTYPE, "c.jpg")):
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, str(tmp_path / "secret.jpg")
            archive.addfile(member)
        for name in ("../secret.jpg", "../secret.cls"):
            member = tarfile.TarInfo(name)
            member.size = 1
            archive.addfile(member, io.BytesIO(b"0"))
    assert listed(tmp_path / "s.tar") == (["s.tar/../secret.jpg"], [b"0"], [0])  # a name, not a place


@pytest.mark.timeout(20)
def test_only_regular_files_are_read_and_only_so_far(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    assert read_file(tmp_path / "link") == b"content"
    assert read_file(tmp_path / "link", 2, 3) == b"nte"
    os.mkfifo(tmp_path / "fifo")
    before = len(list(Path("/proc/self/fd").iterdir()))
    for path in (tmp_path, tmp_path / "fifo", Path("/dev/zero")):
        with pytest.raises(OSError, match="not a regular file"):
            read_file(path)
    os.truncate(tmp_path / "file", 2**40)
    with pytest.raises(OSError, match=r"1,099,511,627,776 bytes are more than the limit of 268,435,456"):
        read_file(tmp_path / "file")
    assert len(list(Path("/proc/self/fd").iterdir())) == before


@pytest.mark.parametrize("error", [KeyError("x"), RecursionError(), TypeError("a\nb"), OSError(5, "bad\x1b", "file")])
def test_whatever_goes_wrong_is_one_line_that_names_the_file(error: Exception) -> None:
    with pytest.raises(DamagedError, match=r"^file: .*; do this$") as caught, naming("file", "do this"):
        raise error
    assert str(caught.value).isprintable()


def test_a_lack_of_memory_is_no_damage() -> None:
    with pytest.raises(ValueError, match="file: not enough memory") as caught, naming("file"):
        raise MemoryError
    assert not isinstance(caught.value, DamagedError)
    check_memory(free_memory() // 2, "half", "none")
    with pytest.raises(ValueError, match=r"x: needs 1048576\.0 GiB of memory, and .* are free; use less"):
        check_memory(2**50, "x", "use less")


def table() -> dict[str, np.ndarray]:
    return {"numbers": np.arange(3)}


def never() -> dict[str, np.ndarray]:
    raise AssertionError("it should have been there")


@pytest.mark.parametrize("content", [None, b"", b"PK\x03\x04", b"garbage", b"\x80\x04N."])
def test_a_table_is_cached_and_built_again_if_it_is_damaged(cache: Path, content: bytes | None) -> None:
    cached("kind", "stamp", table)
    if content is not None:
        (file,) = cache.iterdir()
        file.write_bytes(content)
        cached("kind", "stamp", table)
    np.testing.assert_array_equal(cached("kind", "stamp", never)["numbers"], [0, 1, 2])


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("CONADV_CACHE", str(tmp_path / "file"))
    np.testing.assert_array_equal(cached("kind", "stamp", table)["numbers"], [0, 1, 2])
    monkeypatch.delenv("CONADV_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    cached("kind", "stamp", table)
    assert [path.parent for path in (tmp_path / "home").rglob("*.npz")] == [tmp_path / "home" / "conadv"]


def test_a_stamp_follows_path_size_and_time(tmp_path: Path) -> None:
    file, stamps = tmp_path / "a", []
    for content, time in ((b"x", 1), (b"xy", 1), (b"yx", 2)):
        file.write_bytes(content)
        os.utime(file, ns=(time, time))
        stamps.append(stamp_of([file]))
    stamps.append(stamp_of([file.rename(tmp_path / "b")]))
    assert len(set(stamps)) == 4
    assert stamp_of([str(tmp_path / "b")]) == stamps[-1]
