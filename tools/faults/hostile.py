"""Damaged and malicious data sets, each a function of a seed: `build` writes one, `exercise` uses it.

A case starts from a small healthy data set of some format. Then either one of its files is damaged as a disk or a
network would do it, or a part of the format is replaced by something that its author never meant.
"""

from __future__ import annotations

import gzip
import io
import os
import pickle
import shutil
import struct
import warnings
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from random import Random

import numpy as np
from PIL import Image

from conadv.task.augment import augmentation
from conadv.task.data import Fit, open_data
from conadv.task.data.open import inspect_data
from conadv.task.stream import Stream, evaluation_batches
from task.data.samples import (
    cifar,
    encode,
    jpeg_set,
    members_of,
    picture,
    write_archive,
    write_folder,
    write_shards_by_hand,
    write_tar,
)

EXTREMES = (0, 1, 2**7, 2**8 - 1, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**60, 2**63 - 1, 2**64 - 1)
TRAIN, TEST = jpeg_set(6, height=10, width=12), jpeg_set(2, height=10, width=12)
IMAGES, LABELS = np.arange(6 * 9 * 8, dtype=np.uint8).reshape(6, 9, 8), np.array([0, 1, 2, 0, 1, 2])


def build(seed: int, root: Path) -> tuple[str, Path]:
    """Write the data set of this seed below `root`: the name of its format, and its path."""
    random = Random(seed)
    name = list(FORMATS)[seed % len(FORMATS)]
    path = FORMATS[name](random, root / "data")
    structures = STRUCTURES.get(name)
    if structures and random.random() < 0.5:
        random.choice(structures)(random, path)
    for _ in range(random.choice((0, 1, 1, 1, 2)) if structures else 1):
        files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
        if files:
            random.choice(DAMAGES)(random, random.choice(files))
    return name, path


def exercise(seed: int, path: Path | str) -> str:
    """Train and look at the data set: "read", or "refused" where a ValueError of one line says why not."""
    random = Random(seed)
    augment = random.choice(("none", "crop-flip", "resized-crop", "autoaugment-imagenet"))
    size = random.choice((None, 8, 16))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return (
            "read" if all([_allowed(lambda: _train(path, augment, size)), _allowed(lambda: _look(path))]) else "refused"
        )


def _allowed(use: Callable[[], None]) -> bool:
    try:
        use()
    except ValueError as error:
        text = str(error)
        if not text.isprintable() or not text or len(text) > 5000:
            raise AssertionError(f"not one line: {text[:200]!r}") from error
        return False
    return True


def _train(path: Path | str, augment: str, size: int | None) -> None:
    data = open_data(None, path)
    stream = Stream(data.train, 1, 1, 0, augmentation(augment, size))
    for batch in stream.batches(0, min(4, len(data.train))):
        for _ in batch.chunks:
            pass
    for _ in evaluation_batches(data.test, 1, Fit(size), indices=range(min(2, len(data.test)))):
        pass


def _look(path: Path | str) -> None:
    inspect_data(path)


def _change(random: Random, file: Path, change: Callable[[bytearray], bytearray | None]) -> None:
    if file.stat().st_size > 10**9:
        return  # it is full of holes already
    content = bytearray(file.read_bytes())
    result = change(content)
    file.write_bytes(content if result is None else result)


def _place(random: Random, length: int) -> int:
    """More often near the ends, where headers and directories are."""
    place = random.choice((random.randrange(512), -random.randrange(1, 512), random.randrange(max(1, length))))
    return place % max(1, length)


def flip(random: Random, file: Path) -> None:
    def change(content: bytearray) -> None:
        for _ in range(random.choice((1, 1, 4, 30))):
            if content:
                content[_place(random, len(content))] = random.randrange(256)

    _change(random, file, change)


def number(random: Random, file: Path) -> None:
    """An extreme number somewhere."""

    def change(content: bytearray) -> None:
        width, order = random.choice((1, 2, 4, 8)), random.choice(("little", "big"))
        place = _place(random, len(content))
        value = random.choice(EXTREMES) & (2 ** (8 * width) - 1)
        content[place : place + width] = value.to_bytes(width, order)

    _change(random, file, change)


def cut(random: Random, file: Path) -> None:
    _change(random, file, lambda content: content[: random.randrange(len(content) + 1)])


