"""Members of an archive as Python's tarfile lists them, whatever program wrote it."""

from __future__ import annotations

import io
import tarfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conadv.task.data.tar import TarError, looks_like_tar, tar_members

KINDS = (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.FIFOTYPE)
NAMES = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=150)


def archive_of(members: list[tuple[str, bytes, bytes]], form: int) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=form) as archive:
        for name, kind, content in members:
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, "elsewhere"
            member.size = len(content) if member.isreg() else 0
            archive.addfile(member, io.BytesIO(content))
    return file.getvalue()


def listed(data: bytes) -> list[tuple[str, int, int]]:
    return [(member.name, member.offset, member.size) for member in tar_members(io.BytesIO(data), len(data))]


@given(
    st.lists(st.tuples(NAMES, st.sampled_from(KINDS), st.binary(max_size=1500)), max_size=6),
    st.sampled_from([tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]),
)
def test_members_are_those_that_tarfile_lists(members: list[tuple[str, bytes, bytes]], form: int) -> None:
    data = archive_of([(name.rstrip("/") or "x", kind, content) for name, kind, content in members], form)
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        expected = [(member.name, member.offset_data, member.size) for member in archive if member.isreg()]
    assert listed(data) == expected


def test_a_name_in_two_parts() -> None:
    name = f"{'folder/' * 20}{'x' * 80}.jpg"
    assert [member[0] for member in listed(archive_of([(name, tarfile.REGTYPE, b"1")], tarfile.USTAR_FORMAT))] == [name]


def test_large_sizes_are_read_as_binary_numbers() -> None:
    member = tarfile.TarInfo("a.jpg")
    member.size = 2**35
    header = member.tobuf(tarfile.GNU_FORMAT)
    found = next(tar_members(io.BytesIO(header), 2**36))
    assert (found.offset, found.size) == (512, 2**35)
    with pytest.raises(TarError, match=r"a\.jpg extends beyond the end of the archive"):
        next(tar_members(io.BytesIO(header), 2**34))


@pytest.mark.parametrize("content", [b"", b"x" * 512, b"\0" * 511])
def test_what_is_no_archive(content: bytes) -> None:
    assert not looks_like_tar(content)
    with pytest.raises(TarError, match="no end mark at byte 0"):
        listed(content)
