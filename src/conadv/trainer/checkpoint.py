"""Checkpoints: one safetensors file each, which is either complete or absent, written in a thread.

checkpoints/step-00000120.safetensors   tensors:   weights, optimizer state, stale weights of the twins in flight
                                        metadata:  progress, recipe and versions as JSON; a SHA-256 digest of all of it
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from conadv.atomic import replacing_path, writing

_FORMAT = 2


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


class BrokenCheckpointError(ValueError):
    """A checkpoint whose file was damaged or changed."""


def write_checkpoint(folder: Path, step: int, checkpoint: Checkpoint) -> None:
    """Write a checkpoint to a temporary file, flush it, then rename: readers see all of it or nothing.

    Args:
        folder: The folder of all checkpoints.
        step: How many steps were taken.
        checkpoint: What to write; its tensors are contiguous and in host memory.
    """
    final = folder / f"step-{step:08d}.safetensors"
    about = json.dumps({**checkpoint.about, "format": _FORMAT, "step": step})
    metadata = {"about": about, "digest": _digest(checkpoint.tensors, about)}
    with writing(final):
        folder.mkdir(parents=True, exist_ok=True)
        with replacing_path(final) as temporary:
            try:
                safetensors.torch.save_file(checkpoint.tensors, temporary, metadata)
            except SafetensorError as error:  # it has no errno; after ": I/O error: " comes what the system said
                raise OSError(re.sub(r" \(os error \d+\)|.*: ", "", str(error))) from None


def read_checkpoint(path: Path, largest: int | None = None) -> Checkpoint:
    """Read a checkpoint and verify its digest; a BrokenCheckpointError names a file that is damaged.

    Args:
        path: The file.
        largest: Refuse a file of more bytes than this, without reading it.
    """
    try:
        if largest is not None and path.stat().st_size > largest:
            raise BrokenCheckpointError(f"{path} has more than {largest} bytes, which is more than the model needs")
        with safe_open(path, "pt") as file:
            metadata = file.metadata()
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no dictionary
        about = json.loads(metadata["about"])
        is_whole = metadata["digest"] == _digest(tensors, metadata["about"])
    except BrokenCheckpointError:
        raise
    except (OSError, SafetensorError, ValueError, RuntimeError, LookupError, TypeError, MemoryError) as error:
        raise BrokenCheckpointError(f"{path} is damaged: {' '.join(str(error).split())[:200]}") from None
    if not is_whole:
        raise BrokenCheckpointError(f"{path} is damaged: its digest is not the one that was written")
    if not _is_sound(about) or f"step-{about['step']:08d}" != path.stem:
        raise BrokenCheckpointError(f"{path} belongs to another checkpoint or version")
    return Checkpoint(tensors, about)


def checkpoints(folder: Path) -> list[Path]:
    """List the checkpoints in a folder, newest first."""
    found = folder.glob("step-*.safetensors")
    named = [path for path in found if re.fullmatch(r"step-[0-9]{8,18}", path.stem) and path.is_file()]
    return sorted(named, key=step_of, reverse=True)


def step_of(path: Path) -> int:
    """Return the step in the name of a checkpoint."""
    return int(path.stem[5:])


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
            tell(str(damage) if isinstance(damage, BrokenCheckpointError) else f"{path} {damage}")
            skipped = True
        else:
            if skipped:
                tell(f"falling back to the previous checkpoint: {path}")
            return checkpoint
    raise ValueError(f"{folder} has no intact checkpoint of this run to resume from: start a new run")


def set_aside_newer(folder: Path, step: int) -> None:
    """Rename checkpoints newer than `step`, which were skipped, so that `prune` does not count them."""
    for path in checkpoints(folder):
        if step_of(path) > step:
            path.replace(path.with_name(path.name.replace("step-", "damaged-")))


def prune(folder: Path, keep: int) -> None:
    """Remove all but the newest checkpoints."""
    for old in checkpoints(folder)[keep:]:
        old.unlink()


class CheckpointSaver:
    """Writes checkpoints into the folder of a run, one after the other.

    Args:
        folder: The folder of the run.
        keep: How many of the newest checkpoints to keep.
        about: The description of the run that every checkpoint contains.
        before: Called in the thread before each checkpoint is written: it flushes the metrics, which must not be older.
    """

    def __init__(self, folder: Path, keep: int, about: dict[str, Any], before: Callable[[], None]) -> None:
        self._folder, self._keep = folder / "checkpoints", keep
        self._about = about
        self._before = before
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None
        prune(self._folder, keep)  # a killed run may have left one checkpoint more

    def check(self) -> None:
        """Raise the error of a checkpoint that could not be written, if there is one so far."""
        if self._writing is not None and self._writing.done():
            self._wait()

    def save(self, step: int, state: Callable[[], dict[str, Tensor]], **about: Any) -> None:
        """Copy the state after `step` steps, and start to write it."""
        self._wait()
        self._writing = self._thread.submit(self._write, step, Checkpoint(state(), {**self._about, **about}))

    def close(self) -> None:
        """Wait until everything is on disk, and raise the error of a write that failed."""
        try:
            self._wait()
        finally:
            self._thread.shutdown()

    def _write(self, step: int, checkpoint: Checkpoint) -> None:
        self._before()
        write_checkpoint(self._folder, step, checkpoint)
        prune(self._folder, self._keep)

    def _wait(self) -> None:
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()


class NullSaver:
    """The saver of ranks other than 0, which does nothing."""

    def check(self) -> None:
        pass

    def save(self, step: int, state: Callable[[], dict[str, Tensor]], **about: Any) -> None:
        pass


StateSaver = CheckpointSaver | NullSaver


def _digest(tensors: dict[str, Tensor], about: str) -> str:
    digest = sha256(about.encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _is_sound(about: Any) -> bool:
    """Check that the metadata has every field that is read later, with the right type."""
    match about:
        case {
            "format": 2,
            "step": int(step),
            "recipe": dict(),
            "versions": dict(),
            "plain": list(plain),
            "position": {"seconds": int() | float() as seconds, **others},
        }:
            counts = type(step) is int and 0 <= step < 2**63
            texts = all(isinstance(name, str) for name in plain)
            flat = not any(isinstance(value, dict | list) for value in others.values())
            return counts and texts and flat and 0 <= seconds < math.inf
    return False
