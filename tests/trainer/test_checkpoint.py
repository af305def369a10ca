"""Checkpoints are whole or not there, and whatever else lies in their place is noticed."""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conadv.trainer.checkpoint import (
    Checkpoint,
    DamagedError,
    checkpoints,
    newest_whole,
    prune,
    read_checkpoint,
    set_aside_newer,
    sweep_partial,
    write_checkpoint,
)

ABOUT: dict[str, Any] = {
    "recipe": {"seed": 0},
    "versions": {"torch": "2"},
    "plain": ["weight"],
    "position": {"seconds": 1.5, "skipped": 0, "layout": "clean"},
}
FILES = ("state.safetensors", "checkpoint.json")


def make(folder: Path, step: int) -> Path:
    tensors = {"model.weight": torch.arange(40.0) + step, "model.count": torch.tensor(step)}
    write_checkpoint(folder, step, Checkpoint(tensors, ABOUT))
    return folder / f"step-{step:08d}"


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """A folder with checkpoints of steps 4 and 6."""
    make(tmp_path, 4)
    make(tmp_path, 6)
    return tmp_path


def newest(folder: Path) -> tuple[int, list[str]]:
    """The step that a run would go on from, and what it would tell."""
    told: list[str] = []
    return newest_whole(folder, told.append).about["step"], told


def reseal(path: Path, about: bytes) -> None:
    """A description with the right digest, as only somebody who means it would write it."""
    (path / "checkpoint.json").write_bytes(sha256(about).hexdigest().encode() + b"\n" + about + b"\n")


def replace_tensors(path: Path, data: bytes) -> None:
    """Other tensors with the right digest and size."""
    (path / "state.safetensors").write_bytes(data)
    lines = (path / "checkpoint.json").read_bytes().partition(b"\n")[2]
    about = {**json.loads(lines), "tensors": sha256(data).hexdigest(), "bytes": len(data)}
    reseal(path, json.dumps(about).encode())


def test_what_was_written_is_read(tmp_path):
    path = make(tmp_path, 7)
    tensors, about = read_checkpoint(path)
    assert torch.equal(tensors["model.weight"], torch.arange(40.0) + 7)
    assert tensors["model.count"].item() == 7
    assert {key: about[key] for key in ABOUT} == ABOUT
    assert about["step"] == 7
    assert sorted(entry.name for entry in tmp_path.rglob("*")) == ["checkpoint.json", "state.safetensors", path.name]


def test_a_checkpoint_reaches_other_ranks_as_it_is(tmp_path):
    one = read_checkpoint(make(tmp_path, 7))
    other = Checkpoint.unpack(one.pack())
    assert other.about == one.about
    assert other.tensors.keys() == one.tensors.keys()
    assert all(torch.equal(other.tensors[name], one.tensors[name]) for name in one.tensors)


def test_a_checkpoint_of_the_same_step_is_replaced(tmp_path):
    make(tmp_path, 7)
    write_checkpoint(tmp_path, 7, Checkpoint({"new": torch.ones(1)}, ABOUT))
    assert list(read_checkpoint(tmp_path / "step-00000007").tensors) == ["new"]
    assert len(list(tmp_path.iterdir())) == 1


def test_the_newest_come_first_also_beyond_eight_digits(tmp_path):
    steps = [99_999_999, 100_000_000, 5]
    for step in steps:
        make(tmp_path, step)
    (tmp_path / "step-new").mkdir()
    (tmp_path / "step-00000009.bak").mkdir()
    assert [path.name for path in checkpoints(tmp_path)] == ["step-100000000", "step-99999999", "step-00000005"]
    assert newest(tmp_path) == (100_000_000, [])


def test_the_last_ones_are_kept(tmp_path):
    for step in (1, 2, 3, 10):
        make(tmp_path, step)
    prune(tmp_path, 2)
    assert [path.name for path in checkpoints(tmp_path)] == ["step-00000010", "step-00000003"]
    assert len(list(tmp_path.iterdir())) == 2


def test_what_a_killed_run_left_is_swept(two):
    (two / ".step-00000008.new.partial").mkdir()
    (two / ".step-00000008.new.partial" / "state.safetensors").write_bytes(b"half")
    (two / ".step-00000002.partial").mkdir()
    assert newest(two) == (6, [])
    sweep_partial(two)
    assert len(list(two.iterdir())) == 2


