"""Shards are read at random by an index that is built once, and everything wrong with them is named."""

from __future__ import annotations

import os
import tarfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from conadv.task.data import shards
from conadv.task.data.shards import list_shards
from conadv.task.data.source import DamagedError
from task.data.samples import encode, jpeg_set, members_of, picture, write_tar


def problems_of(path: Path) -> dict[str, str]:
    return {
        problem.name.removeprefix(str(path)).lstrip("/"): problem.reason for problem in list_shards([path]).problems
    }


def test_images_come_in_the_order_of_the_shards(tmp_path: Path) -> None:
    samples = jpeg_set(7)
    paths = [write_tar(tmp_path / f"{n}.tar", members_of(samples[n::2], 10 * n)) for n in (0, 1)]
    listing = list_shards(paths)
    assert [listing.read(i) for i in range(7)] == [data for data, _ in samples[0::2] + samples[1::2]]
    assert listing.labels.tolist() == [label for _, label in samples[0::2] + samples[1::2]]
    assert listing.names[4] == f"{paths[1]}/0010.jpg"
    assert listing.problems == ()


def test_samples_need_not_lie_together_and_may_have_other_members(tmp_path: Path) -> None:
    red, blue = encode(picture(1)), encode(picture(2), "PNG")
    members = [("a/x.cls", b"1\n"), ("b/x.jpg", red), ("a/x.png", blue), ("b/x.json", b"{}"), ("b/x.cls", b"0")]
    listing = list_shards([write_tar(tmp_path / "s.tar", members)])
    assert dict(zip(listing.names, listing.labels.tolist(), strict=True)) == {
        f"{tmp_path}/s.tar/b/x.jpg": 0,
        f"{tmp_path}/s.tar/a/x.png": 1,
    }
    assert listing.problems == ()


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_long_names_of_every_tar_format(tmp_path: Path, form: int) -> None:
    key = "k" * 90 if form == tarfile.USTAR_FORMAT else "schlüssel" * 30
    with tarfile.open(tmp_path / "s.tar", "w", format=form) as archive:
        for suffix, content in (("jpg", encode(picture(1))), ("cls", b"3")):
            (tmp_path / "member").write_bytes(content)
            archive.add(tmp_path / "member", f"{key}.{suffix}")
    listing = list_shards([tmp_path / "s.tar"])
    assert listing.read(0) == encode(picture(1))
    assert listing.names[0].endswith(f"{key}.jpg")


def test_the_index_is_built_once_and_again_when_the_shard_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    built = []
    scan = shards._scan
    monkeypatch.setattr(shards, "_scan", lambda path: built.append(path) or scan(path))
    path = write_tar(tmp_path / "s.tar", members_of(jpeg_set(3)))
    first, second = list_shards([path]), list_shards([path])
    assert built == [path]
    assert (first.names, first.labels.tolist()) == (second.names, second.labels.tolist())
    write_tar(path, members_of(jpeg_set(4)))
    assert len(list_shards([path]).names) == 4
    os.utime(path, ns=(1, 1))
    list_shards([path])
    assert len(built) == 3
    assert not any(file.suffix != ".npz" for file in cache.iterdir())


def test_problems_are_remembered_with_the_index(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "s.tar", [("a.jpg", b"x"), ("b.cls", b"0")])
    assert problems_of(path) == problems_of(path) == {"a.jpg": "a.cls is missing", "b.cls": "its image is missing"}


def test_duplicate_keys_are_named_and_the_first_is_kept(tmp_path: Path) -> None:
    members = [*members_of(jpeg_set(2)), ("0001.jpg", b"another"), ("0001.cls", b"5"), ("0001.png", b"third")]
    path = write_tar(tmp_path / "s.tar", members)
    assert set(problems_of(path)) == {"0001.jpg", "0001.cls", "0001.png"}
    assert all("the key 0001 occurs twice" in reason for reason in problems_of(path).values())
    assert list_shards([path]).read(1) == jpeg_set(2)[1][0]


def test_a_class_that_is_no_number_is_named(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "s.tar", [("a.jpg", b"x"), ("a.cls", b"cat"), ("b.jpg", b"y"), ("b.cls", b"")])
    assert problems_of(path)["a.cls"] == "b'cat' is not a class number"
    assert list_shards([path]).names == []


