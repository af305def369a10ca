"""Images as arrays: NumPy's files, and CIFAR's, whose pickles are read without executing anything."""

from __future__ import annotations

import io
import os
import pickle
import tarfile
from pathlib import Path

import numpy as np
import pytest

from conadv.task.data import open_data
from conadv.task.data.cifar import _unpickled, find_cifar
from conadv.task.data.source import Arrays, Source

ARRAYS = {
    "train_images": np.arange(4 * 3 * 2 * 3, dtype=np.uint8).reshape(4, 3, 2, 3),
    "train_labels": np.array([0, 1, 2, 1]),
    "test_images": np.arange(2 * 3 * 2 * 3, dtype=np.uint8).reshape(2, 3, 2, 3),
    "test_labels": np.array([1, 0], np.uint8),
}
KERAS = {"train_images": "x_train", "train_labels": "y_train", "test_images": "x_test", "test_labels": "y_test"}
BOTH = pytest.mark.parametrize("name", ["folder", "file.npz"])


def write(path: Path, **changed: np.ndarray) -> Path:
    arrays = {**ARRAYS, **changed}
    if path.suffix == ".npz":
        np.savez(path, **arrays)
        return path
    path.mkdir()
    for name, array in arrays.items():
        np.save(path / f"{name}.npy", array)
    return path


@BOTH
def test_numpy_files_are_read(tmp_path: Path, name: str) -> None:
    data = open_data("path", write(tmp_path / name))
    np.testing.assert_array_equal(data.train.images, ARRAYS["train_images"])
    np.testing.assert_array_equal(data.test.labels, [1, 0])
    assert (data.train.classes, data.name, data.train.name(2)) == (("0", "1", "2"), Path(name).stem, "image 2")


def test_grey_images_and_labels_in_a_column_as_keras_has_them(tmp_path: Path) -> None:
    arrays = {KERAS[name]: array[..., 0] if array.ndim == 4 else array[:, None] for name, array in ARRAYS.items()}
    np.savez_compressed(tmp_path / "k.npz", **arrays)
    data = open_data("path", tmp_path / "k.npz")
    assert data.train.images.shape == (4, 3, 2, 1)
    assert data.train.labels.tolist() == [0, 1, 2, 1]


def test_names_of_classes_bound_the_labels(tmp_path: Path) -> None:
    folder = write(tmp_path / "folder")
    (folder / "classes.txt").write_text("a\nb\nkrähe\nd\n", "utf-8")
    assert open_data("path", folder).train.classes == ("a", "b", "krähe", "d")
    (folder / "classes.txt").write_text("a\nb\n")
    with pytest.raises(ValueError, match="image 2 has label 2, but the 2 classes are numbered 0 to 1"):
        open_data("path", folder)


@BOTH
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"train_images": ARRAYS["train_images"].astype(np.float32)}, "images are float32"),
        ({"train_images": ARRAYS["train_images"][:3]}, "3 images have labels of shape"),
        ({"train_images": np.zeros((4, 3, 0, 3), np.uint8)}, r"\(4, 3, 0, 3\)|mmap|empty"),
        ({"train_labels": np.array([0.0, 1, 2, 1])}, "labels are float64"),
        ({"train_labels": np.array([0, -1, 2, 1])}, "image 1 has label -1"),
        ({"train_labels": np.array([0, 1, 2, 2**60])}, "more than 100,000 classes"),
        ({"train_labels": np.array(3)}, "labels of shape"),
        ({"train_images": np.array([{}] * 4, dtype=object)}, "pickle|Python objects"),
    ],
)
def test_wrong_arrays_are_refused(tmp_path: Path, name: str, changed: dict[str, np.ndarray], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        open_data("path", write(tmp_path / name, **changed))
    assert str(caught.value).startswith(f"{tmp_path / name}")
    assert str(caught.value).isprintable()


def test_a_source_is_some_rows_of_its_pictures() -> None:
    source = Source(Arrays(ARRAYS["train_images"]), ARRAYS["train_labels"], ("a", "b", "c"))
    part = source.take([3, 1]).take([1])
    assert (len(part), part.name(0), part.labels.tolist()) == (1, "image 1", [1])
    np.testing.assert_array_equal(part.image(0), ARRAYS["train_images"][1])
    np.testing.assert_array_equal(part.images, ARRAYS["train_images"][[1]])


NAMES = {10: [f"name{n}" for n in range(10)], 100: [f"fine{n}" for n in range(100)]}


def rows(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, 3072), dtype=np.uint8)


def cifar(classes: int) -> tuple[dict[str, bytes], np.ndarray, list[int]]:
    """The files of a small CIFAR, its training pixels and labels."""
    parts = [f"data_batch_{n}" for n in range(1, 6)] if classes == 10 else ["train"]
    label_key, name_key = (b"labels", b"label_names") if classes == 10 else (b"fine_labels", b"fine_label_names")
    files, pixels, labels = {}, [], []
    for number, part in enumerate([*parts, "test_batch" if classes == 10 else "test"]):
        pixels.append(rows(4, number))
        labels.append([(7 * number + i) % classes for i in range(4)])
        files[part] = pickle.dumps({b"data": pixels[-1], label_key: labels[-1], b"x": None}, protocol=3)
    meta = {name_key: [name.encode() for name in NAMES[classes]]}
    files["batches.meta" if classes == 10 else "meta"] = pickle.dumps(meta, protocol=3)
    return files, np.concatenate(pixels[:-1]), [label for part in labels[:-1] for label in part]


