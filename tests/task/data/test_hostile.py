"""Inputs that once caused a traceback, a hang or exhausted memory now give a one-line error."""

from __future__ import annotations

import gzip
import io
import os
import resource
import socket
import struct
import tarfile
import threading
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from conadv.cli import main
from conadv.task.augment import augmentation
from conadv.task.data import Fit, Stream, evaluation_batches, open_data
from conadv.task.data.decode import open_picture
from conadv.task.data.inspection import inspect_data
from conadv.task.data.source import DamagedError
from task.data.hostile_formats import IMAGES, LABELS
from task.data.hostile_images import png_bytes
from task.data.samples import encode, jpeg_set, members_of, picture, write_folder, write_shards_by_hand, write_tar
from task.data.test_cifar import files_of, write_archive

ARRAYS = {
    "train_images": IMAGES,
    "train_labels": LABELS.astype(np.int64),
    "test_images": IMAGES[:3],
    "test_labels": LABELS[:3].astype(np.int64),
}


@pytest.fixture
def little_memory() -> Iterator[None]:
    """A gigabyte more than there is now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 2**30, hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def write_npy(root: Path, **changed: np.ndarray) -> Path:
    root.mkdir()
    for name, array in {**ARRAYS, **changed}.items():
        np.save(root / f"{name}.npy", array)
    return root


def refused(path: Path, message: str) -> None:
    """Opened or inspected, the data set is refused in one line."""
    for use in (lambda: open_data("path", path), lambda: inspect_data(path)):
        with pytest.raises(ValueError, match=message) as caught:
            use()
        assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    "header",
    [b'{"""', b"(" * 3000, b"-" * 3500 + b"1", b"{'descr': '|u1', 'fortran_order': False, 'shape': 5}", b"\0", b"{}"],
)
def test_a_numpy_header_that_cannot_be_parsed(tmp_path: Path, header: bytes) -> None:
    root = write_npy(tmp_path / "data")
    (root / "train_images.npy").write_bytes(b"\x93NUMPY\1\0" + struct.pack("<H", len(header)) + header + bytes(432))
    refused(root, r"train_images\.npy: damaged.*; write it again with numpy\.save")


def test_a_numpy_header_that_is_longer_than_the_file(tmp_path: Path, little_memory: None) -> None:
    root = write_npy(tmp_path / "data")
    (root / "train_images.npy").write_bytes(b"\x93NUMPY\2\0" + struct.pack("<I", 2**32 - 1) + b"{")
    refused(root, r"train_images\.npy: damaged: a header of 4,294,967,295 bytes")


def test_a_numpy_file_that_was_cut_off(tmp_path: Path) -> None:
    root = write_npy(tmp_path / "data")
    os.truncate(root / "train_images.npy", (root / "train_images.npy").stat().st_size - 1)
    refused(root, rf"train_images\.npy: damaged: fewer bytes than its header's {IMAGES.nbytes}; write it again")


@pytest.mark.parametrize("shape", ["(6, 1099511627776, 8)", "(99999999999999999999999, 9, 8)"])
def test_a_numpy_header_that_promises_terabytes(tmp_path: Path, shape: str, little_memory: None) -> None:
    root = write_npy(tmp_path / "data")
    header = f"{{'descr': '|u1', 'fortran_order': False, 'shape': {shape}}}".ljust(117).encode() + b"\n"
    (root / "train_images.npy").write_bytes(b"\x93NUMPY\1\0\x76\0" + header + bytes(432))
    refused(root, r"train_images\.npy: damaged: (fewer bytes|not the shape)")
    names = {name: io.BytesIO() for name in ARRAYS}
    for name, file in names.items():
        np.save(file, ARRAYS[name])
    names["train_images"] = io.BytesIO(b"\x93NUMPY\1\0\x76\0" + header + bytes(432))
    with zipfile.ZipFile(tmp_path / "data.npz", "w") as archive:
        for name, file in names.items():
            archive.writestr(f"{name}.npy", file.getvalue())
    refused(tmp_path / "data.npz", r"data\.npz: damaged: (train_images\.npy does not have|not the shape)")


def spoilt_npz(path: Path, place: int, value: int) -> Path:
    """Two bytes of the first entry in the directory of an archive exchanged, and in its local header."""
    np.savez(path, **ARRAYS)
    content = bytearray(path.read_bytes())
    for start in (content.index(b"PK\x01\x02") + place, content.index(b"PK\x03\x04") + place - 2):
        content[start : start + 2] = struct.pack("<H", value)
    path.write_bytes(content)
    return path