@pytest.mark.parametrize("where", [700, 0.2, 0.4, 0.5])
def test_a_shard_cut_in_the_middle_is_named_and_its_whole_images_remain(tmp_path: Path, where: float) -> None:
    samples = jpeg_set(8)
    path = write_tar(tmp_path / "s.tar", members_of(samples))
    content = path.read_bytes()
    content = content[: int(where * len(content)) if where < 1 else int(where)]
    path.write_bytes(content)
    listing = list_shards([path])
    assert listing.problems[-1].name == str(path) or listing.problems[0].name == str(path)
    assert any("truncated" in problem.reason for problem in listing.problems)
    assert [listing.read(i) for i in range(len(listing.names))] == [data for data, _ in samples[: len(listing.names)]]
    assert len(listing.names) < 8


def test_a_shard_cut_between_two_images_is_noticed(tmp_path: Path) -> None:
    samples = jpeg_set(4)
    whole, part = (write_tar(tmp_path / f"{n}.tar", members_of(samples[:n])) for n in (4, 2))
    kept = part.stat().st_size - 10240 + len(part.read_bytes()[-10240:].rstrip(b"\0"))
    whole.write_bytes(whole.read_bytes()[: -(-kept // 512) * 512])
    assert "no end mark" in problems_of(whole)[""]


def test_a_damaged_header_does_not_end_the_shard_in_silence(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "s.tar", members_of(jpeg_set(6)))
    content = bytearray(path.read_bytes())
    place = content.index(b"0003.jpg")
    content[place : place + 200] = b"\x55" * 200
    path.write_bytes(content)
    assert "no end mark" in problems_of(path)[""]
    assert len(list_shards([path]).names) == 3


@pytest.mark.parametrize("content", [b"", b"not a tar file", b"\0" * 100])
def test_what_is_no_shard_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "s.tar").write_bytes(content)
    assert "not a tar file" in problems_of(tmp_path / "s.tar")[""]


def test_a_shard_that_shrank_since_it_was_listed(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "s.tar", members_of(jpeg_set(3)))
    listing = list_shards([path])
    path.write_bytes(path.read_bytes()[:2000])
    source, _ = listing.source(("a", "b"), 3)
    with pytest.raises(DamagedError, match=r"0002\.jpg: s\.tar is truncated"):
        source.image(2)


def test_members_that_point_elsewhere_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "secret.jpg").write_bytes(encode(picture(0)))
    with tarfile.open(tmp_path / "s.tar", "w") as archive:
        for kind, name in ((tarfile.SYMTYPE, "a.jpg"), (tarfile.LNKTYPE, "../b.jpg"), (tarfile.DIRTYPE, "c.jpg")):
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, str(tmp_path / "secret.jpg")
            archive.addfile(member)
    assert list_shards([tmp_path / "s.tar"]).names == []


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.floats(0, 0.999), st.integers(0, 255)), min_size=1, max_size=30))
def test_a_damaged_shard_never_crashes(tmp_path: Path, changes: list[tuple[float, int]]) -> None:
    content = bytearray(write_tar(tmp_path / "s.tar", members_of(jpeg_set(3))).read_bytes())
    for place, value in changes:
        content[int(place * len(content))] = value
    (tmp_path / "s.tar").write_bytes(content)
    listing = list_shards([tmp_path / "s.tar"])
    assert len(listing.names) == len(listing.labels)
    assert all(isinstance(listing.read(index), bytes) for index in range(len(listing.names)))


def test_huge_and_negative_labels_do_not_become_classes(tmp_path: Path) -> None:
    members = [
        ("a.jpg", b"x"),
        ("a.cls", b"-1"),
        ("b.jpg", b"y"),
        ("b.cls", b"1"),
        ("c.jpg", b"z"),
        ("c.cls", b"9" * 9),
        ("d.jpg", b"z"),
        ("d.cls", b"9" * 30),
    ]
    listing = list_shards([write_tar(tmp_path / "s.tar", members)])
    source, problems = listing.source(("0", "1"), 3)
    assert (len(source), source.labels.tolist()) == (1, [1])
    reasons = " ".join(problem.reason for problem in problems)
    assert all(text in reasons for text in ("label -1,", "label 999999999,", "not a class number"))
