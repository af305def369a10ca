"""Small valid data sets of every format, and for each format ways to damage or abuse it."""

from __future__ import annotations

import io
import pickle
import struct
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from random import Random

import numpy as np

from task.data import hostile_images as images
from task.data.hostile_images import SIZES
from task.data.samples import jpeg_set, members_of, write_folder, write_shards_by_hand, write_tar
from task.data.test_cifar import files_of, write_archive

TRAIN, TEST = jpeg_set(6, height=10, width=12), jpeg_set(2, height=10, width=12)
IMAGES, LABELS = np.arange(6 * 9 * 8, dtype=np.uint8).reshape(6, 9, 8), np.array([0, 1, 2, 0, 1, 2], np.uint8)


def _arrays(random: Random) -> dict[str, np.ndarray]:
    images = random.choice((IMAGES, IMAGES[..., None], np.stack([IMAGES] * 3, -1)))
    arrays = {"train_images": images, "train_labels": LABELS, "test_images": images[:3], "test_labels": LABELS[:3]}
    if random.random() < 0.5:
        return arrays
    odd = (
        np.zeros((), np.int64),
        np.zeros((6, 0, 8), np.uint8),
        np.zeros((0, 9, 8), np.uint8),
        np.full(6, 2**60),
        np.full(6, 2**64 - 1, np.uint64),
        np.full(6, -(2**63)),
        np.zeros(6, "m8[s]"),
        np.zeros(6, "S7"),
        np.zeros(6, [("a", "i4"), ("b", "u1")]),
        np.array([{}] * 6, object),
        np.zeros((6,) + (1,) * 20, np.uint8),
        np.zeros(6, complex),
        np.zeros(6, bool),
        np.zeros((6, 9, 8, 3), np.float16),
        np.asfortranarray(np.stack([IMAGES] * 3, -1)),
        np.zeros((6, 1, 1, 500), np.uint8),
    )
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
    shape = tuple(random.choice((*SIZES, -1, 2.5, True)) for _ in range(random.randrange(6)))
    descr = random.choice(("|u1", "<i8", "O", "V9999999", "|S1000000000", [("a", "|u1")], 3, None, ">f8", "<U99", "m8"))
    fields = {
        "descr": descr,
        "fortran_order": random.choice((True, False, 7)),
        "shape": random.choice((shape, 5, None)),
    }
    texts = (
        repr(fields),
        repr(fields)[: random.randrange(40)],
        "(" * 3000,
        "-" * 3000 + "1",
        "{" + "'a':{" * 300,
        '"""',
        "\0",
        "__import__('os')",
        "9" * 4000,
        " " * 60_000,
    )
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


def write_shards(random: Random, root: Path) -> Path:
    return write_shards_by_hand(root, TRAIN, TEST)


def _tar_header(random: Random) -> bytes:
    """One header with strange fields and, mostly, the right checksum."""
    name = random.choice(
        (b"a.jpg", b"../../etc/passwd.jpg", b"/etc/passwd.jpg", b"b.cls", b"\n\x1b.jpg", b"././@PaxHeader")
    )
    octal = (
        b"%011o\0" % random.choice((0, 5, 512, 8**10, 8**11 - 1)),
        b"-0000000001\0",
        b"99999999999\0",
        b"\xff" * 12,
    )
    binary = b"\x80" + random.choice(SIZES).to_bytes(11, "big")
    kind = random.choice(b"0\x001234567xgLKSVZ")
    header = bytearray(name.ljust(100, b"\0") + b"0000644\0" * 3 + random.choice((*octal, binary)) + b"0" * 11 + b"\0")
    header += b" " * 8 + bytes((kind,)) + b"/etc/hostname".ljust(100, b"\0")
    header += random.choice((b"ustar\x0000", b"ustar  \0")) + bytes(247)
    if kind == ord("S"):
        header[386:500], header[482] = b"1" * 114, 1
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header)