def test_an_encrypted_npz(tmp_path: Path) -> None:
    refused(spoilt_npz(tmp_path / "data.npz", 8, 1), r"data\.npz: damaged: train_images\.npy is encrypted, or")


def test_an_npz_of_an_unknown_compression(tmp_path: Path) -> None:
    refused(
        spoilt_npz(tmp_path / "data.npz", 10, 97), r"data\.npz: damaged: .* compressed in a way that NumPy does not"
    )


def deflated(*pieces: bytes | int) -> bytes:
    """A raw deflate stream of these pieces, a number being so many MiB of zeros, compressed once."""
    squeeze = zlib.compressobj(9, zlib.DEFLATED, -15)

    def flushed(data: bytes) -> bytes:
        return squeeze.compress(data) + squeeze.flush(zlib.Z_FULL_FLUSH)

    zeros = flushed(bytes(2**20))
    parts = [zeros * piece if isinstance(piece, int) else flushed(piece) for piece in pieces]
    return b"".join(parts) + squeeze.flush(zlib.Z_FINISH)


def test_a_deflate_bomb_in_an_npz(tmp_path: Path, little_memory: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three gigabytes of zeros in three megabytes."""
    monkeypatch.setattr("conadv.task.data.bounds.free_memory", lambda: 2**30, raising=False)
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "|u1", "fortran_order": False, "shape": (6, 2**19, 1000)})
    with zipfile.ZipFile(tmp_path / "data.npz", "w") as archive:
        archive.writestr("train_images.npy", deflated(header.getvalue(), 3000))
        for name in ("train_labels", "test_images", "test_labels"):
            file = io.BytesIO()
            np.save(file, ARRAYS[name])
            archive.writestr(f"{name}.npy", file.getvalue())
    content = bytearray((tmp_path / "data.npz").read_bytes())
    for mark, method, size in ((b"PK\x01\x02", 10, 24), (b"PK\x03\x04", 8, 22)):
        start = content.index(mark)
        content[start + method] = zipfile.ZIP_DEFLATED
        content[start + size : start + size + 4] = struct.pack("<I", len(header.getvalue()) + 3000 * 2**20)
    (tmp_path / "data.npz").write_bytes(content)
    refused(tmp_path / "data.npz", r"data\.npz: train_images\.npy: needs 2\.9 GiB of memory, and 1\.0 are free; save")


@pytest.mark.parametrize("name", ["train_labels", "test_labels"])
def test_a_scalar_in_place_of_labels(tmp_path: Path, name: str) -> None:
    root = write_npy(tmp_path / "data", **{name: np.array(3)})
    refused(root, r"labels are int64 of shape \(\): give one whole number per image")


def test_time_spans_in_place_of_labels(tmp_path: Path) -> None:
    refused(write_npy(tmp_path / "data", train_labels=np.zeros(6, "m8[s]")), "elements of type '<m8")


@pytest.mark.parametrize("shape", [(6, 0, 8), (6, 9, 0), (6, 9, 8, 0)])
def test_images_with_a_side_of_zero(tmp_path: Path, shape: tuple[int, ...]) -> None:
    empty = np.zeros(shape, np.uint8)
    refused(write_npy(tmp_path / "data", train_images=empty, test_images=empty[:3]), "an empty array of shape")


@pytest.mark.parametrize("largest", [2**60, 2**31])
def test_labels_that_would_make_as_many_classes(tmp_path: Path, largest: int, little_memory: None) -> None:
    root = write_npy(tmp_path / "data", train_labels=np.array([0, 1, 2, 0, 1, largest]))
    refused(root, f"label {largest}: more than 100,000 classes are not supported")


def test_a_tar_header_that_promises_terabytes(tmp_path: Path, little_memory: None) -> None:
    """A long name, which is read whole."""
    root = write_shards_by_hand(tmp_path, jpeg_set(4), jpeg_set(2))
    shard = root / "toy-train-0.tar"
    header = bytearray(tarfile.TarInfo("././@LongLink").tobuf(tarfile.GNU_FORMAT))
    header[156:157], header[124:136] = b"L", b"\x80" + (2**42).to_bytes(11, "big")
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    shard.write_bytes(bytes(header) + shard.read_bytes())
    os.truncate(shard, 2**43)
    with pytest.raises(
        ValueError, match=r"toy-train-0\.tar: the shard is truncated or not a tar file \(an extended header of 4,398"
    ):
        open_data("path", root)


@pytest.mark.timeout(30)
def test_a_sparse_map_that_never_ends(tmp_path: Path) -> None:
    """tarfile waits for a line break that the archive has not."""
    root = write_shards_by_hand(tmp_path, jpeg_set(4), jpeg_set(2))
    info = tarfile.TarInfo("0000.jpg")
    info.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.name": "0000.jpg"}
    info.pax_headers["GNU.sparse.realsize"] = "9"
    info.size = 512
    (root / "toy-train-0.tar").write_bytes(info.tobuf(tarfile.PAX_FORMAT) + b"9999\n".ljust(1536, b"\0"))
    assert len(open_data("path", root).train) == 2


def test_a_member_as_large_as_no_image(tmp_path: Path, little_memory: None) -> None:
    root = write_shards_by_hand(tmp_path, jpeg_set(2), jpeg_set(2))
    header = tarfile.TarInfo("9.jpg")
    header.size = 2**40
    label = write_tar(tmp_path / "label", [("9.cls", b"0")]).read_bytes()[:1024]
    shard = root / "toy-train-0.tar"
    shard.write_bytes(label + header.tobuf(tarfile.GNU_FORMAT))
    os.truncate(shard, 1536 + 2**40 + 1024)
    source = open_data("path", root).train
    with pytest.raises(DamagedError, match=r"9\.jpg: 1,099,511,627,776 bytes are more than the limit of 268,435,456"):
        source.image(0)


def test_an_archive_that_unpacks_to_more_than_cifar(tmp_path: Path, little_memory: None) -> None:
    pieces: list[bytes | int] = []
    for name in files_of("10-bin")[0]:
        info = tarfile.TarInfo(name)
        info.size = 2**28
        pieces += [info.tobuf(), 2**8]
    (tmp_path / "c.tar.gz").write_bytes(gzip.compress(b"")[:10] + deflated(*pieces, bytes(1024)) + bytes(8))
    with pytest.raises(
        ValueError, match=r"c\.tar\.gz: damaged archive: .* extends beyond the end of the archive; download it again"
    ):
        open_data("path", tmp_path / "c.tar.gz")


def test_a_pickle_that_asks_for_memory(tmp_path: Path, little_memory: None) -> None:
    """A place in the memory of the unpickler that lies 32 GB behind the first."""
    files = {**files_of("10-py")[0], "data_batch_1": b"\x80\x02Nr\xff\xff\xff\xff."}
    with pytest.raises(ValueError, match="data_batch_1 is damaged: no table of bytes"):
        open_data("path", write_archive(tmp_path / "c.tar.gz", files))


def fifo(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def listener(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.path.relpath(path) if len(str(path)) > 100 else str(path))


@pytest.mark.timeout(30)
@pytest.mark.parametrize("make", [fifo, device, listener])
@pytest.mark.parametrize("place", ["train/class0/x.jpg", "train.tar"])
def test_what_is_no_regular_file_is_not_opened(
    tmp_path: Path, make, place: str, little_memory: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    root = write_folder(tmp_path / "d", jpeg_set(4), jpeg_set(2))
    if "/" not in place:
        write_tar(root / "val.tar", members_of(jpeg_set(2)))
    make(root / place)
    with pytest.raises(ValueError, match=rf"{Path(place).name}.*not a regular file"):
        list(evaluation_batches(open_data("path", root).train, 1, Fit(8)))
    if "/" in place:
        assert [Path(problem.name).name for problem in inspect_data(root).damaged] == ["x.jpg"]


@pytest.mark.timeout(30)
@pytest.mark.parametrize("make", [fifo, device])
def test_the_path_itself_may_be_no_file(tmp_path: Path, make) -> None:
    make(tmp_path / "x.npz")
    refused(tmp_path / "x.npz", "neither a regular file nor a directory")


@pytest.mark.timeout(60)
def test_a_jpeg_of_thousands_of_scans(tmp_path: Path) -> None:
    data = encode(np.zeros((3000, 3000, 3), np.uint8), progressive=True)
    scan = data[data.rindex(b"\xff\xda") : -2]
    with pytest.raises(DamagedError, match=r"^x\.jpg: a JPEG of 5,0\d\d scans, which would take too long"):
        open_picture(data[:-2] + scan * 5_000 + data[-2:], 3, "x.jpg")
    with pytest.raises(DamagedError, match=r"a JPEG of 3\d\d scans"):
        open_picture(data[:-2] + scan * 300 + data[-2:], 3, "x.jpg").pixels()


def test_an_ordinary_progressive_jpeg_is_read() -> None:
    assert open_picture(encode(picture(0, 600, 800), progressive=True), 3, "x").pixels().shape == (600, 800, 3)


def test_images_just_below_the_limit_are_decoded_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes up to a gigabyte while it is decoded, whatever the number of threads."""
    from conadv.task.data import decode

    side = 9_459
    data = png_bytes((b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)), (b"IDAT", zlib.compress(b"")))
    inside, most = 0, 0

    def stand_in(*_: object) -> np.ndarray:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        threading.Event().wait(0.05)
        inside -= 1
        return np.broadcast_to(np.zeros((1, 1, 3), np.uint8), (side, side, 3))

    monkeypatch.setattr(decode, "_decode_any", stand_in)
    pictures = [open_picture(data, 3, f"{i}.png") for i in range(4)]
    threads = [threading.Thread(target=one.pixels) for one in pictures]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1


