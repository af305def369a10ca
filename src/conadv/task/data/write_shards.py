"""Rewrite any data set as tar shards, for fast random access without one file per image."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator
from pathlib import Path

from PIL import Image

from conadv.atomic import replacing
from conadv.task.data.encoded import Encoded
from conadv.task.data.source import DataSet, Source

_SUFFIX = {b"\xff\xd8\xff": "jpg", b"\x89PN": "png", b"RIF": "webp", b"GIF": "gif", b"BM": "bmp"}


def write_shards(data: DataSet, folder: Path, images_per_shard: int = 5_000) -> list[Path]:
    """Write tar shards, and return their paths. Encoded images keep their bytes, others become PNG."""
    if images_per_shard < 1:
        raise ValueError(f"{images_per_shard} images per shard: choose 1 or more")
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(folder / "classes.txt") as file:
        file.write("".join(f"{name}\n" for name in data.train.classes).encode())
    written = []
    for part, source in (("train", data.train), ("val", data.test)):
        for number, first in enumerate(range(0, len(source), images_per_shard)):
            indices = range(first, min(first + images_per_shard, len(source)))
            written.append(_write(folder / f"{part}-{number:06d}.tar", source, indices))
    return written


def _write(path: Path, source: Source, indices: range) -> Path:
    with replacing(path) as file, tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for name, content in _members(source, indices):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def _members(source: Source, indices: range) -> Iterator[tuple[str, bytes]]:
    for index in indices:
        content = source.encoded(index) if isinstance(source, Encoded) else _png(source, index)
        suffix = next((suffix for start, suffix in _SUFFIX.items() if content.startswith(start)), "png")
        yield f"{index:09d}.{suffix}", content
        yield f"{index:09d}.cls", str(source.labels[index]).encode()


def _png(source: Source, index: int) -> bytes:
    pixels = source.image(index)
    file = io.BytesIO()
    Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels).save(file, "PNG")
    return file.getvalue()
