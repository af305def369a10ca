"""The format of checkpoints: one folder per checkpoint, which is either complete or absent.

step-00000120/   state.safetensors   weights, optimizer state, and the stale weights of the twins in flight
                 checkpoint.json     progress, recipe, versions, and SHA-256 digests of the tensors and of itself
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
# Ours have a few thousand bytes, and the names of up to 100,000 classes.
_LARGEST_ABOUT = 2**25


class Checkpoint(NamedTuple):
    """The content of a checkpoint: tensors by name, and everything else as JSON values."""

    tensors: dict[str, Tensor]
    about: dict[str, Any]

    def pack(self) -> bytes:
        """Serialize the checkpoint to bytes, to broadcast it."""
        about = json.dumps(self.about).encode()
        return len(about).to_bytes(8) + about + safetensors.torch.save(self.tensors)

    @classmethod
    def unpack(cls, data: bytes) -> Checkpoint:
        """Restore what `pack` returned."""
        end = 8 + int.from_bytes(data[:8])
        return cls(safetensors.torch.load(data[end:]), json.loads(data[8:end]))


class DamagedError(ValueError):
    """A checkpoint whose files were damaged or changed."""


def write_checkpoint(folder: Path, step: int, checkpoint: Checkpoint, data: memoryview | None = None) -> None:
    """Write a checkpoint to a temporary folder, flush it, then rename: readers see all of it or nothing.

    Args:
        folder: The folder of all checkpoints.
        step: How many steps were taken.
        checkpoint: What to write.
        data: The tensors as the bytes of a safetensors file, if the caller has them already.
    """
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
    """Read a checkpoint and verify its digests; a DamagedError names the file that is damaged.

    Args:
        path: The folder of the checkpoint.
        largest: Refuse more bytes of tensors than this, without reading them.
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
    """List the checkpoints in a folder, newest first."""
    named = [path for path in folder.glob("step-*") if re.fullmatch(r"step-[0-9]{8,18}", path.name)]
    return sorted(named, key=lambda path: int(path.name[5:]), reverse=True)


def newest_whole(
    folder: Path,
    tell: Callable[[str], None],
    check: Callable[[Checkpoint], None] = lambda checkpoint: None,
    largest: int | None = None,
) -> Checkpoint:
    """Return the newest checkpoint that is intact and that `check` accepts; others are reported and skipped."""
    skipped = False
    for path in checkpoints(folder):
        try:
            checkpoint = read_checkpoint(path, largest)
            check(checkpoint)
        except ValueError as damage:
            tell(str(damage) if isinstance(damage, DamagedError) else f"{path} {damage}")
            skipped = True
        else:
            if skipped:
                tell(f"falling back to the previous checkpoint: {path}")
            return checkpoint
    raise ValueError(f"{folder} has no intact checkpoint of this run to resume from: start a new run")


def set_aside_newer(folder: Path, step: int) -> None:
    """Rename checkpoints newer than `step`, which were skipped, so that `prune` does not count them."""
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
    """Remove partial checkpoints that a killed run left behind."""
    for partial in folder.glob(".step-*.partial"):
        shutil.rmtree(partial, ignore_errors=True)


def _is_sound(about: Any) -> bool:
    """Check that checkpoint.json has every field that is read later, with the right type."""
    match about:
        case {
            "format": 1,
            "step": int(step),
            "bytes": int(size),
            "tensors": str(),
            "recipe": dict(),
            "versions": dict(),
            "plain": list(plain),
            "position": {"seconds": int() | float() as seconds, "skipped": int(skipped), **others},
        }:
            counts = all(type(number) is int and 0 <= number < 2**63 for number in (step, size, skipped))
            texts = all(isinstance(name, str) for name in plain)
            flat = not any(isinstance(value, dict | list) for value in others.values())
            return counts and texts and flat and 0 <= seconds < math.inf
    return False


def _sealed(about: dict[str, Any]) -> bytes:
    """Serialize to JSON, after a line with its SHA-256."""
    body = json.dumps(about, indent=1, sort_keys=True).encode()
    return sha256(body).hexdigest().encode() + b"\n" + body + b"\n"


def _unsealed(path: Path) -> Any:
    digest, _, body = _read(path, _LARGEST_ABOUT).partition(b"\n")
    if sha256(body[:-1]).hexdigest().encode() != digest or body[-1:] != b"\n":
        raise DamagedError(f"{path} is damaged: its digest is not the one that was written")
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        raise DamagedError(f"{path} is damaged: it is not JSON, or nested too deeply") from None


def _read(path: Path, largest: int) -> bytes:
    try:
        return read_bounded(path, largest)
    except OSError as error:
        raise DamagedError(str(error)) from None


def _remove(path: Path) -> None:
    """Remove a checkpoint; it is renamed first, so that a partly removed one is never found."""
    aside = path.with_name(f".{path.name}.partial")
    shutil.rmtree(aside, ignore_errors=True)
    path.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)
