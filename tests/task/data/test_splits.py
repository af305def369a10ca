"""Training and test files by the words in their names; balanced subsets."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conadv.task.data.splits import class_names, split_files, stratified

ROOT = Path("/training data")  # a word in the path above the data says nothing


def names(*files: str) -> list[Path]:
    return [ROOT / file for file in files]


def test_files_are_parted_by_name_or_folder() -> None:
    train, test = split_files(names("x-val-0.tar", "x-train-1.tar", "x-train-0.tar"), ROOT)
    assert (train, test) == (names("x-train-0.tar", "x-train-1.tar"), names("x-val-0.tar"))
    assert split_files(names("Train/0.tar", "test/0.tar"), ROOT) == (names("Train/0.tar"), names("test/0.tar"))
    train, test = split_files(names("latest1k_train_0.tar", "latest1k_validation_0.tar"), ROOT)
    assert (train, test) == (names("latest1k_train_0.tar"), names("latest1k_validation_0.tar"))


def test_where_there_is_a_validation_part_the_test_part_has_no_labels() -> None:
    assert split_files(names("train-0", "test-0", "validation-0"), ROOT)[1] == names("validation-0")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (["train-0.tar"], "no file has val or test in its name"),
        (["test-0.tar"], "no file has train in its name"),
        (["a.tar"], r"a\.tar: rename it, so that its path has one of the words train, val, test \(now: none\)"),
        (["latest-festival-trainer.tar"], "now: none"),
        (["train-test.tar"], "now: test and train"),
    ],
)
def test_names_that_do_not_tell_are_refused(files: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        split_files(names(*files), ROOT)


def test_names_of_classes_are_the_lines_of_a_file(tmp_path: Path) -> None:
    assert class_names(tmp_path) is None
    (tmp_path / "classes.txt").write_text("tench\ngreat white shark\nkrähe\n", "utf-8")
    assert class_names(tmp_path) == ("tench", "great white shark", "krähe")


@given(st.lists(st.integers(0, 4), min_size=1, max_size=60), st.data())
def test_a_stratified_part_takes_from_all_classes_alike(labels: list[int], data: st.DataObject) -> None:
    size = data.draw(st.integers(1, len(labels)))
    mask = stratified(np.array(labels), 5, size)
    taken, there = (np.bincount(np.array(part, dtype=int), minlength=5) for part in (np.array(labels)[mask], labels))
    assert mask.sum() == size
    for short in range(5):  # a class may have fewer than another only by one, or when it has no more to give
        assert taken[short] == there[short] or taken[short] >= taken.max() - 1
