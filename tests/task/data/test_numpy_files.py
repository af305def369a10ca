"""Arrays in .npy and .npz files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from conadv.task.data.numpy_files import open_arrays

ARRAYS = {
    "train_images": np.arange(4 * 3 * 2 * 3, dtype=np.uint8).reshape(4, 3, 2, 3),
    "train_labels": np.array([0, 1, 2, 1]),
    "test_images": np.arange(2 * 3 * 2 * 3, dtype=np.uint8).reshape(2, 3, 2, 3),
    "test_labels": np.array([1, 0], np.uint8),
}
KERAS = {"train_images": "x_train", "train_labels": "y_train", "test_images": "x_test", "test_labels": "y_test"}


def write(path: Path, **changed: np.ndarray) -> Path:
    arrays = {**ARRAYS, **changed}
    if path.suffix == ".npz":
        np.savez(path, **arrays)
    else:
        path.mkdir()
        for name, array in arrays.items():
            np.save(path / f"{name}.npy", array)
    return path


@pytest.mark.parametrize("name", ["folder", "file.npz"])
def test_both_forms_are_read(tmp_path: Path, name: str) -> None:
    data = open_arrays(write(tmp_path / name))
    assert data is not None
    np.testing.assert_array_equal(data.train.images, ARRAYS["train_images"])
    np.testing.assert_array_equal(data.test.labels, [1, 0])
    assert data.train.classes == ("0", "1", "2")


def test_grey_images_and_labels_in_a_column_as_keras_has_them(tmp_path: Path) -> None:
    arrays = {KERAS[name]: array for name, array in ARRAYS.items()}
    arrays["x_train"], arrays["x_test"] = arrays["x_train"][..., 0], arrays["x_test"][..., 0]
    arrays["y_train"] = arrays["y_train"][:, None]
    np.savez(tmp_path / "k.npz", **arrays)
    data = open_arrays(tmp_path / "k.npz")
    assert data is not None
    assert data.train.images.shape == (4, 3, 2, 1)
    assert data.train.labels.tolist() == [0, 1, 2, 1]


def test_classes_by_name_bound_the_labels(tmp_path: Path) -> None:
    folder = write(tmp_path / "folder")
    (folder / "classes.txt").write_text("a\nb\nc\nd\n")
    data = open_arrays(folder)
    assert data is not None
    assert data.train.classes == ("a", "b", "c", "d")
    (folder / "classes.txt").write_text("a\nb\n")
    with pytest.raises(ValueError, match="image 2 has label 2"):
        open_arrays(folder)


def test_other_files_are_no_arrays(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", a=np.zeros(3))
    (tmp_path / "x.txt").write_text("hello")
    assert open_arrays(tmp_path / "x.npz") is None
    assert open_arrays(tmp_path / "x.txt") is None
    assert open_arrays(tmp_path) is None


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"train_images": ARRAYS["train_images"].astype(np.float32)}, "images are float32"),
        ({"train_images": ARRAYS["train_images"][:3]}, "3 images have 4 labels"),
        ({"train_labels": np.array([0.0, 1, 2, 1])}, "labels are float64"),
        ({"train_labels": np.array([0, -1, 2, 1])}, "image 1 has label -1"),
        ({"train_images": np.array([{}] * 4, dtype=object)}, "pickle|Python objects"),
    ],
)
@pytest.mark.parametrize("name", ["folder", "file.npz"])
def test_wrong_arrays_are_refused(tmp_path: Path, name: str, changed: dict[str, np.ndarray], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        open_arrays(write(tmp_path / name, **changed))


def test_damaged_files_are_named(tmp_path: Path) -> None:
    path = write(tmp_path / "file.npz")
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(ValueError, match=r"file\.npz: File is not a zip file; write it again"):
        open_arrays(path)
    folder = write(tmp_path / "folder")
    (folder / "test_images.npy").write_bytes(b"\x93NUMPY")
    with pytest.raises(ValueError, match=r"test_images\.npy: damaged"):
        open_arrays(folder)
