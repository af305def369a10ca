"""From the bytes of an image file to pixels: bytes in RGB or grey, upright, whatever the file held.

Pillow decides what can be read. simplejpeg, where it is installed, decodes ordinary JPEGs faster; both stand on
libjpeg-turbo with its accurate transform and give the same pixels, so which one ran cannot be seen.
"""

from __future__ import annotations

from functools import partial
from io import BytesIO

import numpy as np
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from conadv.task.data.source import DamagedError, Picture, Pixels

try:
    import simplejpeg
except ImportError:  # the extra "fast"
    simplejpeg = None

# Formats that decode in this process; Pillow also knows some that start programs (EPS) or read other files.
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
EXTENSIONS = frozenset({"jpg", "jpeg", "png", "webp", "bmp", "gif", "tif", "tiff", "ppm", "pgm", "pbm", "pnm"})
# Pillow's own limit against files that are small and unpack to more than memory holds: 270 MB decoded.
MAX_PIXELS = 89_478_485
_JPEG_NOTE = 0xE1
_JPEG_IMAGE = (0xC0, 0xC1, 0xC2, 0xDA)  # markers of the frame and of its data


def open_picture(data: bytes, channels: int, name: str) -> Picture:
    """The image in these bytes of a file, to be decoded to 1 (grey) or 3 (RGB) channels."""
    plain = _plain_jpeg_size(data) if simplejpeg is not None else None
    height, width = plain or _size(data, name)
    if height * width > MAX_PIXELS:
        raise DamagedError(name, f"{width} × {height} pixels are more than the {MAX_PIXELS:,} that are decoded")
    return Picture(height, width, partial(_decode_jpeg if plain else _decode_any, data, channels, name))


def _plain_jpeg_size(data: bytes) -> tuple[int, int] | None:
    """Height and width of an upright JPEG in grey or YCbCr; None for everything else."""
    if not data.startswith(b"\xff\xd8\xff"):
        return None
    try:
        height, width, colour, _ = simplejpeg.decode_jpeg_header(data)
    except Exception:  # a form that it does not know, or bytes that are no JPEG after all: Pillow is the judge
        return None
    if colour not in ("YCbCr", "Gray") or (_has_exif(data) and _is_turned(data)):
        return None
    return height, width


def _has_exif(data: bytes) -> bool:
    """Whether one of the segments before the image is a note in the form of Exif."""
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
        return False  # Pillow will say what is wrong with it when it is decoded


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
    except Exception:  # damaged, or only odd: again
        return _decode_any(data, channels, name, shrink)
    return pixels


def _possible(shrink: int, height: int, width: int) -> int:
    """JPEG shrinks its blocks of 8 × 8 pixels; of an image smaller than that the decoders make different things."""
    return shrink if min(height, width) >= 8 else 1


def _size(data: bytes, name: str) -> tuple[int, int]:
    try:
        image = _open(data)
        width, height = image.size
        return (width, height) if _orientation(image) >= 5 else (height, width)
    except Exception as error:  # decoders fail in many ways on bytes that are not what they seem
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
    except Exception as error:
        raise DamagedError(name, _reason(error)) from error
    return pixels.reshape(*pixels.shape[:2], channels)


def _open(data: bytes) -> Image.Image:
    return Image.open(BytesIO(data), formats=FORMATS)


def _orientation(image: Image.Image) -> int:
    try:
        value = image.getexif().get(ExifTags.Base.Orientation, 1)
    except Exception:  # an unreadable note beside the pixels says nothing about them
        return 1
    return value if value in range(1, 9) else 1


def _eight_bits(image: Image.Image) -> Image.Image:
    """Modes that Pillow would cut off at 255 or warn about, made ordinary."""
    if image.mode.startswith("I;16"):
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise ValueError(f"pixels of mode {image.mode} have no range that would map to bytes")
    return image.convert("RGBA") if "transparency" in image.info else image


def _reason(error: Exception) -> str:
    if isinstance(error, Image.DecompressionBombError | Image.DecompressionBombWarning):
        return f"more than the {MAX_PIXELS:,} pixels that are decoded"
    if isinstance(error, UnidentifiedImageError):
        return "not an image of a known format"
    return str(error) or type(error).__name__