def test_checkpoints_that_were_passed_over_no_longer_count(two):
    make(two, 8)
    set_aside_newer(two, 4)
    assert [path.name for path in checkpoints(two)] == ["step-00000004"]
    assert {path.name for path in two.glob("damaged-*")} == {"damaged-00000006", "damaged-00000008"}
    make(two, 6)
    set_aside_newer(two, 4)  # a second time, in place of the first
    assert (two / "damaged-00000006" / "checkpoint.json").exists()


@pytest.mark.parametrize("file", FILES)
def test_any_flipped_bit_is_noticed_and_the_checkpoint_before_is_taken(file, two):
    path = two / "step-00000006" / file
    whole = path.read_bytes()
    places = random.Random(0)
    for _ in range(600):
        damaged = bytearray(whole)
        damaged[places.randrange(len(whole))] ^= 1 << places.randrange(8)
        path.write_bytes(damaged)
        step, told = newest(two)
        assert step == 4
        assert str(path) in told[0]
        assert "step-00000004" in told[1]
        assert len(told) == 2
    path.write_bytes(whole)
    assert newest(two) == (6, [])


@pytest.mark.parametrize("file", FILES)
def test_a_truncated_or_longer_file_is_noticed(file, two):
    path = two / "step-00000006" / file
    whole = path.read_bytes()
    for length in {*range(0, len(whole), 7), len(whole) - 1}:
        path.write_bytes(whole[:length])
        assert newest(two)[0] == 4
    for longer in (whole + b"\0", whole + whole, b"\0" + whole):
        path.write_bytes(longer)
        assert newest(two)[0] == 4


@pytest.mark.parametrize("file", FILES)
def test_a_missing_file_is_named(file, two):
    (two / "step-00000006" / file).unlink()
    step, told = newest(two)
    assert step == 4
    assert f"{two / 'step-00000006' / file} cannot be read (No such file or directory)" in told[0]


def swap_tensors(two: Path) -> None:
    shutil.copy(two / "step-00000004" / FILES[0], two / "step-00000006" / FILES[0])


def rename(two: Path) -> None:
    (two / "step-00000006").rename(two / "step-00000007")


def replace_by_file(two: Path) -> None:
    shutil.rmtree(two / "step-00000006")
    (two / "step-00000006").write_text("a file")


def replace_by_pipe(two: Path) -> None:
    (two / "step-00000006" / FILES[1]).unlink()
    os.mkfifo(two / "step-00000006" / FILES[1])


def replace_by_device(two: Path) -> None:
    (two / "step-00000006" / FILES[0]).unlink()
    (two / "step-00000006" / FILES[0]).symlink_to("/dev/zero")


def replace_by_folder(two: Path) -> None:
    (two / "step-00000006" / FILES[0]).unlink()
    (two / "step-00000006" / FILES[0]).mkdir()


def point_in_a_circle(two: Path) -> None:
    (two / "step-00000006" / FILES[1]).unlink()
    (two / "step-00000006" / FILES[1]).symlink_to(FILES[1])


def fill_with_nothing(two: Path) -> None:
    with (two / "step-00000006" / FILES[1]).open("ab") as file:
        file.truncate(2**40)


@pytest.mark.parametrize(
    "change",
    [
        swap_tensors, rename, replace_by_file, replace_by_pipe, replace_by_device, replace_by_folder,
        point_in_a_circle, fill_with_nothing,
    ],
)  # fmt: skip
def test_something_else_in_its_place_is_passed_over(change: Callable[[Path], None], two):
    change(two)
    step, told = newest(two)
    assert step == 4
    assert len(told) == 2


def test_without_any_whole_checkpoint_there_is_nothing_to_go_on_from(two):
    for file in two.glob("step-*/state.safetensors"):
        file.write_bytes(b"")
    told: list[str] = []
    with pytest.raises(ValueError, match="has no intact checkpoint of this run to resume from: start a new run"):
        newest_whole(two, told.append)
    assert len(told) == 2


def test_more_bytes_than_the_model_needs_are_not_even_read(two):
    path = two / "step-00000006"
    with (path / FILES[0]).open("ab") as file:
        file.truncate(2**42)  # four terabytes of nothing
    about = json.loads((path / FILES[1]).read_bytes().partition(b"\n")[2])
    reseal(path, json.dumps({**about, "bytes": 2**42}).encode())
    with pytest.raises(DamagedError, match="more than the model needs"):
        read_checkpoint(path, largest=10_000)


