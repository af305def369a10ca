"""Checkpoints: one safetensors file each, complete or absent, written in a thread; and the best weights of a run.

checkpoints/step-00000120.safetensors
    model.NAME           weights and buffers
    optimizer.NAME:KEY   optimizer state of a parameter
    stale.0.NAME         weights that twins in flight were generated with
    metadata             progress, recipe, versions and numbers of the optimizer as JSON; a SHA-256 digest of everything
best.safetensors         the weights of the best evaluation, for the plain model, and the facts of `network_facts`
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

from conadv.atomic import replacing, writing
from conadv.core.splitbn import plain_state_dict
from conadv.core.state import below
from conadv.core.twins import StaleWeights

_FORMAT = 3
BEST = "best.safetensors"
# The first of these that an evaluation has decides which weights are the best ones.
BEST_BY = ("held_out_robust_top1", "test_top1")
_COLLAPSE = 0.5  # of the best robust accuracy


class Checkpoint(NamedTuple):
    """The content of a checkpoint: tensors by name, and everything else as JSON values."""

    tensors: dict[str, Tensor]
    about: dict[str, Any]

    def pack(self) -> bytes:
        """The checkpoint as bytes, to broadcast it."""
        about = json.dumps(self.about).encode()
        return len(about).to_bytes(8) + about + safetensors.torch.save(self.tensors)

    @classmethod
    def unpack(cls, data: bytes) -> Checkpoint:
        """The checkpoint that `pack` was called on."""
        end = 8 + int.from_bytes(data[:8])
        return cls(safetensors.torch.load(data[end:]), json.loads(data[8:end]))


def write_checkpoint(path: Path, state: Checkpoint) -> None:
    """Write a file with a digest, which readers see whole or not at all. The tensors are contiguous, in host memory."""
    about = json.dumps({**state.about, "format": _FORMAT})
    metadata = {"about": about, "digest": _digest(state.tensors, about)}
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            try:
                safetensors.torch.save_file(state.tensors, temporary, metadata)
            except SafetensorError as error:  # it has no errno; after ": I/O error: " comes what the system said
                raise OSError(re.sub(r" \(os error \d+\)|.*: ", "", str(error))) from None


def read_checkpoint(path: Path) -> Checkpoint:
    """Read what `write_checkpoint` wrote, and verify its digest; a ValueError says what is wrong with the file."""
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
) -> Checkpoint | None:
    """The newest checkpoint that is intact and that `check` accepts; others are reported. None: there are none."""
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
    if skipped:
        raise ValueError(f"{folder} has no intact checkpoint of this run to resume from: start a new run")
    return None


class CheckpointSaver:
    """Writes checkpoints into the folder of a run, one after the other in a thread, and keeps the newest.

    Those beyond `start`, the step that the run starts at, could not be used, and are not counted. Each describes the
    run by `about`. `before` is called before each is written: it flushes the metrics, which must not be older.
    """

    def __init__(self, folder: Path, keep: int, start: int, about: dict[str, Any], before: Callable[[], None]) -> None:
        self._folder, self._keep = folder / "checkpoints", keep
        self._about, self._before = about, before
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None
        self._prune(start)  # a killed run may have left one checkpoint more

    def check(self) -> None:
        """Raise the error of a checkpoint that could not be written, if there is one so far."""
        if self._writing is not None and self._writing.done():
            self._wait()

    def save(self, step: int, state: Checkpoint, position: dict[str, Any]) -> None:
        """Start to write the state after `step` steps, as `gather` returns it."""
        self._wait()
        checkpoint = Checkpoint(state.tensors, {**self._about, **state.about, "step": step, "position": position})
        self._writing = self._thread.submit(self._write, step, checkpoint)

    def close(self) -> None:
        """Wait until everything is on disk, and raise the error of a write that failed."""
        try:
            self._wait()
        finally:
            self._thread.shutdown()

    def _write(self, step: int, checkpoint: Checkpoint) -> None:
        self._before()
        write_checkpoint(self._folder / f"step-{step:08d}.safetensors", checkpoint)
        self._prune(step)

    def _prune(self, step: int) -> None:
        written = [path for path in checkpoints(self._folder) if step_of(path) <= step]
        for old in written[self._keep :]:
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


def restore(state: Checkpoint, model: nn.Module, optimizer: Optimizer) -> None:
    """Restore the weights and the optimizer from a checkpoint that `check_tensors` accepted."""
    model.load_state_dict(below("model.", state.tensors))
    values: dict[str, Any] = {**state.tensors, **state.about["numbers"]}
    for name, parameter in model.named_parameters():
        saved = below(f"optimizer.{name}:", values)
        if saved:
            optimizer.state[parameter] = {key: _beside(parameter, value) for key, value in saved.items()}


def _beside(parameter: nn.Parameter, value: Any) -> Any:
    """Copy optimizer state to the device and memory format of its parameter, so that sums round alike."""
    if not isinstance(value, Tensor):
        return value
    if value.shape != parameter.shape:
        return value.to(parameter.device if value.dim() else "cpu", copy=True)  # numbers stay on the host
    return torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def stale_versions(tensors: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """The stale weights in a checkpoint, oldest first."""
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


class BestWeights:
    """A sink that keeps the weights of the best evaluation: robust accuracy on held-out images, or test accuracy.

    Robust training with few steps may collapse within an epoch (catastrophic overfitting): the accuracy under a weak
    attack still rises, and that under a strong one falls to zero. `say` prints a line about it.
    """

    def __init__(self, folder: Path, model: nn.Module, network: dict[str, Any], say: Callable[[str], None]) -> None:
        self._path = folder / BEST
        self._model, self._network, self._say = model, network, say
        self._best = read_best(self._path).about if self._path.exists() else None
        self._warned = False

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Take note of an evaluation; a step without one changes nothing."""
        metric = next((name for name in BEST_BY if name in metrics), None)
        if metric is None:
            return
        accuracy = float(metrics[metric])
        if self._best is None or accuracy > self._best[metric]:
            self._best = {"step": step, metric: accuracy, "network": self._network}
            tensors = {name: one.cpu().contiguous() for name, one in plain_state_dict(self._model).items()}
            write_checkpoint(self._path, Checkpoint(tensors, self._best))
        elif metric == BEST_BY[0] and accuracy < _COLLAPSE * self._best[metric] and not self._warned:
            self._warned = True
            self._say(
                f"robust accuracy on the held-out images fell from {self._best[metric]:.1f} % (step "
                f"{self._best['step']}) to {accuracy:.1f} %, which is catastrophic overfitting: those weights "
                f"are in {self._path}; try more --attack.steps or a smaller --attack.step-size"
            )


def read_best(path: Path) -> Checkpoint:
    """Return the weights in best.safetensors, by the names of the plain model, with their step and accuracy."""
    if not path.exists():
        raise ValueError(f"{path}: no such file; a run with --eval-every writes it")
    try:
        return read_checkpoint(path)
    except ValueError as error:
        raise ValueError(f"{path} {error}: remove it") from None
