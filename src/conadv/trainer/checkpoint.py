"""Checkpoints: one safetensors file each, complete or absent, written in a thread; and the state of a run in them.

checkpoints/step-00000120.safetensors
    model.NAME           weights and buffers
    optimizer.NAME:KEY   optimizer state of a parameter
    stale.0.NAME         weights that twins in flight were generated with
    metadata             progress, recipe, versions and numbers of the optimizer as JSON; a SHA-256 digest of everything
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.optim import Optimizer

from conadv.atomic import replacing_path, writing
from conadv.core.state import below
from conadv.core.twins import StaleWeights

_FORMAT = 3


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


def write_state(path: Path, state: Checkpoint) -> None:
    """Write a file with a digest: to a temporary one, flushed, then renamed, so that readers see all of it or nothing.

    Args:
        path: The file; its folder is created.
        state: What to write; its tensors are contiguous and in host memory.
    """
    about = json.dumps({**state.about, "format": _FORMAT})
    metadata = {"about": about, "digest": _digest(state.tensors, about)}
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing_path(path) as temporary:
            try:
                safetensors.torch.save_file(state.tensors, temporary, metadata)
            except SafetensorError as error:  # it has no errno; after ": I/O error: " comes what the system said
                raise OSError(re.sub(r" \(os error \d+\)|.*: ", "", str(error))) from None


def read_state(path: Path) -> Checkpoint:
    """Read what `write_state` wrote, and verify its digest; a ValueError says what is wrong with the file."""
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata()
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no dictionary
        about = json.loads(metadata["about"])
        is_whole = metadata["digest"] == _digest(tensors, metadata["about"])
        is_known = about["format"] == _FORMAT
    except (OSError, SafetensorError, ValueError, RuntimeError, LookupError, TypeError, MemoryError) as error:
        raise ValueError(f"is damaged: {' '.join(str(error).split())[:200]}") from None
    if not is_whole:
        raise ValueError("is damaged: its digest is not the one that was written")
    if not is_known:
        raise ValueError("was written by another version")
    return Checkpoint(tensors, about)


def write_checkpoint(folder: Path, step: int, checkpoint: Checkpoint) -> None:
    """Write the checkpoint after `step` steps into the folder of all checkpoints."""
    about = {**checkpoint.about, "step": step}
    write_state(folder / f"step-{step:08d}.safetensors", Checkpoint(checkpoint.tensors, about))


def read_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint; a ValueError says what is wrong with the file."""
    checkpoint = read_state(path)
    match checkpoint.about:
        case {
            "step": int(step),
            "recipe": dict(),
            "versions": dict(),
            "plain": [*plain],
            "numbers": dict(),
            "position": {"seconds": int() | float()},
        } if step == step_of(path) and all(f"model.{name}" in checkpoint.tensors for name in plain):
            return checkpoint
    raise ValueError("belongs to another step or version")


def checkpoints(folder: Path) -> list[Path]:
    """List the checkpoints in a folder, newest first."""
    found = folder.glob("step-*.safetensors")
    named = [path for path in found if re.fullmatch(r"step-[0-9]{8,18}", path.stem) and path.is_file()]
    return sorted(named, key=step_of, reverse=True)


def step_of(path: Path) -> int:
    """Return the step in the name of a checkpoint."""
    return int(path.stem[5:])


def newest_whole(
    folder: Path, tell: Callable[[str], None], check: Callable[[Checkpoint], None] = lambda checkpoint: None
) -> Checkpoint:
    """Return the newest checkpoint that is intact and that `check` accepts; others are reported and skipped."""
    skipped = False
    for path in checkpoints(folder):
        try:
            checkpoint = read_checkpoint(path)
            check(checkpoint)
        except ValueError as damage:
            tell(f"{path} {damage}")
            skipped = True
        else:
            if skipped:
                tell(f"falling back to the previous checkpoint: {path}")
            return checkpoint
    raise ValueError(f"{folder} has no intact checkpoint of this run to resume from: start a new run")


def set_aside_newer(folder: Path, step: int) -> None:
    """Rename checkpoints newer than `step`, which were skipped, so that they are not counted among those to keep."""
    for path in checkpoints(folder):
        if step_of(path) > step:
            path.replace(path.with_name(path.name.replace("step-", "damaged-")))


