"""Checkpoints: one safetensors file each, complete or absent, written in a thread; and the state of a run in them.

checkpoints/step-00000120.safetensors
    model.NAME           weights and buffers
    optimizer.NAME:KEY   optimizer state of a parameter
    stale.0.NAME         weights that twins in flight were generated with
    metadata             progress, recipe and versions as JSON; a SHA-256 digest of everything
"""

from __future__ import annotations

import json
import math
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

_FORMAT = 2
_DTYPES = {bool: torch.bool, int: torch.int64, float: torch.float64}


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


def read_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint and verify its digest; a ValueError says what is wrong with the file."""
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata()
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no dictionary
        about = json.loads(metadata["about"])
        is_whole = metadata["digest"] == _digest(tensors, metadata["about"])
    except (OSError, SafetensorError, ValueError, RuntimeError, LookupError, TypeError, MemoryError) as error:
        raise ValueError(f"is damaged: {' '.join(str(error).split())[:200]}") from None
    if not is_whole:
        raise ValueError("is damaged: its digest is not the one that was written")
    if not _is_sound(about) or f"step-{about['step']:08d}" != path.stem:
        raise ValueError("belongs to another checkpoint or version")
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
        self._about = about
        self._before = before
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None
        self._prune()  # a killed run may have left one checkpoint more

    def check(self) -> None:
        """Raise the error of a checkpoint that could not be written, if there is one so far."""
        if self._writing is not None and self._writing.done():
            self._wait()

    def save(self, step: int, tensors: dict[str, Tensor], position: dict[str, Any]) -> None:
        """Start to write the state after `step` steps."""
        self._wait()
        checkpoint = Checkpoint(tensors, {**self._about, "position": position})
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


def gather(model: nn.Module, optimizer: Optimizer, stale: StaleWeights) -> dict[str, Tensor]:
    """Copy the whole state to the host."""
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    tensors |= _optimizer_state(model, optimizer)
    for number, version in enumerate(stale.versions):
        tensors.update({f"stale.{number}.{name}": tensor for name, tensor in version.items()})
    return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}


def restore(tensors: Mapping[str, Tensor], model: nn.Module, optimizer: Optimizer, stale: StaleWeights) -> None:
    """Restore the state of a checkpoint that `check_tensors` accepted."""
    model.load_state_dict(below("model.", tensors))
    fill_state(optimizer)
    for name, parameter in model.named_parameters():
        state = optimizer.state.pop(parameter, {})
        saved = {key: tensors[label] for key in state if (label := _label(name, key)) in tensors}
        if saved:
            optimizer.state[parameter] = {key: _like(state[key], saved.get(key)) for key in state}
    if stale.versions:
        stale.load(stale_versions(tensors))


def stale_versions(tensors: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """Return the stale weights in a checkpoint, oldest first."""
    count = len({name.split(".")[1] for name in tensors if name.startswith("stale.")})
    return [below(f"stale.{number}.", tensors) for number in range(count)]


def check_tensors(tensors: Mapping[str, Tensor], model: nn.Module, optimizer: Optimizer, delay: int) -> None:
    """Raise a ValueError unless a checkpoint has the tensors of this run; fills the state of the optimizer.

    A parameter that has had no gradient yet has no optimizer state.
    """
    fill_state(optimizer)
    expected = _optimizer_state(model, optimizer)
    for copy in ("model.", *(f"stale.{number}." for number in range(delay))):
        expected |= {copy + name: tensor for name, tensor in model.state_dict().items()}
    used = {name.rpartition(":")[0] for name in tensors if name.startswith("optimizer.")}
    optional = {name for name in expected if name.startswith("optimizer.") and name.rpartition(":")[0] not in used}
    for name in sorted((expected.keys() - optional) | tensors.keys()):
        own, saved = expected.get(name), tensors.get(name)
        if own is None or saved is None or (own.shape, own.dtype) != (saved.shape, saved.dtype):
            wrong = "is missing, unexpected, or has the wrong shape or dtype"
            raise ValueError(f"is of another model or optimizer: tensor {name} {wrong}")


def fill_state(optimizer: Optimizer) -> None:
    """Make the optimizer create its state, by a step with zero gradients; weights and gradients are restored.

    Only the optimizer knows the names, shapes, dtypes, devices and memory formats of its state.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    kept = [(parameter.detach().clone(), parameter.grad) for parameter in parameters]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    with torch.no_grad():
        for parameter, (weight, gradient) in zip(parameters, kept, strict=True):
            parameter.copy_(weight)
            parameter.grad = gradient


def _label(parameter: str, key: str) -> str:
    return f"optimizer.{parameter}:{key}"


def _optimizer_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Return the optimizer state of the parameters, by the names in a checkpoint; values that are None are left out."""
    return {
        _label(name, key): _as_tensor(value)
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
        if value is not None
    }


def _as_tensor(value: Any) -> Tensor:
    if not isinstance(value, Tensor | bool | int | float):
        raise TypeError(f"a checkpoint holds tensors, numbers and None of an optimizer, not {type(value).__name__}")
    return value if isinstance(value, Tensor) else torch.tensor(value, dtype=_DTYPES[type(value)])


def _like(own: Any, saved: Tensor | None) -> Any:
    """Convert a saved value to the type, device and memory format of the optimizer's own, so that results are equal."""
    if saved is None:
        return own
    return own.copy_(saved) if isinstance(own, Tensor) else type(own)(saved.item())


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
