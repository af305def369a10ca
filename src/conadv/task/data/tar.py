"""The members of a tar archive: names, offsets and sizes. Nothing is unpacked, and every number is checked first.

Python's tarfile allocates as much memory as a header says, and can be made to loop. Here a header is 512 bytes,
extended headers (long names) are bounded, and a member must end within the archive.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

BLOCK = 512
_MAX_EXTENSION = 2**20  # bytes of a long name or of a pax header
_REGULAR = b"0\x007"
_WITHOUT_DATA = b"123456"  # links, devices, folders, FIFOs: no data follows, whatever their size field says
_SPARSE = b"S"
_ASCII = bytes(range(128))


class Seekable(Protocol):
    """An archive, decompressed if necessary."""

    def seek(self, offset: int, /) -> int: ...

    def read(self, size: int, /) -> bytes: ...


@dataclass(frozen=True)
class Member:
    """A regular file in an archive."""

    name: str
    offset: int
    """Where its bytes start in the archive."""
    size: int


class TarError(ValueError):
    """A damaged archive, or not an archive."""


def tar_members(file: Seekable, length: int, first: bytes | None = None) -> Iterator[Member]:
    """Yield the regular files of an archive in order, up to the block of zeros that ends it.

    Args:
        file: The archive. It is only sought forward, and a member may be read before the next one is requested.
        length: Size of the archive in bytes, or the largest number of bytes to read.
        first: The first block, if it was read already.
    """
    place, extension = 0, _Extension()
    while True:
        header = _Header.parse(first if place == 0 and first is not None else _block(file, place), place)
        if header is None:
            return
        data = place + BLOCK
        if header.kind == _SPARSE:
            data = _after_sparse_map(file, header, data)
        size = extension.size if extension.size is not None else header.size
        size = 0 if header.kind in _WITHOUT_DATA else size
        if data + size > length:
            raise TarError(f"{header.name[:100]} extends beyond the end of the archive")
        place = data + -(-size // BLOCK) * BLOCK
        if header.kind in b"xgLK":
            extension.read(file, header.kind, data, size)
            continue
        name = extension.name if extension.name is not None else header.name
        if header.kind in _REGULAR and not extension.sparse and not name.endswith("/"):
            yield Member(name, data, size)
        extension = _Extension()


def looks_like_tar(block: bytes) -> bool:
    """Whether these bytes are a header with a valid checksum."""
    try:
        return len(block) == BLOCK and _number(block[148:156]) in _checksums(block)
    except TarError:
        return False


@dataclass(frozen=True)
class _Header:
    name: str
    size: int
    kind: bytes
    block: bytes

    @staticmethod
    def parse(block: bytes, place: int) -> _Header | None:
        """The header in a block, or None for the end mark."""
        if len(block) == BLOCK and not any(block):
            return None
        if not looks_like_tar(block):
            raise TarError(f"no end mark at byte {place}")
        name, prefix = _text(block[:100]), _text(block[345:500])
        kind = block[156:157]
        if prefix and kind not in b"LKS":
            name = f"{prefix}/{name}"
        return _Header(name, _number(block[124:136]), kind, block)


class _Extension:
    """Extended headers before a member, which override its own."""

    def __init__(self) -> None:
        self.name: str | None = None
        self.size: int | None = None
        self.sparse = False

    def read(self, file: Seekable, kind: bytes, place: int, size: int) -> None:
        if size > _MAX_EXTENSION:
            raise TarError(f"an extended header of {size:,} bytes at byte {place}")
        file.seek(place)
        content = file.read(size)
        if kind == b"L":
            self.name = _text(content)
        elif kind == b"x":
            self._take(_pax_records(content))

    def _take(self, records: dict[str, str]) -> None:
        self.name = records.get("path", self.name)
        self.sparse = any(key.startswith("GNU.sparse.") for key in records)
        if "size" in records:
            if not records["size"].isdecimal() or len(records["size"]) > 20:
                raise TarError(f"a size of {records['size'][:30]!r}")
            self.size = int(records["size"])


def _pax_records(content: bytes) -> dict[str, str]:
    """Records of the form "LENGTH KEY=VALUE\\n", each with its own length in front."""
    records, place = {}, 0
    while place < len(content) and content[place] != 0:
        blank = content.find(b" ", place, place + 20)
        digits = content[place:blank]
        if blank < 0 or not digits.isdigit():
            raise TarError("a pax header that cannot be parsed")
        end = place + int(digits)
        key, equals, value = content[blank + 1 : end - 1].partition(b"=")
        if end <= blank + 1 or end > len(content) or not equals:
            raise TarError("a pax header that cannot be parsed")
        records[_text(key)] = _text(value)
        place = end
    return records


def _after_sparse_map(file: Seekable, header: _Header, place: int) -> int:
    """Offset of a sparse member's data: after the blocks that continue its map."""
    more = header.block[482]
    while more:
        block = _block(file, place)
        if len(block) < BLOCK:
            raise TarError("a sparse member extends beyond the end of the archive")
        more, place = block[504], place + BLOCK
    return place


def _block(file: Seekable, place: int) -> bytes:
    file.seek(place)
    return file.read(BLOCK)


def _checksums(block: bytes) -> tuple[int, int]:
    """Sum of a header's bytes, with blanks in place of the checksum, as unsigned and as signed bytes."""
    rest = block[:148] + b" " * 8 + block[156:]
    unsigned = sum(rest)
    return unsigned, unsigned - 256 * len(rest.translate(None, _ASCII))


def _number(field: bytes) -> int:
    """A number in octal digits, or, if it is large, as marked big-endian bytes."""
    if field[0] == 0x80:
        return int.from_bytes(field[1:], "big")
    digits = field.partition(b"\0")[0].strip()
    if not digits:
        return 0
    if not digits.isdigit() or b"8" in digits or b"9" in digits:
        raise TarError(f"a number of {field[:20]!r} in a header")
    return int(digits, 8)


def _text(field: bytes) -> str:
    return field.partition(b"\0")[0].decode("utf-8", "surrogateescape")
