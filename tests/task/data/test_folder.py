"""Image folders: classes sorted by name, images by class and name, errors for what is missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from conadv.task.data.folder import folder_classes, list_folder, split_folders
from task.data.samples import encode, jpeg_set, picture, write_folder


def test_images_are_sorted_by_class_and_name(tmp_path: Path) -> None:
    for name in ("b/2.jpg", "b/1.PNG", "a/sub/9.jpeg", "a/0.webp", "a/notes.txt", "a/.hidden.jpg", "a/._1.jpg"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(name.encode())
    listing = list_folder(tmp_path, ("a", "b"), may_lack=False)
    assert [Path(name).relative_to(tmp_path).as_posix() for name in listing.names] == [
        "a/0.webp",
        "a/sub/9.jpeg",
        "b/1.PNG",
        "b/2.jpg",
    ]
    assert listing.labels.tolist() == [0, 0, 1, 1]
    assert listing.read(1) == b"a/sub/9.jpeg"


@pytest.mark.parametrize("test", ["val", "valid", "validation", "test"])
def test_the_parts_go_by_the_usual_names(tmp_path: Path, test: str) -> None:
    (tmp_path / "train").mkdir()
    assert split_folders(tmp_path) is None
    (tmp_path / test).mkdir()
    assert split_folders(tmp_path) == (tmp_path / "train", tmp_path / test)


def test_an_empty_class_is_named_in_training_and_allowed_in_the_test(tmp_path: Path) -> None:
    write_folder(tmp_path, jpeg_set(4), jpeg_set(2))
    (tmp_path / "train" / "class2").mkdir()
    classes = folder_classes(tmp_path / "train", tmp_path / "val")
    assert classes == ("class0", "class1", "class2")
    (problem,) = list_folder(tmp_path / "train", classes, may_lack=False).problems
    assert str(problem) == f"{tmp_path}/train/class2: a class without images"
    assert list_folder(tmp_path / "val", classes, may_lack=True).problems == ()


def test_a_class_that_training_does_not_know_is_refused(tmp_path: Path) -> None:
    write_folder(tmp_path, jpeg_set(4), jpeg_set(2))
    (tmp_path / "val" / "zebra").mkdir()
    with pytest.raises(ValueError, match=r"val/zebra: .*train has no class of that name"):
        folder_classes(tmp_path / "train", tmp_path / "val")


def test_images_without_class_folders_are_refused(tmp_path: Path) -> None:
    for part in ("train", "val"):
        (tmp_path / part).mkdir()
        (tmp_path / part / "1.jpg").write_bytes(encode(picture(0)))
    with pytest.raises(ValueError, match="no class folders"):
        folder_classes(tmp_path / "train", tmp_path / "val")