def insert(random: Random, file: Path) -> None:
    def change(content: bytearray) -> None:
        place = _place(random, len(content))
        content[place:place] = random.randbytes(random.choice((1, 10, 1000)))

    _change(random, file, change)


def repeat(random: Random, file: Path) -> None:
    def change(content: bytearray) -> None:
        start = _place(random, len(content))
        part = content[start : start + random.randrange(1, 600)]
        place = _place(random, len(content))
        content[place : place + random.choice((0, len(part)))] = part

    _change(random, file, change)


def replace(random: Random, file: Path) -> None:
    """Something else under the name of the file."""
    other = (b"", b"\0" * 2000, random.randbytes(3000), jpeg_set(1)[0][0], gzip.compress(bytes(10**6)), b"PAR1" * 9)
    file.write_bytes(random.choice(other))


def huge(random: Random, file: Path) -> None:
    """A file with a terabyte of holes behind, or in place of, its content."""
    if random.random() < 0.5:
        file.write_bytes(b"")
    os.truncate(file, 2**40)


def special(random: Random, file: Path) -> None:
    """No regular file: to read it could block for ever, or never end."""
    file.unlink()
    match random.randrange(6):
        case 0:
            os.mkfifo(file)
        case 1:
            file.symlink_to("/dev/zero")
        case 2:
            file.symlink_to(file.name)
        case 3:
            file.mkdir()
        case 4:
            file.symlink_to("/dev/tty")
        case _:
            file.symlink_to("missing")


def missing(random: Random, file: Path) -> None:
    if random.random() < 0.5 or file.parent == file.parent.parent:
        file.unlink()
    else:
        shutil.rmtree(file.parent)


def rename(random: Random, file: Path) -> None:
    strange = ("a\nb", "\x1b[31m", "\udcff", "x" * 200, "..", "ü", " ")
    target = file.with_name(f"{random.choice(strange)}{file.name}")
    if len(target.name) < 250 and not target.exists():
        file.rename(target)


def note(random: Random, file: Path) -> None:
    """Names of classes beside the data."""
    folder = file.parent
    content = (b"a\n", b"\xff\xfe", b"", b"a\0b\n" * 5, b"x" * 100_000, b"\x1b[2J\n" * 20, b"\n" * 200_000)
    (folder / "classes.txt").write_bytes(random.choice(content))


DAMAGES = (*[flip, number] * 3, *[cut] * 2, insert, repeat, replace, huge, special, missing, rename, note)


# The formats, and for each what its author never meant.


def _arrays(random: Random) -> dict[str, np.ndarray]:
    images = random.choice((IMAGES, IMAGES[..., None], np.stack([IMAGES] * 3, -1)))
    arrays = {"train_images": images, "train_labels": LABELS, "test_images": images[:3], "test_labels": LABELS[:3]}
    if random.random() < 0.5:
        return arrays
    shapes = ((), (6, 0, 8), (0, 9, 8), (6, 9, 8, 3), (6,) + (1,) * 20, (6, 1, 1, 500))
    kinds = ("m8[s]", "S7", [("a", "i4"), ("b", "u1")], complex, bool, np.float16)
    numbers = (np.full(6, 2**60), np.full(6, 2**64 - 1, np.uint64), np.full(6, -(2**63)), np.array([{}] * 6, object))
    odd = (*(np.zeros(shape, np.uint8) for shape in shapes), *(np.zeros(6, kind) for kind in kinds), *numbers)
    return {**arrays, random.choice(list(arrays)): random.choice(odd)}


def write_npy(random: Random, root: Path) -> Path:
    root.mkdir()
    for name, array in _arrays(random).items():
        np.save(root / f"{name}.npy", array, allow_pickle=True)
    return root


def write_npz(random: Random, root: Path) -> Path:
    path = root.with_suffix(".npz")
    save = random.choice((np.savez, np.savez_compressed))
    save(path, **_arrays(random))
    return path


def npy_header(random: Random) -> bytes:
    """A header of random words, or a dictionary with one value exchanged."""
    shape = tuple(random.choice((*EXTREMES, -1, 2.5, True)) for _ in range(random.randrange(6)))
    descr = random.choice(("|u1", "<i8", "O", "V9999999", "|S1000000000", [("a", "|u1")], 3, None, ">f8", "<U99", "m8"))
    fields = {"descr": descr, "fortran_order": random.choice((True, False, 7)), "shape": random.choice((shape, 5))}
    texts = [repr(fields), repr(fields)[: random.randrange(40)], "(" * 3000, "-" * 3000 + "1", "{" + "'a':{" * 300]
    texts += ['"""', "\0", "__import__('os')", "9" * 4000, " " * 60_000]
    text = random.choice((texts[0], texts[0], *texts)).encode("latin1") + b"\n"
    version = random.choice((1, 1, 2, 3, 9))
    length = random.choice((len(text), len(text), 0, 2**16 - 1, 2**32 - 1))
    packed = struct.pack("<H", length % 2**16) if version == 1 else struct.pack("<I", length)
    return b"\x93NUMPY" + bytes((version, 0)) + packed + text