class CheckpointSaver:
    """Writes checkpoints into the folder of a run, one after the other, and removes all but the newest.

    Args:
        folder: The folder of the run.
        keep: How many of the newest checkpoints to keep.
        about: The description of the run that every checkpoint contains.
        before: Called in the thread before each checkpoint is written: it flushes the metrics, which must not be older.
    """

    def __init__(self, folder: Path, keep: int, about: dict[str, Any], before: Callable[[], None]) -> None:
        self._folder, self._keep = folder / "checkpoints", keep
        self._about, self._before = about, before
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None
        self._prune()  # a killed run may have left one checkpoint more

    def check(self) -> None:
        """Raise the error of a checkpoint that could not be written, if there is one so far."""
        if self._writing is not None and self._writing.done():
            self._wait()

    def save(self, step: int, state: Checkpoint, position: dict[str, Any]) -> None:
        """Start to write the state after `step` steps, as `gather` returns it."""
        self._wait()
        checkpoint = Checkpoint(state.tensors, {**self._about, **state.about, "position": position})
        self._writing = self._thread.submit(self._write, step, checkpoint)

    def close(self) -> None:
        """Wait until everything is on disk, and raise the error of a write that failed."""
        try:
            self._wait()
        finally:
            self._thread.shutdown()

    def _write(self, step: int, checkpoint: Checkpoint) -> None:
        self._before()
        write_checkpoint(self._folder, step, checkpoint)
        self._prune()

    def _prune(self) -> None:
        for old in checkpoints(self._folder)[self._keep :]:
            old.unlink()

    def _wait(self) -> None:
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()


def gather(model: nn.Module, optimizer: Optimizer, stale: StaleWeights) -> Checkpoint:
    """Copy the whole state to the host."""
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    numbers: dict[str, float | None] = {}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                tensors[f"optimizer.{name}:{key}"] = value
            elif value is None or isinstance(value, bool | int | float):
                numbers[f"optimizer.{name}:{key}"] = value
            else:
                kind = type(value).__name__
                raise TypeError(f"a checkpoint holds tensors, numbers and None of an optimizer, not {kind}")
    for number, version in enumerate(stale.versions):
        tensors |= {f"stale.{number}.{name}": tensor for name, tensor in version.items()}
    copied = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
    return Checkpoint(copied, {"numbers": numbers})


def restore(state: Checkpoint, model: nn.Module, optimizer: Optimizer, stale: StaleWeights) -> None:
    """Restore the state of a checkpoint that `check_tensors` accepted."""
    model.load_state_dict(below("model.", state.tensors))
    values: dict[str, Any] = {**state.tensors, **state.about["numbers"]}
    for name, parameter in model.named_parameters():
        saved = below(f"optimizer.{name}:", values)
        if saved:
            optimizer.state[parameter] = {key: _beside(parameter, value) for key, value in saved.items()}
    if stale.versions:
        stale.load(stale_versions(state.tensors))


def _beside(parameter: nn.Parameter, value: Any) -> Any:
    """Copy optimizer state to the device and memory format of its parameter, so that sums round alike."""
    if not isinstance(value, Tensor):
        return value
    if value.shape != parameter.shape:
        return value.to(parameter.device if value.dim() else "cpu", copy=True)  # numbers stay on the host
    return torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def stale_versions(tensors: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """Return the stale weights in a checkpoint, oldest first."""
    count = len({name.split(".")[1] for name in tensors if name.startswith("stale.")})
    return [below(f"stale.{number}.", tensors) for number in range(count)]


def check_tensors(tensors: Mapping[str, Tensor], model: nn.Module, delay: int) -> None:
    """Raise a ValueError unless a checkpoint has the weights of this model, and stale ones of `delay` steps."""
    expected = {
        copy + name: (tensor.shape, tensor.dtype)
        for copy in ("model.", *(f"stale.{number}." for number in range(delay)))
        for name, tensor in model.state_dict().items()
    }
    found = {name: (one.shape, one.dtype) for name, one in tensors.items() if not name.startswith("optimizer.")}
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            wrong = "is missing, unexpected, or has the wrong shape or dtype"
            raise ValueError(f"is of another model: tensor {name} {wrong}")


def _digest(tensors: dict[str, Tensor], about: str) -> str:
    digest = sha256(about.encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
