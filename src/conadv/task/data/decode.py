"""Decode image files to pixels: bytes in RGB or grey, upright, whatever the format of the file.

Pillow decides what can be read. simplejpeg, if it is installed, decodes ordinary JPEGs faster. Both use libjpeg-turbo
with its accurate transform, and give the same pixels.
"""

from __future__ import annotations

from contextlib import suppress
from io import BytesIO

import numpy as np
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from conadv.task.data.source import Picture, Pixels, naming

try:
    import simplejpeg
except ImportError:  # the extra "fast"
    simplejpeg = None

# Formats that are decoded in this process. Others of Pillow's start programs (EPS) or read other files.
_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
EXTENSIONS = frozenset({"jpg", "jpeg", "png", "webp", "bmp", "gif", "tif", "tiff", "ppm", "pgm", "pbm", "pnm"})
_MODES = {1: "L", 3: "RGB"}
_MAX_PIXELS = 89_478_485  # of one image: Pillow's own limit, 270 MB decoded
_MAX_SCANNED = 20 * _MAX_PIXELS  # each scan of a progressive JPEG goes over all pixels; most have a dozen


def open_picture(data: bytes, channels: int, name: str) -> Picture:
    """The image in the bytes of a file, with 1 (grey) or 3 (RGB) channels, not decoded yet.

    A damaged one raises errors of any kind: call it within `naming`.
    """
    plain = _plain_jpeg_size(data)
    if plain:
        height, width = plain
    else:
        image = _open(data)
        height, width = image.size if _orientation(image) >= 5 else image.size[::-1]
    if height * width > _MAX_PIXELS:
        raise ValueError(f"{width} × {height} pixels are more than the limit of {_MAX_PIXELS:,}")
    if data.startswith(b"\xff\xd8") and data.count(b"\xff\xda") * height * width > _MAX_SCANNED:
        raise ValueError("a JPEG of so many scans that it would take too long to decode; save it again")

    def pixels(shrink: int) -> Pixels:
        # JPEG shrinks blocks of 8 × 8 pixels; for an image smaller than that, the decoders differ.
        shrink = shrink if min(height, width) >= 8 else 1
        with naming(name):
            decoded = _fast(data, channels, -(-height // shrink), -(-width // shrink)) if plain else None
            if decoded is not None:
                return decoded
            image = _open(data)
            if image.format == "JPEG" and image.mode in ("RGB", "L"):
                image.draft(_MODES[channels], (image.width // shrink, image.height // shrink))
            return pixels_of(ImageOps.exif_transpose(image) if _orientation(image) != 1 else image, channels)

    return Picture(height, width, pixels)


def _plain_jpeg_size(data: bytes) -> tuple[int, int] | None:
    """Height and width of an upright JPEG in grey or YCbCr, for simplejpeg; None for everything else."""
    if simplejpeg is None or not data.startswith(b"\xff\xd8\xff"):
        return None
    with suppress(Exception):  # an unknown variant, or not a JPEG after all: Pillow decides
        height, width, colour, _ = simplejpeg.decode_jpeg_header(data)
        notes = data[: data.find(b"\xff\xda")]  # what comes before the first scan
        if colour in ("YCbCr", "Gray") and (b"Exif\0\0" not in notes or _orientation(_open(data)) == 1):
            return height, width
    return None


def _fast(data: bytes, channels: int, height: int, width: int) -> Pixels | None:
    """Decode a JPEG to this size or more; None if it is damaged or just unusual: Pillow decides."""
    with suppress(Exception):
        colour = "RGB" if channels == 3 else "GRAY"
        pixels: Pixels = simplejpeg.decode_jpeg(data, colour, min_height=height, min_width=width)
        return pixels
    return None


def _open(data: bytes) -> Image.Image:
    try:
        return Image.open(BytesIO(data), formats=_FORMATS)
    except UnidentifiedImageError:
        raise ValueError("not an image of a known format") from None


def pixels_of(image: Image.Image, channels: int) -> Pixels:
    """A Pillow image of any mode as (H, W, channels) bytes."""
    if image.mode.startswith("I;16"):  # Pillow would clip at 255
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    elif image.mode in ("I", "F"):
        raise ValueError(f"pixels of mode {image.mode} cannot be converted to bytes; save it with 8 or 16 bits")
    elif "transparency" in image.info:  # Pillow would warn
        image = image.convert("RGBA")
    pixels = np.asarray(image.convert(_MODES[channels]))
    return pixels.reshape(*pixels.shape[:2], channels)


def _orientation(image: Image.Image) -> int:
    with suppress(Exception):  # damaged metadata says nothing about the pixels
        value = image.getexif().get(ExifTags.Base.Orientation, 1)
        return value if value in range(1, 9) else 1
    return 1
