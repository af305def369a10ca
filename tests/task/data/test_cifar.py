"""CIFAR as its author packs it; a pickle that would call anything is refused."""

from __future__ import annotations

import io
import os
import pickle
import tarfile
from pathlib import Path

import numpy as np
import pytest

from conadv.task.data.cifar import find_cifar
from conadv.task.data.pickled import read_pickle

NAMES10 = [f"name{n}" for n in range(10)]
NAMES100 = [f"fine{n}" for n in range(100)]


def rows(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, 3072), dtype=np.uint8)


def pickled(value: object) -> bytes:
    return pickle.dumps(value, protocol=2)


def files_of(version: str) -> tuple[dict[str, bytes], np.ndarray, np.ndarray]:
    """The files of a small CIFAR, its training pixels and labels."""
    count = 4
    parts = [f"data_batch_{n}" for n in range(1, 6)] if "10-" in version else ["train"]
    classes = 10 if "10-" in version else 100
    files, pixels, labels = {}, [], []
    for number, part in enumerate([*parts, "test_batch" if classes == 10 else "test"]):
        table, label = rows(count, number), [(7 * number + i) % classes for i in range(count)]
        if version.endswith("bin"):
            coarse = np.full((count, 0 if classes == 10 else 1), 3, np.uint8)
            files[f"{part}.bin"] = np.hstack([coarse, np.array(label, np.uint8)[:, None], table]).tobytes()
        else:
            files[part] = pickled({b"data": table, b"labels" if classes == 10 else b"fine_labels": label, b"x": None})
        pixels.append(table)
        labels += label
    names = NAMES10 if classes == 10 else NAMES100
    if version.endswith("bin"):
        files["batches.meta.txt" if classes == 10 else "fine_label_names.txt"] = ("\n".join(names) + "\n\n").encode()
    else:
        key = b"label_names" if classes == 10 else b"fine_label_names"
        files["batches.meta" if classes == 10 else "meta"] = pickled({key: [name.encode() for name in names]})
    return files, np.concatenate(pixels[:-1]), np.array(labels[:-count])


