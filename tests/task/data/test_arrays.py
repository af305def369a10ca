"""Images as arrays: embedded, in NumPy's files, and in CIFAR's, whose pickles are read without executing anything."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_digits

from conadv.task.data import Source, open_data
from conadv.task.data.arrays import digits, synthetic
from conadv.task.data.cifar import _unpickled
from task.data.samples import cifar, images_of, write_archive

ARRAYS = {
    "train_images": np.arange(4 * 3 * 2 * 3, dtype=np.uint8).reshape(4, 3, 2, 3),
    "train_labels": np.array([0, 1, 2, 1]),
    "test_images": np.arange(2 * 3 * 2 * 3, dtype=np.uint8).reshape(2, 3, 2, 3),
    "test_labels": np.array([1, 0], np.uint8),
}
BOTH = pytest.mark.parametrize("name", ["folder", "file.npz"])


def rows(source: Source) -> np.ndarray:
    return np.concatenate([images_of(source).reshape(len(source), -1), source.labels[:, None]], axis=1)


def test_the_digits_are_those_of_scikit_learn() -> None:
    oracle = load_digits()
    data = digits(train_size=100)
    ours = np.concatenate([rows(data.train), rows(data.test)])
    expected = np.concatenate([np.rint(oracle.data * (255 / 16)), oracle.target[:, None]], axis=1)
    np.testing.assert_array_equal(ours[np.lexsort(ours.T)], expected[np.lexsort(expected.T)].astype(ours.dtype))


@pytest.mark.parametrize("train_size", [10, 105, 1796])
def test_the_split_of_the_digits_is_balanced_and_part_of_any_larger_one(train_size: int) -> None:
    data = digits(train_size)
    counts = np.bincount(data.train.labels, minlength=10)
    assert (len(data.train), len(data.test)) == (train_size, 1797 - train_size)
    assert counts.max() - counts.min() <= 1 or train_size > 1740  # ten times the rarest digit
    larger = {tuple(row) for row in rows(digits(min(train_size + 100, 1796)).train)}
    assert {tuple(row) for row in rows(data.train)} <= larger


@pytest.mark.parametrize("train_size", [-1, 9, 1797])
def test_a_split_that_leaves_nothing_is_refused(train_size: int) -> None:
    with pytest.raises(ValueError, match=f"train_size {train_size}: choose 10 to 1796"):
        digits(train_size)


def test_synthetic_images_have_any_shape_differ_and_take_little_memory() -> None:
    data = synthetic((5, 7, 2), 50)
    assert (data.train.image(49).shape, len(data.test)) == ((5, 7, 2), 5)
    assert len({image.tobytes() for image in (*images_of(data.train), *images_of(data.test))}) == 55
    np.testing.assert_array_equal(data.train.labels, np.arange(50) % 10)
    imagenet = synthetic((224, 224, 3), 1_281_167).train
    assert imagenet.image(1_281_166).tobytes()[:-1] == imagenet.image(1_281_165).tobytes()[1:]
    assert 120 < imagenet.image(1_281_166).mean() < 135
    assert len(synthetic((8, 8, 1), 1).test) == 1


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
    data = open_data(None, write(tmp_path / name))
    np.testing.assert_array_equal(images_of(data.train), ARRAYS["train_images"])
    np.testing.assert_array_equal(data.test.labels, [1, 0])
    assert (data.train.classes, data.name, data.train.name(2)) == (("0", "1", "2"), name, "image 2")


def test_grey_images_and_labels_in_a_column_as_keras_has_them(tmp_path: Path) -> None:
    arrays = {name: array[..., 0] if array.ndim == 4 else array[:, None] for name, array in ARRAYS.items()}
    np.savez_compressed(tmp_path / "k.npz", **arrays)
    data = open_data(None, tmp_path / "k.npz")
    assert images_of(data.train).shape == (4, 3, 2, 1)
    assert data.train.labels.tolist() == [0, 1, 2, 1]


def test_names_of_classes_are_beside_an_npz(tmp_path: Path) -> None:
    (tmp_path / "classes.txt").write_text("a\nb\nc\n")
    assert open_data(None, write(tmp_path / "file.npz")).train.classes == ("a", "b", "c")


def test_names_of_classes_bound_the_labels(tmp_path: Path) -> None:
    folder = write(tmp_path / "folder")
    (folder / "classes.txt").write_text("a\nb\nkrähe\nd\n", "utf-8")
    assert open_data(None, folder).train.classes == ("a", "b", "krähe", "d")
    (folder / "classes.txt").write_text("a\nb\n")
    with pytest.raises(ValueError, match="image 2 has label 2, but the 2 classes are numbered 0 to 1"):
        open_data(None, folder)
    (folder / "classes.txt").write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"classes\.txt: .*; write one class per line, as UTF-8"):
        open_data(None, folder)


@BOTH
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"train_images": ARRAYS["train_images"].astype(np.float32)}, "images are float32"),
        ({"train_images": ARRAYS["train_images"][:3]}, "3 images have labels of shape"),
        ({"train_images": np.zeros((4, 3, 0, 3), np.uint8)}, r"\(4, 3, 0, 3\)|mmap|empty"),
        ({"train_images": np.zeros((4, 3, 8, 9), np.uint8)}, r"channels first: store them as \(N, H, W, C\)"),
        ({"test_images": np.zeros((2, 1, 28, 28), np.uint8)}, r"shape \(2, 1, 28, 28\), channels first"),
        ({"train_labels": np.array([0.0, 1, 2, 1])}, "labels are float64"),
        ({"train_labels": np.array([0, -1, 2, 1])}, "image 1 has label -1"),
        ({"train_labels": np.array([0, 1, 2, 2**60])}, "more than 100,000 classes"),
        ({"train_images": np.array([{}] * 4, dtype=object)}, "pickle|Python objects"),
    ],
)
def test_wrong_arrays_are_refused(tmp_path: Path, name: str, changed: dict[str, np.ndarray], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        open_data(None, write(tmp_path / name, **changed))
    assert str(caught.value).startswith(f"{tmp_path / name}")
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("classes", "place"), [(10, "folder"), (100, "folder/batches"), (100, "c.tar"), (10, "c.tar.gz")]
)
def test_cifar_is_read(tmp_path: Path, classes: int, place: str) -> None:
    files, pixels, labels = cifar(classes)
    if place.startswith("c.tar"):
        path = write_archive(tmp_path / place, files)
    else:
        path = tmp_path / "folder"
        (tmp_path / place).mkdir(parents=True)
        for name, content in files.items():
            (tmp_path / place / name).write_bytes(content)
    data = open_data(None, path)
    assert data.train.labels.tolist() == labels
    np.testing.assert_array_equal(images_of(data.train).transpose(0, 3, 1, 2).reshape(len(pixels), -1), pixels)
    assert data.train.classes == tuple(f"name{n}" for n in range(classes))
    assert len(data.test) == 4


def test_damaged_files_of_cifar_are_named(tmp_path: Path) -> None:
    files, *_ = cifar(10)
    for name in files:
        damaged = {**files, name: files[name][: len(files[name]) // 2 + 1]}
        with pytest.raises(ValueError, match=rf"c\.tar\.gz/{name}: .*; download it again"):
            open_data(None, write_archive(tmp_path / "c.tar.gz", damaged))
    path = write_archive(tmp_path / "c.tar.gz", files)
    path.write_bytes(path.read_bytes()[:30_000])
    with pytest.raises(ValueError, match=r"c\.tar\.gz: .*; download it again"):
        open_data(None, path)


class Evil:
    def __init__(self, call: object, *arguments: object) -> None:
        self.call, self.arguments = call, arguments

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return self.call, self.arguments


LOOP: list[object] = []
LOOP += [LOOP] * 4
ROWS = np.zeros((4, 3072), np.uint8)
TABLES = [
    *({b"data": ROWS, b"labels": labels} for labels in (LOOP, [2**70] * 4, [0], [0.5] * 4, 3)),
    *({b"data": data, b"labels": [0]} for data in (np.zeros(3), np.zeros((2, 2)), os.path.join)),
    *({b"data": Evil(*call), b"labels": [0]} for call in ((os.system, "touch harm"), (eval, "1"), (np.load, "x"))),
    {b"data": np.array([Evil(os.system, "touch harm")], dtype=object), b"labels": [0]},
]
# Instructions that would ask for a memo, a string or a stack of any size.
RAW = [b"\x80\x02Nr\xff\xff\xff\xff0.", b"\x80\x04\x8e" + b"\xff" * 7 + b"\x7f.", b"(" * 10**5]


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "content", [*(pickle.dumps(table, protocol=protocol) for table in TABLES for protocol in (0, 4)), *RAW]
)
def test_a_pickle_of_something_else_is_refused_and_calls_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(ValueError, match=r"data_batch_1: .*; download it again"):
        open_data(None, write_archive(tmp_path / "c.tar", {**cifar(10)[0], "data_batch_1": content}))
    assert list((tmp_path / "here").iterdir()) == []


def test_the_python_2_form_of_an_array_is_read() -> None:
    """As in the real files: an array's bytes are a plain string, and names are those of numpy.core."""
    data = (
        b"\x80\x02}q\x00U\x04dataq\x01cnumpy.core.multiarray\n_reconstruct\nq\x02cnumpy\nndarray\nq\x03K\x00\x85U\x01b\x87R"
        b"(K\x01K\x02K\x03\x86cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
        b"\x89U\x06" + bytes(range(250, 256)) + b"tbs."
    )
    np.testing.assert_array_equal(_unpickled(data)[b"data"].rows, [[250, 251, 252], [253, 254, 255]])
