"""Checkpoints: the whole state of a run in a folder that is either complete or not there.

step-00000120/   state.safetensors   weights, optimizer, and the stale weights of the twins in flight
                 checkpoint.json     position, recipe, versions, and the digest of the tensors and of itself
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
from torch import Tensor

_TENSORS, _ABOUT = "state.safetensors", "checkpoint.json"
_FORMAT = 1
# A description has a few thousand bytes; more than this was not written by us.
_LARGEST_ABOUT = 2**20


class Checkpoint(NamedTuple):
    """What was saved: tensors by name, and everything else as JSON."""

    tensors: dict[str, Tensor]
    about: dict[str, Any]


class DamagedError(ValueError):
    """A checkpoint that is not as it was written."""


class Saver:
    """Writes checkpoints into a folder, beside the training, and keeps the newest of them."""

    def __init__(self, folder: Path, keep: int) -> None:
        self._folder = folder
        self._keep = keep
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None

    def save(self, step: int, checkpoint: Checkpoint, before: Callable[[], None]) -> None:
        """Begin to write; the tensors must not change any more. `before` runs first, and its failure is ours."""
        self.wait()

        def write() -> None:
            before()
            write_checkpoint(self._folder, step, checkpoint)
            for old in checkpoints(self._folder)[self._keep :]:
                _remove(old)

        self._writing = self._thread.submit(write)

    def wait(self) -> None:
        """Until what was begun is on disk; raises what went wrong."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def close(self) -> None:
        self._thread.shutdown()


def write_checkpoint(folder: Path, step: int, checkpoint: Checkpoint) -> None:
    """Write aside, flush, then rename: whoever looks sees the whole checkpoint or none."""
    folder.mkdir(parents=True, exist_ok=True)
    final = folder / f"step-{step:08d}"
    aside = folder / f".{final.name}.new.partial"
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    data = safetensors.torch.save(checkpoint.tensors)
    about = {**checkpoint.about, "format": _FORMAT, "step": step, "tensors": hashlib.sha256(data).hexdigest()}
    _write_flushed(aside / _TENSORS, data)
    _write_flushed(aside / _ABOUT, _sealed(about))
    _flush_folder(aside)
    if final.exists():
        _remove(final)
    aside.rename(final)
    _flush_folder(folder)


def read_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint after checking every byte of it; DamagedError says which file is not as it was written."""
    about = _unsealed(path / _ABOUT)
    if about.get("format") != _FORMAT or f"step-{about.get('step'):08d}" != path.name:
        raise DamagedError(f"{path / _ABOUT} belongs to another checkpoint or version")
    data = _read(path / _TENSORS)
    if hashlib.sha256(data).hexdigest() != about.get("tensors"):
        raise DamagedError(f"{path / _TENSORS} is damaged: its digest is not the one that was written")
    return Checkpoint(safetensors.torch.load(data), about)


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a folder, newest first."""
    return sorted(folder.glob("step-" + "[0-9]" * 8), reverse=True)


def sweep_partial(folder: Path) -> None:
    """Remove what a killed run left half written."""
    for partial in folder.glob(".step-*.partial"):
        shutil.rmtree(partial, ignore_errors=True)


def newest_whole(folder: Path, tell: Callable[[str], None]) -> Checkpoint:
    """The newest checkpoint that is as it was written; damaged ones are told of and passed over."""
    for path in checkpoints(folder):
        try:
            return read_checkpoint(path)
        except DamagedError as damage:
            tell(f"{damage}; going back to the checkpoint before it")
    raise ValueError(f"{folder} has no whole checkpoint to go on from: start a new run")


def _sealed(about: dict[str, Any]) -> bytes:
    """JSON with a digest of itself in its first line."""
    body = json.dumps(about, indent=1, sort_keys=True).encode()
    return hashlib.sha256(body).hexdigest().encode() + b"\n" + body + b"\n"


def _unsealed(path: Path) -> dict[str, Any]:
    digest, _, body = _read(path, _LARGEST_ABOUT).partition(b"\n")
    if hashlib.sha256(body[:-1]).hexdigest().encode() != digest or body[-1:] != b"\n":
        raise DamagedError(f"{path} is damaged: its digest is not the one that was written")
    about: dict[str, Any] = json.loads(body)
    return about


def _read(path: Path, largest: int | None = None) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(-1 if largest is None else largest + 1)
    except OSError as error:
        raise DamagedError(f"{path} cannot be read ({error.strerror})") from None
    if largest is not None and len(data) > largest:
        raise DamagedError(f"{path} is larger than any that was written")
    return data


def _write_flushed(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    """Out of sight first, so that nobody meets a checkpoint that is half removed."""
    aside = path.with_name(f".{path.name}.partial")
    shutil.rmtree(aside, ignore_errors=True)
    path.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)