def write_archive(path: Path, files: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz" if path.suffix == ".gz" else "w") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(f"cifar/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


@pytest.mark.parametrize("classes", [10, 100])
@pytest.mark.parametrize("place", ["folder", "folder/batches", "c.tar", "c.tar.gz"])
def test_cifar_is_read(tmp_path: Path, classes: int, place: str) -> None:
    files, pixels, labels = cifar(classes)
    if place.startswith("c.tar"):
        path = write_archive(tmp_path / place, files)
    else:
        path = tmp_path / "folder"
        (tmp_path / place).mkdir(parents=True)
        for name, content in files.items():
            (tmp_path / place / name).write_bytes(content)
    data = open_data("path", path)
    assert data.train.labels.tolist() == labels
    np.testing.assert_array_equal(data.train.images.transpose(0, 3, 1, 2).reshape(len(pixels), -1), pixels)
    assert data.train.classes == tuple(NAMES[classes])
    assert len(data.test) == 4


def test_other_archives_are_not_cifar(tmp_path: Path) -> None:
    assert find_cifar(tmp_path) is None
    assert find_cifar(write_archive(tmp_path / "x.tar.gz", {"a": b"b"})) is None


def test_damaged_files_of_cifar_are_named(tmp_path: Path) -> None:
    files, *_ = cifar(10)
    for name in files:
        damaged = {**files, name: files[name][: len(files[name]) // 2 + 1]}
        with pytest.raises(ValueError, match=rf"c\.tar\.gz/{name}: .*; download it again"):
            open_data("path", write_archive(tmp_path / "c.tar.gz", damaged))
    path = write_archive(tmp_path / "c.tar.gz", files)
    path.write_bytes(path.read_bytes()[:30_000])
    with pytest.raises(ValueError, match=r"c\.tar\.gz: .*; download it again"):
        open_data("path", path)


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
        np.array([Evil(os.system, "touch harm")], dtype=object),
        np.zeros(3),
        np.zeros((2, 2)),
        os.path.join,
    ],
)
@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
def test_a_pickle_that_would_call_something_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: object, protocol: int
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    files = {**cifar(10)[0], "data_batch_1": pickle.dumps({b"data": value, b"labels": [0]}, protocol=protocol)}
    with pytest.raises(ValueError, match=r"data_batch_1: .*; download it again"):
        open_data("path", write_archive(tmp_path / "c.tar.gz", files))
    assert list((tmp_path / "here").iterdir()) == []


# 60 tuples, each of the one before and once more of it: 480 bytes, which a hash would go through 2**60 times.
NESTED = b"\x80\x04)q\x00" + b"".join(b"h%ch%c\x86q%c" % (level, level, level + 1) for level in range(60))


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "data",
    [NESTED + end for end in (b"}h<Ns.", b"(h<Nd.", b"}(h<Nu.", b"h<h<\x93.", b"\x8f(h<\x90.", b"(h<\x91.")]
    + [
        b"\x80\x02Nr\xff\xff\xff\xff0.",
        b"\x80\x04\x8e" + b"\xff" * 7 + b"\x7f.",
        b"I" + b"9" * 100_000 + b"\n.",
        b"(" * 10**5,
    ],
)
def test_a_pickle_that_would_take_forever_or_all_memory_is_refused(tmp_path: Path, data: bytes) -> None:
    files = {**cifar(10)[0], "batches.meta": data}
    with pytest.raises(ValueError, match=r"batches\.meta: .*; download it again"):
        open_data("path", write_archive(tmp_path / "c.tar.gz", files))


def test_labels_that_contain_themselves_are_refused(tmp_path: Path) -> None:
    loop: list[object] = []
    loop += [loop] * 4
    for labels in (loop, [2**70] * 4, [0], [0.5] * 4, 3):
        content = pickle.dumps({b"data": rows(4, 0), b"labels": labels}, protocol=3)
        with pytest.raises(ValueError, match="download it again"):
            open_data("path", write_archive(tmp_path / "c.tar", {**cifar(10)[0], "data_batch_1": content}))


def test_the_python_2_form_of_an_array_is_read() -> None:
    """As in the real files: an array's bytes are a plain string, and names are those of numpy.core."""
    data = (
        b"\x80\x02}q\x00U\x04dataq\x01cnumpy.core.multiarray\n_reconstruct\nq\x02cnumpy\nndarray\nq\x03K\x00\x85U\x01b\x87R"
        b"(K\x01K\x02K\x03\x86cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
        b"\x89U\x06" + bytes(range(250, 256)) + b"tbs."
    )
    np.testing.assert_array_equal(_unpickled(data)[b"data"].rows, [[250, 251, 252], [253, 254, 255]])