def npy_damage(random: Random, root: Path) -> None:
    file = random.choice(sorted(root.iterdir()))
    file.write_bytes(npy_header(random) + bytes(random.choice((0, 432, 5000))))


def npz_damage(random: Random, path: Path) -> None:
    names = ("train_images", "train_labels", "test_images", "test_labels")
    chosen = random.choice(names)
    method = random.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA))
    with zipfile.ZipFile(path, "w", method) as archive:
        for name in names:
            content = io.BytesIO()
            np.save(content, IMAGES if "images" in name else LABELS)
            data = content.getvalue()
            if name == chosen:
                bomb = data[:128].replace(b"(6, 9, 8)", b"(99999, 9, 8)") + bytes(99_999 * 72)
                data = random.choice((npy_header(random), bomb, data))
            archive.writestr(f"{name}.npy", data)
    content = bytearray(path.read_bytes())
    for mark, place in ((b"PK\x01\x02", random.choice((8, 10, 20, 24, 28, 42))), (b"PK\x03\x04", 6)):
        if random.random() < 0.6:
            at = content.index(mark) + place
            content[at : at + 2] = struct.pack("<H", random.choice((1, 9, 97, 2**15, 2**16 - 1)))
    path.write_bytes(content)


def _tar_header(random: Random) -> bytes:
    """One header with strange fields and, mostly, the right checksum."""
    name = random.choice(
        (b"a.jpg", b"../../etc/passwd.jpg", b"/etc/passwd.jpg", b"b.cls", b"\n\x1b.jpg", b"././@PaxHeader")
    )
    sizes = (
        b"%011o\0" % random.choice((0, 5, 512, 8**10, 8**11 - 1)),
        b"-0000000001\0",
        b"99999999999\0",
        b"\xff" * 12,
    )
    binary = b"\x80" + random.choice(EXTREMES).to_bytes(11, "big")
    kind = random.choice(b"0\x001234567xgLKSVZ")
    header = bytearray(name.ljust(100, b"\0") + b"0000644\0" * 3 + random.choice((*sizes, binary)) + b"0" * 11 + b"\0")
    header += b" " * 8 + bytes((kind,)) + b"/etc/hostname".ljust(100, b"\0")
    header += random.choice((b"ustar\x0000", b"ustar  \0")) + bytes(247)
    if kind == ord("S"):
        header[386:500], header[482] = b"1" * 114, 1
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header)


def shard_headers(random: Random, root: Path) -> None:
    pieces = []
    for _ in range(random.randrange(1, 5)):
        header = bytearray(_tar_header(random))
        body = b""
        if random.random() < 0.5:
            body = random.choice(
                (b"9999999999 path=a\n", b"0 path=a\n", b"6 a=b\n" * 1000, b"11 size=-7\n", b"22 GNU.sparse.major=1\n")
            )
            header[156], header[124:136] = random.choice(b"xgL"), b"%011o\0" % len(body)
            header[148:156] = b" " * 8
            header[148:156] = b"%06o\0 " % sum(header)
        pieces.append(bytes(header) + body + bytes(-len(body) % 512))
    whole = (root / "toy-train-0.tar").read_bytes()
    (root / "toy-train-0.tar").write_bytes(b"".join(pieces) + whole)


def shard_labels(random: Random, root: Path) -> None:
    odd = (b"", b"-1", b"99999", b"999999999", b"9" * 40, b"cat", b"\xff", b"1_0", b" 1 ", "²".encode(), b"0" * 10_000)
    members = [(name, random.choice(odd) if name.endswith("cls") else data) for name, data in members_of(TRAIN)]
    write_tar(root / "toy-train-0.tar", members)


def write_cifar(random: Random, root: Path) -> Path:
    files = cifar(random.choice((10, 100)))[0]
    if random.random() < 0.5:
        return write_archive(root.with_suffix(".tar.gz"), files)
    root.mkdir()
    for name, content in files.items():
        (root / name).write_bytes(content)
    return root


