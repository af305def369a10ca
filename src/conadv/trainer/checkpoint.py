"""Checkpoints: the whole state of a run in a folder that is either complete or not there.

step-00000120/   state.safetensors   weights, optimizer, and the stale weights of the twins in flight
                 checkpoint.json     position, recipe, versions, and the digest of the tensors and of itself
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from .files import flush_folder, read_bounded, write_flushed, writing

_TENSORS, _ABOUT = "state.safetensors", "checkpoint.json"
_FORMAT = 1
# A description has a few thousand bytes; more than this was not written by us.
_LARGEST_ABOUT = 2**20


class Checkpoint(NamedTuple):
    """What was saved: tensors by name, and everything else as JSON."""

    tensors: dict[str, Tensor]
    about: dict[str, Any]

    def pack(self) -> bytes:
        """All of it in one string of bytes, for other ranks."""
        about = json.dumps(self.about).encode()
        return len(about).to_bytes(8) + about + safetensors.torch.save(self.tensors)

    @classmethod
    def unpack(cls, data: bytes) -> Checkpoint:
        end = 8 + int.from_bytes(data[:8])
        return cls(safetensors.torch.load(data[end:]), json.loads(data[8:end]))


class DamagedError(ValueError):
    """A checkpoint that is not as this run wrote it."""


def write_checkpoint(folder: Path, step: int, checkpoint: Checkpoint, data: memoryview | None = None) -> None:
    """Write to a temporary folder, flush, then rename: a reader sees the whole checkpoint or none."""
    final = folder / f"step-{step:08d}"
    aside = folder / f".{final.name}.new.partial"
    data = memoryview(safetensors.torch.save(checkpoint.tensors)) if data is None else data
    digest = sha256(data).hexdigest()
    about = {**checkpoint.about, "format": _FORMAT, "step": step, "tensors": digest, "bytes": len(data)}
    with writing(final):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir()
            write_flushed(aside / _TENSORS, data)
            write_flushed(aside / _ABOUT, _sealed(about))
            flush_folder(aside)
            if final.exists():
                _remove(final)
            aside.rename(final)
            flush_folder(folder)
        except OSError:
            shutil.rmtree(aside, ignore_errors=True)
            raise


def read_checkpoint(path: Path, largest: int | None = None) -> Checkpoint:
    """Read a checkpoint after checking every byte of it; DamagedError says which file is not as it was written.

    `largest`: more bytes of tensors than this cannot belong to the model, so they are not even read.
    """
    about = _unsealed(path / _ABOUT)
    if not _is_sound(about) or f"step-{about['step']:08d}" != path.name:
        raise DamagedError(f"{path / _ABOUT} belongs to another checkpoint or version")
    size = about["bytes"]
    if largest is not None and size > largest:
        raise DamagedError(f"{path / _TENSORS} has {size} bytes, more than the model needs")
    data = _read(path / _TENSORS, size)
    if sha256(data).hexdigest() != about["tensors"]:
        raise DamagedError(f"{path / _TENSORS} is damaged: its digest is not the one that was written")
    try:
        return Checkpoint(safetensors.torch.load(data), about)
    except (SafetensorError, ValueError, RuntimeError, LookupError, MemoryError) as error:
        raise DamagedError(f"{path / _TENSORS} is damaged: {error}") from None


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a folder, newest first."""
    named = [path for path in folder.glob("step-*") if re.fullmatch(r"step-[0-9]{8,18}", path.name)]
    return sorted(named, key=lambda path: int(path.name[5:]), reverse=True)


def newest_whole(
    folder: Path,
    tell: Callable[[str], None],
    check: Callable[[Checkpoint], None] = lambda checkpoint: None,
    largest: int | None = None,
) -> Checkpoint:
    """The newest checkpoint that is intact and that `check` accepts; others are reported and skipped."""
    passed_over = False
    for path in checkpoints(folder):
        try:
            checkpoint = read_checkpoint(path, largest)
            check(checkpoint)
        except ValueError as damage:
            tell(str(damage) if isinstance(damage, DamagedError) else f"{path} {damage}")
            passed_over = True
        else:
            if passed_over:
                tell(f"falling back to the previous checkpoint: {path}")
            return checkpoint
    raise ValueError(f"{folder} has no intact checkpoint of this run to resume from: start a new run")


def set_aside_newer(folder: Path, step: int) -> None:
    """Rename checkpoints that were skipped, so that they are not counted among those that are kept."""
    for path in checkpoints(folder):
        if int(path.name[5:]) > step:
            aside = path.with_name(path.name.replace("step-", "damaged-"))
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)


def prune(folder: Path, keep: int) -> None:
    """Remove all but the newest checkpoints."""
    for old in checkpoints(folder)[keep:]:
        _remove(old)


def sweep_partial(folder: Path) -> None:
    """Remove what a killed run left half written."""
    for partial in folder.glob(".step-*.partial"):
        shutil.rmtree(partial, ignore_errors=True)


def _is_sound(about: Any) -> bool:
    """Whether a description says all that is asked of it, in the types that it is written in."""
    match about:
        case {
            "format": 1,
            "step": int(step),
            "bytes": int(size),
            "tensors": str(),
            "recipe": dict(),
            "versions": dict(),
            "plain": list(plain),
            "position": {"seconds": int() | float() as seconds, "skipped": int(skipped), **figures},
        }:
            whole = all(type(number) is int and 0 <= number < 2**63 for number in (step, size, skipped))
            texts = all(isinstance(name, str) for name in plain)
            return whole and texts and 0 <= seconds < math.inf and not any(map(_is_nested, figures.values()))
    return False


def _is_nested(value: object) -> bool:
    return isinstance(value, dict | list)


def _sealed(about: dict[str, Any]) -> bytes:
    """JSON with a digest of itself in its first line."""
    body = json.dumps(about, indent=1, sort_keys=True).encode()
    return sha256(body).hexdigest().encode() + b"\n" + body + b"\n"


def _unsealed(path: Path) -> Any:
    digest, _, body = _read(path, _LARGEST_ABOUT).partition(b"\n")
    if sha256(body[:-1]).hexdigest().encode() != digest or body[-1:] != b"\n":
        raise DamagedError(f"{path} is damaged: its digest is not the one that was written")
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        raise DamagedError(f"{path} is damaged: it is not JSON, or goes too deep") from None


def _read(path: Path, largest: int) -> bytes:
    try:
        return read_bounded(path, largest)
    except OSError as error:
        raise DamagedError(str(error)) from None


def _remove(path: Path) -> None:
    """Rename it first, so that a half-removed checkpoint is never found."""
    aside = path.with_name(f".{path.name}.partial")
    shutil.rmtree(aside, ignore_errors=True)
    path.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)
