"""Damaged and hostile data sets give one line within bounded memory and time, and execute nothing."""

from __future__ import annotations

import os
import resource
import tarfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from conadv.cli import main
from conadv.task.data import Fit, open_data
from conadv.task.data.inspection import inspect_data
from conadv.task.data.source import DamagedError
from conadv.task.stream import evaluation_batches
from faults.hostile import FORMATS, LABELS, build, exercise
from task.data.samples import jpeg_set, members_of, write_folder, write_shards_by_hand, write_tar

CASES = 80  # tools/faults/fuzz.py has as many as there is time for


@pytest.mark.timeout(120)
@pytest.mark.parametrize("group", range(len(FORMATS)), ids=list(FORMATS))
def test_a_hostile_data_set_is_read_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: int) -> None:
    for seed in range(group, CASES, len(FORMATS)):
        folder = tmp_path / str(seed)
        folder.mkdir()
        monkeypatch.setenv("CONADV_CACHE", str(folder / "cache"))
        kind, path = build(seed, folder)
        assert exercise(seed, path) in ("read", "refused"), f"seed {seed}: {kind}"


@pytest.fixture
def little_memory() -> Iterator[None]:
    """A gigabyte more than there is now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 2**30, hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def refused(path: Path, message: str) -> None:
    """Opened or inspected, the data set is refused in one line."""
    for use in (lambda: open_data("path", path), lambda: inspect_data(path)):
        with pytest.raises(ValueError, match=message) as caught:
            use()
        assert str(caught.value).isprintable()


def test_a_bomb_in_an_npz(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tens of megabytes of zeros in some ten kilobytes."""
    monkeypatch.setattr("conadv.memory.free_memory", lambda: 2**24)
    arrays = {"train_images": np.zeros((6, 2**11, 2**12), np.uint8), "train_labels": LABELS}
    np.savez_compressed(tmp_path / "data.npz", **arrays)
    refused(tmp_path / "data.npz", r"data\.npz: the arrays: needs 0\.0 GiB of memory, and 0\.0 are free; save the")


@pytest.mark.usefixtures("little_memory")
def test_a_tar_header_that_promises_terabytes(tmp_path: Path) -> None:
    """A long name, which tarfile would read whole; and an image."""
    root = write_shards_by_hand(tmp_path, jpeg_set(4), jpeg_set(2))
    shard = root / "toy-train-0.tar"
    header = bytearray(tarfile.TarInfo("././@LongLink").tobuf(tarfile.GNU_FORMAT))
    header[156:157], header[124:136] = b"L", b"\x80" + (2**42).to_bytes(11, "big")
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    shard.write_bytes(bytes(header) + shard.read_bytes())
    os.truncate(shard, 2**43)
    with pytest.raises(ValueError, match=r"toy-train-0\.tar: the shard is truncated or not a tar file \("):
        open_data("path", root)
    label = write_tar(tmp_path / "label", [("9.cls", b"0")]).read_bytes()[:1024]
    image = tarfile.TarInfo("9.jpg")
    image.size = 2**40
    shard.write_bytes(label + image.tobuf(tarfile.GNU_FORMAT))
    os.truncate(shard, 1536 + 2**40 + 1024)
    with pytest.raises(DamagedError, match=r"9\.jpg: 1,099,511,627,776 bytes are more than the limit of 268,435,456"):
        open_data("path", root).train.image(0)


@pytest.mark.timeout(30)
@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")], ids=["fifo", "device"])
@pytest.mark.parametrize("place", ["train/class0/x.jpg", "train.tar", "train_images.npy"])
@pytest.mark.usefixtures("little_memory")
def test_what_is_no_file_is_not_waited_for(tmp_path: Path, make, place: str) -> None:
    root = write_folder(tmp_path / "d", jpeg_set(4), jpeg_set(2))
    if place == "train.tar":
        write_tar(root / "val.tar", members_of(jpeg_set(2)))
    make(root / place)
    if place == "train_images.npy":  # not one of the arrays
        assert len(open_data("path", root).train) == 4
        return
    with pytest.raises(ValueError, match=rf"{Path(place).name}.*(not a regular file|Illegal seek|not an image)"):
        list(evaluation_batches(open_data("path", root).train, 1, Fit(8)))
    if "/" in place:
        assert [Path(problem["name"]).name for problem in inspect_data(root)["damaged"]] == ["x.jpg"]


@pytest.mark.parametrize("name", ["a\nb.jpg", "\x1b[31m.jpg", "\udcff.jpg"])
def test_a_name_on_disk_cannot_break_the_line(tmp_path: Path, name: str, capsys) -> None:
    root = write_folder(tmp_path, jpeg_set(4), jpeg_set(2))
    (root / "train" / "class0" / name).write_bytes(b"no image")
    with pytest.raises(ValueError, match=r"not an image") as caught:
        list(evaluation_batches(open_data("path", root).train, 1, Fit(8)))
    assert str(caught.value).isprintable()
    assert main(["data", "inspect", str(root)]) == 0
    assert all(line.isprintable() for line in capsys.readouterr().out.splitlines())
