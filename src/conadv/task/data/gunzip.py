"""A gzip reader with bounded memory, forward only. It reads one member, and nothing after it."""

from __future__ import annotations

import zlib
from io import FileIO

_PIECE = 2**16  # bytes
_GZIP = 31  # zlib's wbits for a gzip header and the largest window


class Gunzip:
    """The decompressed contents of a gzip file; damage raises OSError or EOFError."""

    def __init__(self, stored: FileIO) -> None:
        self._stored, self._inflate, self._place = stored, zlib.decompressobj(_GZIP), 0

    def read(self, size: int, /) -> bytes:
        """The next `size` bytes, or fewer at the end."""
        pieces = []
        while size and (piece := self._some(size)):
            pieces.append(piece)
            size -= len(piece)
        return b"".join(pieces)

    def readinto(self, buffer: memoryview, /) -> int:
        data = self._some(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def seek(self, offset: int, /) -> int:
        """Seek forward."""
        assert offset >= self._place
        while self._place < offset and self._some(min(_PIECE, offset - self._place)):
            pass
        return self._place

    def _some(self, size: int) -> bytes:
        """1 to `size` bytes, or none at the end."""
        while not self._inflate.eof:
            packed = self._inflate.unconsumed_tail or self._stored.read(_PIECE)
            if not packed:
                raise EOFError("the compressed file ends early")
            try:
                data = self._inflate.decompress(packed, size)
            except zlib.error as error:
                raise OSError(f"damaged gzip ({error})") from error
            if data:
                self._place += len(data)
                return data
        return b""