def safetensors_file(header: bytes, data: bytes = b"", length: int | None = None) -> bytes:
    return struct.pack("<Q", len(header) if length is None else length) + header + data


def entry(**changes: Any) -> bytes:
    return json.dumps({"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4], **changes}}).encode()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff" * 8,
        safetensors_file(b"{}", length=2**63),
        safetensors_file(b"{}", length=2**40),
        safetensors_file(b"[" * 100_000),
        safetensors_file(b'{"x":' * 100_000),
        safetensors_file(b"\xff\xfe"),
        safetensors_file(b"[]"),
        safetensors_file(entry(shape=[2**62, 2**62]), bytes(4)),
        safetensors_file(entry(shape=[2**40]), bytes(4)),
        safetensors_file(entry(shape=[-1]), bytes(4)),
        safetensors_file(entry(shape="x"), bytes(4)),
        safetensors_file(entry(data_offsets=[0, 2**60]), bytes(4)),
        safetensors_file(entry(data_offsets=[4, 0]), bytes(4)),
        safetensors_file(entry(dtype="F128"), bytes(4)),
        safetensors_file(entry(dtype="F8_E8M0", shape=[4]), bytes(4)),
        safetensors_file(entry(dtype="C64", shape=[0], data_offsets=[0, 0])),
        safetensors_file(entry(), bytes(400)),
    ],
    ids=range(18),
)
def test_tensors_made_to_harm_are_refused_or_harmless(data, two):
    path = two / "step-00000006"
    replace_tensors(path, data)
    try:
        tensors = read_checkpoint(path).tensors
    except DamagedError as damage:
        told = str(damage)
        assert str(path / FILES[0]) in told
        assert len(told) < 2000
    else:  # small enough, whatever it is
        assert sum(tensor.numel() for tensor in tensors.values()) <= 4


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("sound"), 6)


@settings(max_examples=300)
@given(
    st.fixed_dictionaries({}, optional=dict.fromkeys([*ABOUT, "format", "step", "tensors", "bytes"], JSON)),
    st.sets(st.sampled_from([*ABOUT, "format", "step", "tensors", "bytes"]), max_size=2),
)
def test_a_description_of_any_types_is_refused_or_sound(sound, changes, missing):
    file = sound / FILES[1]
    whole = file.read_bytes()
    about = json.loads(whole.partition(b"\n")[2])
    reseal(
        sound, json.dumps({key: value for key, value in {**about, **changes}.items() if key not in missing}).encode()
    )
    try:
        found = read_checkpoint(sound).about
    except DamagedError:
        return
    finally:
        file.write_bytes(whole)
    assert found["step"] == 6
    assert isinstance(found["recipe"], dict)
    assert isinstance(found["position"]["skipped"], int)
    assert 0 <= found["position"]["seconds"] < float("inf")


@pytest.mark.parametrize("skipped", [-1, 2**63, True])
def test_a_count_that_cannot_be_is_refused(two, skipped):
    path = two / "step-00000006"
    about = json.loads((path / FILES[1]).read_bytes().partition(b"\n")[2])
    reseal(path, json.dumps({**about, "position": {**about["position"], "skipped": skipped}}).encode())
    assert newest(two)[0] == 4


@pytest.mark.parametrize(
    "about",
    [
        b"", b"null", b"[]", b"3", b'"x"', b"{", b"\xff", b"[" * 200_000, b'{"a":' * 100_000, b"9" * 10_000,
        b'{"step": ' + b"9" * 5000 + b"}", b'{"format": 1, "step": null}', b'{"format": 1, "step": 1e400}',
    ],
    ids=range(13),
)  # fmt: skip
def test_a_description_made_to_harm_is_passed_over(about, two):
    reseal(two / "step-00000006", about)
    step, told = newest(two)
    assert step == 4
    assert str(two / "step-00000006" / FILES[1]) in told[0]


def test_a_disk_that_fills_up_leaves_nothing_half_written(two, monkeypatch):
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"cannot write .*step-00000008 \(No space left on device\): free some space"):
        make(two, 8)
    monkeypatch.undo()
    assert len(list(two.iterdir())) == 2
    assert newest(two) == (6, [])


def test_a_folder_that_cannot_be_made_is_told_as_what_it_is(two, monkeypatch):
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "mkdir", full)
    with pytest.raises(OSError, match=r"cannot write .*step-00000008 \(No space left on device\): free some space"):
        make(two, 8)