def _pax(random: Random) -> bytes:
    sparse = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.name": "a.jpg", "GNU.sparse.realsize": "9"}
    odd = (
        b"9999999999 path=a\n",
        b"0 path=a\n",
        b"-5 path=x\n",
        b"6 a=b\n" * 1000,
        b"path",
        b"12 size=10\0\n",
        b"11 size=-7\n",
    )
    records = random.choice(
        ({"path": "../x.jpg"}, {"size": "9" * 19}, {"size": "x"}, {"path": "a\0b.jpg"}, {"path": "y" * 10**5}, sparse)
    )
    text = b"".join(_record(key, value) for key, value in records.items())
    return random.choice((text, text, *odd))


def _record(key: str, value: str) -> bytes:
    body = f" {key}={value}\n".encode()
    length = len(body) + 1
    while len(str(length)) + len(body) != length:
        length = len(str(length)) + len(body)
    return str(length).encode() + body


def shard_headers(random: Random, root: Path) -> None:
    pieces = []
    for _ in range(random.randrange(1, 5)):
        header = bytearray(_tar_header(random))
        body = b""
        if random.random() < 0.5:
            body = _pax(random)
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
    files = files_of(random.choice(("10-bin", "10-py", "100-bin", "100-py")))[0]
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
    tables = (
        {b"data": rows, b"labels": loop},
        {b"data": rows, b"labels": [deep] * 4},
        {b"data": rows, b"labels": [2**60] * 4},
        {b"data": rows, b"labels": 3},
        {b"data": rows, b"labels": [2**70] * 4},
        {b"data": rows[:, :5], b"labels": [0] * 4},
        {b"data": rows.astype(float), b"labels": [0] * 4},
        {b"data": [rows], b"labels": [0]},
        [rows],
        7,
    )
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
    files = {**files_of("10-py")[0], random.choice(("data_batch_1", "test_batch", "batches.meta")): content}
    _write_cifar_files(path, files)


def cifar_bomb(random: Random, path: Path) -> None:
    files = files_of("10-bin")[0]
    files[random.choice(("other", "data_batch_1.bin"))] = bytes(random.choice((10**5, 10**6, 3 * 10**7)))
    if path.is_file():
        _write_cifar_files(path, files)


def _write_cifar_files(path: Path, files: dict[str, bytes]) -> None:
    if path.is_file():
        with tarfile.open(path, "w:gz", compresslevel=1) as archive:
            for name, content in files.items():
                member = tarfile.TarInfo(name)
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
        return
    for name, content in files.items():
        (path / name).write_bytes(content)


def write_tree(random: Random, root: Path) -> Path:
    write_folder(root, TRAIN, TEST)
    place = random.choice((root, root / "train", root / "train" / "class0"))
    match random.randrange(6):
        case 0:
            (place / "loop").symlink_to(place)
        case 1:
            (place / "deep").joinpath(*"abcdefgh" * 5).mkdir(parents=True)
        case 2:
            (place / "line\nbreak\x1b[0m").mkdir()
        case 3:
            (place / "dead").symlink_to("nowhere")
        case 4:
            (place / "more-train.tar").mkdir()
        case _:
            (place / "x.parquet").write_bytes(b"PAR1")
    return root


FORMATS: dict[str, Callable[[Random, Path], Path]] = {
    "npy": write_npy,
    "npz": write_npz,
    "shards": write_shards,
    "CIFAR": write_cifar,
    "JPEG": images.write_jpegs,
    "PNG": images.write_pngs,
    "images": images.write_images,
    "folder": write_tree,
}
STRUCTURES: dict[str, tuple[Callable[[Random, Path], None], ...]] = {
    "npy": (npy_damage,),
    "npz": (npz_damage,),
    "shards": (shard_headers, shard_headers, shard_labels),
    "CIFAR": (cifar_pickle, cifar_pickle, cifar_bomb),
    "JPEG": (images.jpeg_frame, images.jpeg_frame, images.jpeg_scans, images.jpeg_notes),
    "PNG": (images.png_pieces, images.png_pieces, images.png_pieces, images.png_just_below),
    "images": (images.ppm_text,),
}
