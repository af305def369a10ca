"""Damaged and hostile data sets give one line within bounded memory and time, and execute nothing."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from conadv.cli import main
from conadv.task.data import Fit, open_data
from conadv.task.data.open import inspect_data
from conadv.task.stream import evaluation_batches
from faults.hostile import FORMATS, build, exercise
from task.data.samples import jpeg_set, members_of, write_folder, write_tar

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
    for use in (lambda: open_data(None, path), lambda: inspect_data(path)):
        with pytest.raises(ValueError, match=message) as caught:
            use()
        assert str(caught.value).isprintable()


@pytest.mark.timeout(30)
@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")], ids=["fifo", "device"])
@pytest.mark.parametrize("place", ["train/class0/x.jpg", "train.tar"])
@pytest.mark.usefixtures("little_memory")
def test_what_is_no_file_is_not_waited_for(tmp_path: Path, make, place: str) -> None:
    root = write_folder(tmp_path / "d", jpeg_set(4), jpeg_set(2))
    if place == "train.tar":
        write_tar(root / "val.tar", members_of(jpeg_set(2)))
    make(root / place)
    with pytest.raises(ValueError, match=rf"{Path(place).name}.*(not a regular file|Illegal seek|not an image)"):
        list(evaluation_batches(open_data(None, root).train, 1, Fit(8)))
    if "/" in place:
        assert [Path(problem["name"]).name for problem in inspect_data(root)["damaged"]] == ["x.jpg"]


@pytest.mark.parametrize("name", ["a\nb.jpg", "\x1b[31m.jpg", "\udcff.jpg"])
def test_a_name_on_disk_cannot_break_the_line(tmp_path: Path, name: str, capsys) -> None:
    root = write_folder(tmp_path, jpeg_set(4), jpeg_set(2))
    (root / "train" / "class0" / name).write_bytes(b"no image")
    with pytest.raises(ValueError, match=r"not an image") as caught:
        list(evaluation_batches(open_data(None, root).train, 1, Fit(8)))
    assert str(caught.value).isprintable()
    assert main(["data", "inspect", str(root)]) == 0
    assert all(line.isprintable() for line in capsys.readouterr().out.splitlines())
