"""Files are decoded to upright bytes in RGB or grey, or raise an error that names them; the decoders agree."""

from __future__ import annotations

import io
import struct
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from conadv.task.data import decode
from conadv.task.data.decode import open_picture
from conadv.task.data.source import DamagedError, Picture, naming
from task.data.samples import encode, picture


def opened(data: bytes, channels: int = 3) -> Picture:
    with naming("a.jpg"):
        return open_picture(data, channels, "a.jpg")


def read(data: bytes, channels: int = 3, shrink: int = 1) -> np.ndarray:
    found = opened(data, channels)
    pixels = found.pixels(shrink)
    assert pixels.dtype == np.uint8
    if shrink == 1:
        assert pixels.shape == (found.height, found.width, channels)
    return pixels


@pytest.fixture(params=["simplejpeg", "Pillow"])
def decoder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "Pillow":
        monkeypatch.setattr(decode, "simplejpeg", None)
    return request.param


@settings(max_examples=150, deadline=None)
@given(
    st.tuples(st.integers(1, 70), st.integers(1, 70)),
    st.sampled_from(["4:4:4", "4:2:2", "4:2:0"]),
    st.booleans(),
    st.integers(5, 100),
    st.sampled_from([1, 3]),
    st.sampled_from([1, 3]),
    st.sampled_from([1, 2, 4, 8]),
)
def test_both_decoders_give_the_same_pixels(
    size: tuple[int, int], sampling: str, progressive: bool, quality: int, stored: int, channels: int, shrink: int
) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (*size, stored), dtype=np.uint8)
    data = encode(noise, subsampling=sampling, progressive=progressive, quality=quality)
    fast = read(data, channels, shrink)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode, "simplejpeg", None)
        np.testing.assert_array_equal(fast, read(data, channels, shrink))


