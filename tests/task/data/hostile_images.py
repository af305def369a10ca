"""Image folders of every supported encoding, and ways to damage or abuse each."""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path
from random import Random

import numpy as np
from PIL import Image

from task.data.samples import encode, picture, write_folder

SIZES = (0, 1, 3, 7, 2**15, 2**16 - 1, 2**20, 2**31 - 1, 2**32 - 1, 2**40, 2**60)


def write_jpegs(random: Random, root: Path) -> Path:
    size = {"height": random.choice((1, 9, 60)), "width": random.choice((1, 9, 70))}
    options = {"progressive": random.random() < 0.5, "subsampling": random.choice(("4:4:4", "4:2:0"))}
    samples = [(encode(picture(i, **size), **options), i % 2) for i in range(4)]
    return write_folder(root, samples, samples)


def _one_image(random: Random, root: Path) -> Path:
    return random.choice(sorted(root.rglob("*.*")))


def jpeg_frame(random: Random, root: Path) -> None:
    """Another size, number of colours or sampling in the frame's header."""
    file = _one_image(random, root)
    content = bytearray(file.read_bytes())
    at = max(content.find(b"\xff\xc0"), content.find(b"\xff\xc2"))
    content[at + 5 : at + 9] = struct.pack(">HH", *(random.choice((0, 1, 50, 2_000, 9_000, 65_500)) for _ in range(2)))
    if random.random() < 0.3:
        content[at + 9 + random.randrange(8)] = random.randrange(256)
    file.write_bytes(content)


def jpeg_scans(random: Random, root: Path) -> None:
    """A progressive JPEG whose scans come again and again."""
    side = random.choice((16, 16, 400, 3000))
    data = encode(np.zeros((side, side, 3), np.uint8), progressive=True)
    last = data.rindex(b"\xff\xda")
    scan = data[last:-2]
    _one_image(random, root).write_bytes(data[:-2] + scan * random.choice((3, 400, 5_000, 30_000)) + data[-2:])


def jpeg_notes(random: Random, root: Path) -> None:
    """Exif of any orientation or shape, and comments without end."""
    data = encode(picture(1, 20, 30))
    tiff = (
        b"MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03" + random.choice(SIZES[:9]).to_bytes(4, "big") + struct.pack(">HH", 6, 0)
    )
    content = b"Exif\0\0" + random.choice((tiff, tiff[: random.randrange(20)], random.randbytes(60)))
    note = b"\xff\xe1" + struct.pack(">H", len(content) + 2) + content
    many = (b"\xff\xfe\0\x02" * 100_000, b"\xff" * 100_000, b"\xff\xe1\0\0" * 100)
    _one_image(random, root).write_bytes(data[:2] + random.choice((note, note, *many)) + data[2:])


def write_pngs(random: Random, root: Path) -> Path:
    mode = random.choice(("RGB", "L", "1", "P", "RGBA", "LA", "I;16"))
    samples = [(_encoded_as(mode, "PNG", i), i % 2) for i in range(4)]
    return write_folder(root, samples, samples)


def _encoded_as(mode: str, form: str, seed: int, **options: object) -> bytes:
    file = io.BytesIO()
    if mode == "I;16":
        Image.fromarray(picture(seed, 9, 12)[..., 0].astype(np.uint16)).save(file, form, **options)
    else:
        Image.fromarray(picture(seed, 9, 12)).convert(mode).save(file, form, **options)
    return file.getvalue()


def png_bytes(*pieces: tuple[bytes, bytes]) -> bytes:
    parts = (
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body)) for kind, body in pieces
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def png_pieces(random: Random, root: Path) -> None:
    """Right checksums around strange content."""
    sides = (0, 1, 12, 300, 9_000, 2**16, 2**31 - 1, 2**32 - 1)
    kinds = ((8, 2), (8, 0), (1, 0), (16, 6), (4, 3), (8, 3), (3, 7), (255, 255))
    width, height = random.choice(sides), random.choice(sides)
    header = struct.pack(">IIBBBBB", width, height, *random.choice(kinds), 0, 0, random.choice((0, 1, 7)))
    bomb = zlib.compress(bytes(random.choice((0, 100, 10**6, 5 * 10**7))), 1)
    extra = random.choice(
        (b"zTXt", b"iTXt", b"iCCP", b"tRNS", b"PLTE", b"acTL", b"eXIf", b"gAMA", b"cHRM", b"sRGB", b"fcTL", b"pHYs")
    )
    body = random.choice((b"a\0\0" + bomb, b"", random.randbytes(30), b"a\0\1\0\0\0" + bomb, bytes(768)))
    pieces = [(b"IHDR", header), (extra, body), (b"IDAT", bomb), (b"IEND", b"")]
    if random.random() < 0.2:
        random.shuffle(pieces)
    _one_image(random, root).write_bytes(png_bytes(*pieces))


def png_just_below(random: Random, root: Path) -> None:
    """Rarely, as large as an image may be: hundreds of megabytes from some thousand bytes."""
    side = 9_459 if random.random() < 0.08 else 1_000
    header = struct.pack(">IIBBBBB", side, side, *random.choice(((8, 2), (8, 6), (8, 0))), 0, 0, 0)
    body = zlib.compress(bytes(4 * side * side), 1)
    _one_image(random, root).write_bytes(png_bytes((b"IHDR", header), (b"IDAT", body), (b"IEND", b"")))


def write_images(random: Random, root: Path) -> Path:
    """The other formats that are decoded."""
    form, mode, options = random.choice(
        (
            ("GIF", "P", {}),
            ("WEBP", "RGB", {}),
            ("WEBP", "RGBA", {"lossless": True}),
            ("BMP", "RGB", {}),
            ("BMP", "1", {}),
            ("PPM", "RGB", {}),
            ("PPM", "L", {}),
            ("TIFF", "RGB", {}),
            ("TIFF", "RGB", {"compression": "tiff_deflate"}),
            ("TIFF", "RGB", {"compression": "jpeg"}),
            ("TIFF", "L", {"compression": "tiff_lzw"}),
            ("TIFF", "1", {"compression": "group4"}),
            ("TIFF", "I;16", {"compression": "packbits"}),
        )
    )
    samples = [(_encoded_as(mode, form, i, **options), i % 2) for i in range(4)]
    return write_folder(root, samples, samples)


def ppm_text(random: Random, root: Path) -> None:
    start = random.choice((b"P1", b"P2", b"P3", b"P5", b"P6", b"P7", b"Pf", b"P0CMYK"))
    numbers = b" ".join(str(random.choice((*SIZES[:6], 99_999))).encode() for _ in range(3))
    _one_image(random, root).write_bytes(
        start + b" " + numbers + b"\n" + random.choice((b"", b"1 " * 10_000, bytes(10**5)))
    )
