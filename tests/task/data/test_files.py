"""Encoded images on disk: folders, tar shards, single files, and the cache of what was found in them."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

import pytest

from conadv.task.data import Source
from conadv.task.data import files as files_module
from conadv.task.data.files import cached, find_folders, find_shards
from conadv.task.data.source import DamagedError, naming
from task.data.samples import encode, jpeg_set, members_of, picture, write_folder, write_tar


def contents(source: Source) -> list[bytes]:
    return [source.pictures.read(row) for row in source.rows]


def listed(folder: Path) -> tuple[list[str], list[bytes], list[int]]:
    """Names below the folder, contents and labels of its training images."""
    train = find_shards(folder, 3).parts[0]
    return list(train.pictures.names), contents(train), train.labels.tolist()


def problems_of(path: Path) -> dict[str, str]:
    found = find_shards(path.parent, 3)
    return {problem.name.removeprefix(str(path)).lstrip("/"): problem.reason for problem in found.problems}


def write_files(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(name.encode())


@pytest.mark.parametrize("test", ["val", "valid", "validation", "test"])
def test_a_folder_is_sorted_by_class_and_name(tmp_path: Path, test: str) -> None:
    assert find_folders(tmp_path, 3) is None
    write_files(tmp_path / "train", "b/2.jpg", "b/1.PNG", "a/sub/9.jpeg", "a/0.webp", "a/notes.txt", "a/.hidden.jpg")
    write_files(tmp_path / test, "b/1.jpg")
    (tmp_path / "train" / "c").mkdir()
    (train, other), problems = find_folders(tmp_path, 3)
    names = ["a/0.webp", "a/sub/9.jpeg", "b/1.PNG", "b/2.jpg"]
    assert [train.name(row) for row in range(4)] == [f"{tmp_path}/train/{name}" for name in names]
    assert contents(train) == [name.encode() for name in names]
    assert (train.classes, train.labels.tolist(), other.labels.tolist()) == (("a", "b", "c"), [0, 0, 1, 1], [1])
    assert [str(problem) for problem in problems] == [f"{tmp_path}/train/c: a class without images"]


def test_classes_are_folders_that_training_knows(tmp_path: Path) -> None:
    write_folder(tmp_path, jpeg_set(4), jpeg_set(2))
    (tmp_path / "val" / "zebra").mkdir()
    with pytest.raises(ValueError, match=r"val: .*train has no class 'zebra' \(1 such folders\)"):
        find_folders(tmp_path, 3)
    (tmp_path / "empty" / "train").mkdir(parents=True)
    with pytest.raises(ValueError, match="train: no class folders; put"):
        find_folders(tmp_path / "empty", 3)


def test_shards_are_read_at_random_in_the_order_in_which_they_are_stored(tmp_path: Path) -> None:
    samples = jpeg_set(7)
    for n in (0, 1):
        write_tar(tmp_path / f"train{n}.tar", members_of(samples[n::2], 10 * n))
    names, data, labels = listed(tmp_path)
    assert (data, labels) == tuple(map(list, zip(*samples[0::2], *samples[1::2], strict=True)))
    assert names[4] == "train1.tar/0010.jpg"


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_samples_may_lie_apart_have_long_names_and_other_members(tmp_path: Path, form: int) -> None:
    key = "k" * 90 if form == tarfile.USTAR_FORMAT else "schlüssel" * 30
    members = [("a/x.cls", b"1\n"), (f"{key}.jpg", b"red"), ("a/x.png", b"blue"), ("b.json", b"{}")]
    with tarfile.open(tmp_path / "train.tar", "w", format=form) as archive:
        for name, content in [*members, (f"{key}.cls", b"0")]:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    assert listed(tmp_path) == ([f"train.tar/{key}.jpg", "train.tar/a/x.png"], [b"red", b"blue"], [0, 1])
    assert problems_of(tmp_path / "train.tar") == {}


def test_an_index_is_built_once_and_again_when_the_shard_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = []
    index = files_module._index
    monkeypatch.setattr(files_module, "_index", lambda path: built.append(path) or index(path))
    path = write_tar(tmp_path / "train.tar", [*members_of(jpeg_set(3)), ("lost.jpg", b"x")])
    assert listed(tmp_path) == listed(tmp_path)
    assert problems_of(path) == {"lost.jpg": "lost.cls is missing"}
    assert built == [path]
    write_tar(path, members_of(jpeg_set(4)))
    assert len(listed(tmp_path)[0]) == 4
    os.utime(path, ns=(1, 1))
    listed(tmp_path)
    assert len(built) == 3


def test_what_is_wrong_in_a_shard_is_named(tmp_path: Path) -> None:
    first = jpeg_set(2)
    members = [*members_of(first), ("0001.png", b"another"), ("0001.cls", b"5"), ("a.jpg", b""), ("b.cls", b"0")]
    members += [("c.jpg", b"x"), ("c.cls", b"cat"), ("d.jpg", b"x"), ("d.cls", b"")]
    path = write_tar(tmp_path / "train.tar", members)
    assert problems_of(path) == {
        "0001.png": "the key 0001 occurs twice",
        "0001.cls": "the key 0001 occurs twice",
        "a.jpg": "a.cls is missing",
        "b.cls": "its image is missing",
        "c.cls": "b'cat' is not a class number",
        "c.jpg": "c.cls is missing",
        "d.cls": "b'' is not a class number",
        "d.jpg": "d.cls is missing",
    }
    assert listed(tmp_path)[1] == [data for data, _ in first]


@pytest.mark.parametrize("where", [0, 100, 700, 0.2, 0.4, 0.5])
def test_a_shard_cut_anywhere_is_named_and_its_whole_images_remain(tmp_path: Path, where: float) -> None:
    samples = jpeg_set(8)
    path = write_tar(tmp_path / "train.tar", members_of(samples))
    os.truncate(path, int(where * path.stat().st_size if 0 < where < 1 else where))
    assert problems_of(path)[""].startswith("the shard is truncated or not a tar file (")
    data = listed(tmp_path)[1]
    assert data == [data for data, _ in samples[: len(data)]]
    assert len(data) < 8


def test_a_shard_that_ends_without_its_mark_is_noticed(tmp_path: Path) -> None:
    part = write_tar(tmp_path / "part", members_of(jpeg_set(4)[:2]))
    path = write_tar(tmp_path / "train.tar", members_of(jpeg_set(4)))
    os.truncate(path, -(-len(part.read_bytes().rstrip(b"\0")) // 512) * 512)  # between two images
    assert "no end mark" in problems_of(path)[""]
    content = bytearray(write_tar(path, members_of(jpeg_set(6))).read_bytes())
    place = content.index(b"0003.jpg")
    content[place : place + 200] = b"\x55" * 200  # a damaged header, which tarfile takes for the end
    path.write_bytes(content)
    assert "no end mark" in problems_of(path)[""]
    assert len(listed(tmp_path)[0]) == 3


def test_members_that_point_elsewhere_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "secret.jpg").write_bytes(encode(picture(0)))
    with tarfile.open(tmp_path / "train.tar", "w") as archive:
        for kind, name in ((tarfile.SYMTYPE, "a.jpg"), (tarfile.LNKTYPE, "../b.jpg"), (tarfile.DIRTYPE, "c.jpg")):
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, str(tmp_path / "secret.jpg")
            archive.addfile(member)
        for name in ("../secret.jpg", "../secret.cls"):
            member = tarfile.TarInfo(name)
            member.size = 1
            archive.addfile(member, io.BytesIO(b"0"))
    assert listed(tmp_path) == (["train.tar/../secret.jpg"], [b"0"], [0])  # a name, not a place


@pytest.mark.parametrize("error", [KeyError("x"), RecursionError(), TypeError("a\nb"), OSError(5, "bad\x1b", "file")])
def test_whatever_goes_wrong_is_one_line_that_names_the_file(error: Exception) -> None:
    with pytest.raises(DamagedError, match=r"^file: .*; do this$") as caught, naming("file", "do this"):
        raise error
    assert str(caught.value).isprintable()


def test_a_lack_of_memory_is_no_damage() -> None:
    with pytest.raises(ValueError, match="file: not enough memory") as caught, naming("file"):
        raise MemoryError
    assert not isinstance(caught.value, DamagedError)


def never() -> list[int]:
    raise AssertionError("it should have been there")


@pytest.mark.parametrize("content", [None, b"", b"[1, 2", b"\xff\xfe\x00"])
def test_a_result_is_cached_and_made_again_if_it_is_damaged(cache: Path, content: bytes | None) -> None:
    cached("what", [], lambda: [1, 2, 3])
    if content is not None:
        (file,) = cache.iterdir()
        file.write_bytes(content)
        cached("what", [], lambda: [1, 2, 3])
    assert cached("what", [], never) == [1, 2, 3]


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("CONADV_CACHE", str(tmp_path / "file"))
    assert cached("what", [], lambda: [1]) == [1]
    monkeypatch.delenv("CONADV_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    cached("what", [], lambda: [1])
    assert [path.parent for path in (tmp_path / "home").rglob("*.json")] == [tmp_path / "home" / "conadv"]