@pytest.mark.parametrize("shrink", [2, 4, 8])
def test_a_jpeg_shrinks_while_it_is_decoded(decoder: str, shrink: int) -> None:
    pixels = picture(1, 80, 120)
    small = read(encode(pixels, quality=95), shrink=shrink)
    assert small.shape == (80 // shrink, 120 // shrink, 3)
    means = pixels.reshape(80 // shrink, shrink, 120 // shrink, shrink, 3).mean(axis=(1, 3))
    assert np.abs(small - means).mean() < 3


@pytest.mark.parametrize("form", ["PNG", "BMP", "PPM", "TIFF", "WEBP"])
def test_lossless_formats_keep_their_pixels(form: str) -> None:
    pixels = picture(2)
    np.testing.assert_array_equal(read(encode(pixels, form, **({"lossless": True} if form == "WEBP" else {}))), pixels)


def test_grey_becomes_rgb_and_rgb_becomes_grey(decoder: str) -> None:
    grey = picture(3, channels=1)
    for form in ("PNG", "JPEG"):
        as_rgb, as_grey = read(encode(grey, form)), read(encode(grey, form), channels=1)
        np.testing.assert_array_equal(as_rgb, as_grey.repeat(3, axis=2))
    colour = picture(3)
    luma = colour @ np.array([0.299, 0.587, 0.114])
    for form in ("PNG", "JPEG"):
        assert np.abs(read(encode(colour, form), channels=1)[..., 0] - luma).mean() < 4


def test_cmyk_becomes_rgb(decoder: str) -> None:
    file = io.BytesIO()
    Image.fromarray(picture(4)).convert("CMYK").save(file, "JPEG", quality=95)
    assert np.abs(read(file.getvalue()).astype(int) - picture(4)).mean() < 5


def test_sixteen_bits_are_scaled_not_cut_off() -> None:
    values = np.linspace(0, 65535, 12 * 16).astype(np.uint16).reshape(12, 16)
    np.testing.assert_array_equal(read(encode(values, "PNG"), channels=1)[..., 0], values // 256)


def test_floats_have_no_range_and_are_refused() -> None:
    data = encode(np.linspace(0, 1, 12, dtype=np.float32).reshape(3, 4), "TIFF")
    with pytest.raises(DamagedError, match=r"a\.jpg: pixels of mode F"):
        read(data)


def test_palettes_and_transparency_become_rgb() -> None:
    image = Image.fromarray(picture(5)).quantize(7)
    expected = np.asarray(image.convert("RGB"))
    for options in ({}, {"transparency": b"\x00\x80\xff"}, {"transparency": 3}):
        file = io.BytesIO()
        image.save(file, "PNG", **options)
        np.testing.assert_array_equal(read(file.getvalue()), expected)
    rgba = np.dstack([picture(5), np.full((12, 16), 90, np.uint8)])
    np.testing.assert_array_equal(read(encode(rgba, "PNG")), picture(5))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_turned_photographs_are_set_upright(decoder: str, orientation: int) -> None:
    """The stored pixels are turned the other way here, by NumPy, so that the right answer is always the same."""
    upright = picture(6, 16, 32)
    stored = {
        1: upright,
        2: upright[:, ::-1],
        3: upright[::-1, ::-1],
        4: upright[::-1],
        5: upright.transpose(1, 0, 2),
        6: np.rot90(upright),
        7: upright[::-1, ::-1].transpose(1, 0, 2),
        8: np.rot90(upright, -1),
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encode(np.ascontiguousarray(stored), quality=95, subsampling=0, exif=exif)
    found = opened(data)
    assert (found.height, found.width) == (16, 32)
    assert np.abs(found.pixels(1).astype(int) - upright).mean() < 4
    assert found.pixels(2).shape == (8, 16, 3)


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
def test_a_note_that_is_unreadable_or_says_nothing_of_the_orientation_does_no_harm(decoder: str) -> None:
    upright = read(encode(picture(7)))
    named, odd = Image.Exif(), Image.Exif()
    named[0x010F], odd[0x0112] = "a camera", 9
    for exif in (named, odd, b"Exif\0\0II*\0\xff\xff\xff\xff"):
        np.testing.assert_array_equal(read(encode(picture(7), exif=exif)), upright)


def test_a_truncated_jpeg_or_what_is_no_image_is_damaged_with_its_name(decoder: str) -> None:
    whole = encode(picture(8, 100, 100))
    cut = [whole[:length] for length in (3, 300, len(whole) // 2, len(whole) * 9 // 10)]
    for data in (*cut, b"", b"\x89PNG\r\n\x1a\n", b"%!PS-Adobe-3.0 EPSF"):
        with pytest.raises(DamagedError, match=r"^a\.jpg: "):
            read(data)


def bomb(width: int, height: int) -> bytes:
    """A JPEG whose header promises this size."""
    data = bytearray(encode(picture(9)))
    place = data.index(b"\xff\xc0") + 5
    data[place : place + 4] = struct.pack(">HH", height, width)
    return bytes(data)


@pytest.mark.parametrize("size", [(50_000, 50_000), (9_460, 9_460)])
def test_a_bomb_is_not_decoded(decoder: str, size: tuple[int, int]) -> None:
    with pytest.raises(DamagedError, match=r"^a\.jpg: .*(89,478,485|89478485|178956970)"):
        opened(bomb(*size))


@pytest.mark.timeout(60)
def test_a_jpeg_of_very_many_scans_is_not_decoded() -> None:
    data = encode(np.zeros((3000, 3000, 3), np.uint8), progressive=True)
    scan = data[data.rindex(b"\xff\xda") : -2]
    with pytest.raises(DamagedError, match=r"^a\.jpg: a JPEG of so many scans that it would take too long"):
        opened(data[:-2] + scan * 300 + data[-2:])


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_damaged_bytes_give_pixels_or_an_error_and_nothing_else(data: st.DataObject) -> None:
    form = data.draw(st.sampled_from(["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM"]))
    content = bytearray(encode(picture(10), form))
    for _ in range(data.draw(st.integers(1, 8))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    with suppress(DamagedError):
        assert read(bytes(content)).ndim == 3