def test_a_chunk_that_would_not_fit_into_memory_is_refused_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("conadv.task.data.bounds.free_memory", lambda: 5_000_000, raising=False)
    data = open_data("path", write_folder(tmp_path, jpeg_set(4, height=700, width=700), jpeg_set(4)))
    message = r"4 images of 700 × 700 pixels at a time: needs 0\.0 GiB of memory.* lower the chunk size"
    with pytest.raises(ValueError, match=message):
        Stream(data.train, 4, 4, 0, augmentation("none")).chunk(0, 0)
    with pytest.raises(ValueError, match="lower the chunk size"):
        next(evaluation_batches(data.train, 4, Fit(7000)))
    with pytest.raises(ValueError, match="lower the chunk size"):
        Stream(data.train, 4, 4, 0, augmentation("resized-crop", 7000)).chunk(0, 0)


def test_out_of_memory_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    root = write_folder(tmp_path, jpeg_set(4), jpeg_set(2))

    def no_memory(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("conadv.task.data.decode._decode_jpeg", no_memory)
    monkeypatch.setattr("conadv.task.data.decode._decode_any", no_memory)
    assert main(["data", "inspect", str(root)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    with pytest.raises(ValueError, match="not enough memory to prepare images: lower chunk_size"):
        next(evaluation_batches(open_data("path", root).train, 4, Fit(8)))


def test_a_command_that_runs_out_of_memory_says_what_to_lower(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    def no_memory(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("conadv.task.data.inspection.inspect_data", no_memory)
    assert main(["data", "inspect", "x"]) == 1
    assert capsys.readouterr().err.startswith("error: out of memory: lower --chunk-size")


@pytest.mark.parametrize("name", ["a\nb.jpg", "\x1b[31m.jpg", "\udcff.jpg"])
def test_a_name_on_disk_cannot_break_the_line(tmp_path: Path, name: str, capsys) -> None:
    root = write_folder(tmp_path, jpeg_set(4), jpeg_set(2))
    (root / "train" / "class0" / name).write_bytes(b"no image")
    with pytest.raises(ValueError, match=r"not an image") as caught:
        list(evaluation_batches(open_data("path", root).train, 1, Fit(8)))
    assert str(caught.value).isprintable()
    assert main(["data", "inspect", str(root)]) == 0
    assert all(line.isprintable() for line in capsys.readouterr().out.splitlines())


def test_a_folder_that_may_not_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    root = write_folder(tmp_path, jpeg_set(4), jpeg_set(2))

    def forbidden(path: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("os.scandir", forbidden)
    assert main(["data", "inspect", str(root)]) == 2
    assert "Permission denied; check the path and its permissions" in capsys.readouterr().err


def test_an_archive_cannot_read_outside_itself(tmp_path: Path) -> None:
    """Members that point elsewhere, or whose names do, are what they hold and nothing else."""
    (tmp_path / "secret.jpg").write_bytes(encode(picture(0)))
    root = write_shards_by_hand(tmp_path / "d", jpeg_set(2), jpeg_set(2))
    with tarfile.open(root / "toy-train-0.tar", "w") as archive:
        for name, content in (("../secret.jpg", b"inside"), ("../secret.cls", b"0"), ("/secret2.jpg", b"inside")):
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
        link = tarfile.TarInfo("link.jpg")
        link.type, link.linkname = tarfile.SYMTYPE, str(tmp_path / "secret.jpg")
        archive.addfile(link)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ValueError, match=r"/secret2\.cls is missing"):
        open_data("path", root)
    assert [path for path in sorted(tmp_path.rglob("*")) if "a cache" not in str(path)] == [
        path for path in before if "a cache" not in str(path)
    ]