def cifar_pickle(random: Random, path: Path) -> None:
    loop: list[object] = []
    loop.append(loop)
    deep: object = 0
    for _ in range(40):
        deep = [deep, deep]
    rows = np.zeros((4, 3072), np.uint8)
    labels = (loop, [deep] * 4, [2**60] * 4, 3, [2**70] * 4)
    tables = [{b"data": rows, b"labels": one} for one in labels]
    tables += [{b"data": one, b"labels": [0] * 4} for one in (rows[:, :5], rows.astype(float), [rows])]
    protocol = random.choice((2, 2, 0, 4, 5))
    raw = (
        b"\x80\x02r\xff\xff\xff\xff.",
        b"\x80\x02Nr\xff\xff\xff\x7f.",
        b"\x80\x04\x8e" + b"\xff" * 7 + b"\x7f.",
        b"\x80\x04\x95" + b"\xff" * 7 + b"\x7f.",
        b"(" * 100_000,
        b"\x80\x02]" + b"a" * 1000,
        b"\x80\x02cos\nsystem\nU\x02ls\x85R.",
        b"I" + b"9" * 100_000 + b"\n.",
    )
    content = random.choice((pickle.dumps(random.choice(tables), protocol=protocol), random.choice(raw)))
    files = {**cifar(10)[0], random.choice(("data_batch_1", "test_batch", "batches.meta")): content}
    if path.is_file():
        write_archive(path, files)
    else:
        for name, content in files.items():
            (path / name).write_bytes(content)


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
        b"MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03"
        + random.choice(EXTREMES[:9]).to_bytes(4, "big")
        + struct.pack(">HH", 6, 0)
    )
    content = b"Exif\0\0" + random.choice((tiff, tiff[: random.randrange(20)], random.randbytes(60)))
    note = b"\xff\xe1" + struct.pack(">H", len(content) + 2) + content
    many = (b"\xff\xfe\0\x02" * 100_000, b"\xff" * 100_000, b"\xff\xe1\0\0" * 100)
    _one_image(random, root).write_bytes(data[:2] + random.choice((note, note, *many)) + data[2:])


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


def write_images(random: Random, root: Path) -> Path:
    """The other formats that are decoded."""
    plain = ("GIF P", "WEBP RGB", "WEBP RGBA", "BMP RGB", "BMP 1", "PPM RGB", "PPM L", "PNG L", "PNG P", "PNG I;16")
    tiff = ("RGB tiff_deflate", "RGB jpeg", "L tiff_lzw", "1 group4", "I;16 packbits")
    form, mode, *packed = random.choice((*plain, *(f"TIFF {kind}" for kind in tiff))).split()
    options = {"compression": packed[0]} if packed else {}
    samples = [(_encoded_as(mode, form, i, **options), i % 2) for i in range(4)]
    return write_folder(root, samples, samples)


def write_tree(random: Random, root: Path) -> Path:
    write_folder(root, TRAIN, TEST)
    place = random.choice((root, root / "train", root / "train" / "class0"))
    makers = (
        lambda: (place / "loop").symlink_to(place),
        lambda: (place / "deep").joinpath(*"abcdefgh" * 5).mkdir(parents=True),
        lambda: (place / "line\nbreak\x1b[0m").mkdir(),
        lambda: (place / "dead").symlink_to("nowhere"),
        lambda: (place / "more-train.tar").mkdir(),
        lambda: (place / "x.tar").write_bytes(b"PAR1"),
    )
    random.choice(makers)()
    return root


FORMATS: dict[str, Callable[[Random, Path], Path]] = {
    "npy": write_npy,
    "npz": write_npz,
    "shards": lambda random, root: write_shards_by_hand(root, TRAIN, TEST),
    "CIFAR": write_cifar,
    "JPEG": write_jpegs,
    "PNG": write_images,
    "images": write_images,
    "folder": write_tree,
}
STRUCTURES: dict[str, tuple[Callable[[Random, Path], None], ...]] = {
    "npy": (npy_damage,),
    "npz": (npz_damage,),
    "shards": (shard_headers, shard_headers, shard_labels),
    "CIFAR": (cifar_pickle,),
    "JPEG": (jpeg_frame, jpeg_frame, jpeg_scans, jpeg_notes),
    "PNG": (png_pieces,),
}