def write_archive(path: Path, files: dict[str, bytes], folder: str = "cifar") -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(f"{folder}/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


@pytest.mark.parametrize("version", ["10-bin", "10-py", "100-bin", "100-py"])
@pytest.mark.parametrize("place", ["folder", "folder in a folder", "archive"])
def test_all_versions_are_read(tmp_path: Path, version: str, place: str) -> None:
    files, pixels, labels = files_of(version)
    path = tmp_path
    if place == "archive":
        path = write_archive(tmp_path / "cifar.tar.gz", files)
    else:
        folder = tmp_path / "batches" if place == "folder in a folder" else tmp_path
        folder.mkdir(exist_ok=True)
        for name, content in files.items():
            (folder / name).write_bytes(content)
    data = find_cifar(path)
    assert data is not None
    np.testing.assert_array_equal(data.train.labels, labels)
    np.testing.assert_array_equal(data.train.images[3, 2, 30], pixels[3].reshape(3, 32, 32)[:, 2, 30])
    np.testing.assert_array_equal(data.train.images.transpose(0, 3, 1, 2).reshape(len(pixels), -1), pixels)
    assert data.train.classes == tuple(NAMES10 if "10-" in version else NAMES100)
    assert len(data.test) == 4


def test_other_folders_and_files_are_no_cifar(tmp_path: Path) -> None:
    (tmp_path / "data_batch_1.bin").write_bytes(b"")
    assert find_cifar(tmp_path) is None
    assert find_cifar(tmp_path / "data_batch_1.bin") is None
    assert find_cifar(write_archive(tmp_path / "x.tar.gz", {"a": b"b"})) is None


@pytest.mark.parametrize("version", ["10-bin", "10-py", "100-bin", "100-py"])
def test_damaged_files_are_named(tmp_path: Path, version: str) -> None:
    files, _, _ = files_of(version)
    for name in files:
        damaged = {**files, name: files[name][: len(files[name]) // 2 + 1]}
        if name.endswith("txt"):
            continue
        with pytest.raises(ValueError, match=f"{name} is damaged.*download it again"):
            find_cifar(write_archive(tmp_path / "c.tar.gz", damaged))


def test_a_cut_archive_is_named(tmp_path: Path) -> None:
    path = write_archive(tmp_path / "c.tar.gz", files_of("10-bin")[0])
    path.write_bytes(path.read_bytes()[:30_000])
    with pytest.raises(ValueError, match=r"c\.tar\.gz: damaged archive"):
        find_cifar(path)


def test_too_few_names_for_the_labels_are_refused(tmp_path: Path) -> None:
    files, _, _ = files_of("10-bin")
    path = write_archive(tmp_path / "c.tar.gz", {**files, "batches.meta.txt": b"cat\ndog\n"})
    with pytest.raises(ValueError, match="the 2 classes are numbered 0 to 1"):
        find_cifar(path)


class Evil:
    def __init__(self, call: object, *arguments: object) -> None:
        self.call, self.arguments = call, arguments

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return self.call, self.arguments


@pytest.mark.parametrize(
    "value",
    [
        Evil(os.system, "touch harm"),
        Evil(eval, "1"),
        Evil(getattr, "x", "upper"),
        Evil(np.load, "x"),
        Evil(np.fromfile, "x"),
        Evil(np.dtype, "O"),
        np.array([Evil(os.system, "touch harm")], dtype=object),
        np.zeros(3),
        os.path.join,
    ],
)
@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
def test_a_pickle_that_would_call_something_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: object, protocol: int
) -> None:
    monkeypatch.chdir(tmp_path)
    data = pickle.dumps({b"data": value}, protocol=protocol)
    with pytest.raises(ValueError, match=r"it would|the instruction"):
        read_pickle(data)
    assert list(tmp_path.iterdir()) == []


# 60 tuples, each of the one before and once more of it: 480 bytes, which a hash or a text would go through 2**60 times.
NESTED = b")q\x00" + b"".join(b"h%ch%c\x86q%c" % (level, level, level + 1) for level in range(60))


@pytest.mark.parametrize(
    "use", [b"}h<Ns.", b"(h<Nd.", b"}(h<Nu.", b"h<h<\x93."], ids=["key", "table", "keys", "import"]
)
def test_a_pickle_that_would_keep_python_busy_for_ever_is_refused(use: bytes) -> None:
    with pytest.raises(ValueError, match=r"neither text nor a number|an import without a name"):
        read_pickle(b"\x80\x04" + NESTED + use)


def test_a_pickle_that_would_make_more_bytes_than_it_has_is_refused() -> None:
    """One text of 1,000 letters, encoded 9 times."""
    text = b"X\xe8\x03\x00\x00" + b"a" * 1000 + b"q\x00"
    again = b"c_codecs\nencode\nh\x00U\x06latin1\x86R"
    assert read_pickle(text + again + b".") == b"a" * 1000
    with pytest.raises(ValueError, match="more bytes than the file has"):
        read_pickle(text + again * 9 + b".")


def test_what_is_not_called_is_read() -> None:
    value = {b"a": [1, 2.5, None, b"x"], b"c": {b"d": (True, "text")}}
    assert read_pickle(pickled(value)) == value
    table = np.asfortranarray(rows(2, 0)[:, :7])
    np.testing.assert_array_equal(read_pickle(pickled(table)).array, table)


def test_an_array_whose_state_is_not_its_own_is_refused(tmp_path: Path) -> None:
    """A size that the bytes do not fill, a type that is no type, and an array that was never given its bytes."""
    start = b"\x80\x02cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
    kind = b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R"
    for state in (b"(K\x01K\x09\x85" + kind + b"\x89U\x02abtb.", b"(K\x01K\x02\x85N\x89U\x02abtb.", b"Nb."):
        with pytest.raises(ValueError, match=r"not of bytes|reshape"):
            read_pickle(start + state)
    files, _, _ = files_of("10-py")
    empty = pickled({b"labels": []})[:-1] + b"U\x04data" + start[2:] + b"s."
    with pytest.raises(ValueError, match="data_batch_1 is damaged"):
        find_cifar(write_archive(tmp_path / "c.tar.gz", {**files, "data_batch_1": empty}))


def test_the_python_2_form_of_an_array_is_read() -> None:
    """As in the real files: an array's bytes are a plain string, and names are those of numpy.core."""
    body = bytes(range(250, 256))
    data = (
        b"\x80\x02}q\x00U\x04dataq\x01cnumpy.core.multiarray\n_reconstruct\nq\x02cnumpy\nndarray\nq\x03K\x00\x85U\x01b\x87R"
        b"(K\x01K\x02K\x03\x86cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
        b"\x89U\x06" + body + b"tbs."
    )
    np.testing.assert_array_equal(read_pickle(data)[b"data"].array, [[250, 251, 252], [253, 254, 255]])
