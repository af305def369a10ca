"""Decode image files to pixels: bytes in RGB or grey, upright, whatever the format of the file.

Pillow decides what can be read. simplejpeg, if it is installed, decodes ordinary JPEGs faster. Both use libjpeg-turbo
with its accurate transform, and give the same pixels.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from io import BytesIO

import numpy as np
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from conadv.task.data.bounds import MAX_PIXELS
from conadv.task.data.source import DamagedError, Picture, Pixels

try:
    import simplejpeg
except ImportError:  # the extra "fast"
    simplejpeg = None

# Formats that are decoded in this process. Others of Pillow's start programs (EPS) or read other files.
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
EXTENSIONS = frozenset({"jpg", "jpeg", "png", "webp", "bmp", "gif", "tif", "tiff", "ppm", "pgm", "pbm", "pnm"})
# Each scan of a progressive JPEG goes over all pixels; ordinary files have at most a dozen.
MAX_SCANS = 500
_MAX_SCANNED = 20 * MAX_PIXELS
_JPEG_NOTE = 0xE1
_JPEG_IMAGE = (0xC0, 0xC1, 0xC2, 0xDA)  # markers of the frame and of its data


def open_picture(data: bytes, channels: int, name: str) -> Picture:
    """The image in the bytes of a file, with 1 (grey) or 3 (RGB) channels, not decoded yet."""
    plain = _plain_jpeg_size(data) if simplejpeg is not None else None
    height, width = plain or _size(data, name)
    if height * width > MAX_PIXELS:
        raise DamagedError(name, f"{width} × {height} pixels are more than the limit of {MAX_PIXELS:,}")
    if data.startswith(b"\xff\xd8"):
        _check_scans(data, height * width, name)
    decode = partial(_decode_jpeg if plain else _decode_any, data, channels, name)
    return Picture(height, width, partial(_decode_checked, decode, height, width, name))


def _check_scans(data: bytes, pixels: int, name: str) -> None:
    scans = data.count(b"\xff\xda")  # this pair of bytes cannot occur within the data of a scan
    if scans > MAX_SCANS or scans * pixels > _MAX_SCANNED:
        raise DamagedError(name, f"a JPEG of {scans:,} scans, which would take too long to decode; save it again")


class _Room:
    """A limit on the pixels that all threads decode at the same time: one image of the largest size, or many small."""

    def __init__(self, pixels: int) -> None:
        self._free, self._changed = pixels, threading.Condition()

    @contextmanager
    def taken(self, pixels: int) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: self._free >= pixels)
            self._free -= pixels
        try:
            yield
        finally:
            with self._changed:
                self._free += pixels
                self._changed.notify_all()


_ROOM = _Room(MAX_PIXELS)
_SMALL = 2**20  # pixels; smaller images need not wait for room


def _decode_checked(decode: Callable[[int], Pixels], height: int, width: int, name: str, shrink: int) -> Pixels:
    """Decode, and check that the pixels have the size in the header."""
    with _ROOM.taken(height * width) if height * width > _SMALL else nullcontext():
        try:
            pixels = decode(shrink)
        except MemoryError:  # the image is not at fault, and must not be cached as damaged
            raise MemoryError(f"{name}: not enough memory to decode {width} × {height} pixels") from None
    sizes = {(-(-height // factor), -(-width // factor)) for factor in (1, 2, 4, 8) if factor <= shrink}
    if pixels.shape[:2] not in sizes:
        raise DamagedError(name, "the decoded size differs from the one in its header")
    return pixels


def _plain_jpeg_size(data: bytes) -> tuple[int, int] | None:
    """Height and width of an upright JPEG in grey or YCbCr; None for everything else."""
    if not data.startswith(b"\xff\xd8\xff"):
        return None
    try:
        height, width, colour, _ = simplejpeg.decode_jpeg_header(data)
    except Exception:  # an unknown variant, or not a JPEG after all: let Pillow decide
        return None
    if colour not in ("YCbCr", "Gray") or (_has_exif(data) and _is_turned(data)):
        return None
    return height, width


def _has_exif(data: bytes) -> bool:
    """Whether one of the segments before the image is Exif metadata."""
    place = 2
    while place + 10 < len(data) and data[place] == 0xFF and data[place + 1] not in _JPEG_IMAGE:
        if data[place + 1] == _JPEG_NOTE and data[place + 4 : place + 10] == b"Exif\0\0":
            return True
        padding = data[place + 1] == 0xFF
        place += 1 if padding else 2 + int.from_bytes(data[place + 2 : place + 4], "big")
    return False


def _is_turned(data: bytes) -> bool:
    try:
        return _orientation(_open(data)) != 1
    except Exception:
        return False  # Pillow will report the problem when it decodes the image


def _decode_jpeg(data: bytes, channels: int, name: str, shrink: int) -> Pixels:
    height, width, _, _ = simplejpeg.decode_jpeg_header(data)
    shrink = _possible(shrink, height, width)
    try:
        pixels: Pixels = simplejpeg.decode_jpeg(
            data,
            "RGB" if channels == 3 else "GRAY",
            min_height=-(-height // shrink),
            min_width=-(-width // shrink),
        )
    except MemoryError:
        raise
    except Exception:  # damaged or just unusual: let Pillow decide
        return _decode_any(data, channels, name, shrink)
    return pixels


def _possible(shrink: int, height: int, width: int) -> int:
    """JPEG shrinks blocks of 8 × 8 pixels; for an image smaller than that, the decoders differ."""
    return shrink if min(height, width) >= 8 else 1


def _size(data: bytes, name: str) -> tuple[int, int]:
    try:
        image = _open(data)
        width, height = image.size
        return (width, height) if _orientation(image) >= 5 else (height, width)
    except Exception as error:  # decoders fail in many ways on damaged bytes
        raise DamagedError(name, _reason(error)) from error


def _decode_any(data: bytes, channels: int, name: str, shrink: int) -> Pixels:
    mode = "RGB" if channels == 3 else "L"
    try:
        image = _open(data)
        if image.format == "JPEG" and image.mode in ("RGB", "L"):
            shrink = _possible(shrink, image.height, image.width)
            image.draft(mode, (image.width // shrink, image.height // shrink))
        upright = ImageOps.exif_transpose(image) if _orientation(image) != 1 else image
        pixels = np.asarray(_eight_bits(upright).convert(mode))
    except MemoryError:
        raise
    except Exception as error:
        raise DamagedError(name, _reason(error)) from error
    return pixels.reshape(*pixels.shape[:2], channels)


def _open(data: bytes) -> Image.Image:
    return Image.open(BytesIO(data), formats=FORMATS)


def _orientation(image: Image.Image) -> int:
    try:
        value = image.getexif().get(ExifTags.Base.Orientation, 1)
    except Exception:  # damaged metadata says nothing about the pixels
        return 1
    return value if value in range(1, 9) else 1


def _eight_bits(image: Image.Image) -> Image.Image:
    """Convert modes that Pillow would clip at 255 or warn about."""
    if image.mode.startswith("I;16"):
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise ValueError(f"pixels of mode {image.mode} cannot be converted to bytes; save it with 8 or 16 bits")
    return image.convert("RGBA") if "transparency" in image.info else image


def _reason(error: Exception) -> str:
    if isinstance(error, Image.DecompressionBombError | Image.DecompressionBombWarning):
        return f"more than the limit of {MAX_PIXELS:,} pixels"
    if isinstance(error, UnidentifiedImageError):
        return "not an image of a known format"
    return str(error) or type(error).__name__
