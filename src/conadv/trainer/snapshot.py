"""A copy of the state of a run in host memory, in safetensors' format, made while the next step computes.

save ──► a thread (on CUDA: a stream) copies all tensors ──► before_update: now they may change ──► write

Between two updates nothing changes weights, optimizer state or stale weights, so training does not wait for the copy.
The copy is written to the file as it is, and neither copying nor hashing nor writing holds Python's GIL.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from concurrent.futures import Future

import torch
from torch import Tensor

# Names of dtypes in the header of a safetensors file.
_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class Snapshot:
    """The bytes of a safetensors file, into which the tensors are copied.

    Args:
        tensors: By name. On CUDA the copy starts now, on a stream of its own; otherwise `copy` does it, and the
            tensors must not change before.
        buffer: The buffer of an earlier snapshot, which is reused if it has the right size.
    """

    def __init__(self, tensors: Mapping[str, Tensor], buffer: Tensor | None = None) -> None:
        self._tensors = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
        header = _header(self._tensors)
        size = len(header) + sum(tensor.nbytes for tensor in tensors.values())
        on_cuda = any(tensor.is_cuda for tensor in tensors.values())
        if buffer is None or buffer.numel() != size:
            buffer = torch.empty(size, dtype=torch.uint8, pin_memory=on_cuda)
        self.buffer = buffer
        self._begin = len(header)
        buffer[: len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        self._copied: torch.cuda.Event | None = None
        if on_cuda:
            self._copy_on_device()

    def copy(self) -> memoryview:
        """Copy the tensors, in any thread, and return the bytes of the file."""
        if self._copied is not None:
            self._copied.synchronize()
        else:
            self._copy_all()
        return self.buffer.numpy().data

    def before_update(self, copied: Future[None]) -> None:
        """Wait for the copy: on CUDA only the current stream waits, otherwise the host waits for the thread."""
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)
        else:
            copied.result()

    def _copy_on_device(self) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._copy_all()
            self._copied = torch.cuda.Event()
            self._copied.record()

    @torch.no_grad()
    def _copy_all(self) -> None:
        begin = self._begin
        for _, tensor in self._tensors:
            place = self.buffer[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            place.copy_(tensor, non_blocking=True)
            begin += tensor.nbytes


def _header(tensors: list[tuple[str, Tensor]]) -> bytes:
    """Return the header of the file: its size, then names, dtypes, shapes and offsets of the tensors as JSON."""
    entries, end = {}, 0
    for name, tensor in tensors:
        begin, end = end, end + tensor.nbytes
        entries[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # so that every tensor starts at a multiple of its element size
    return len(text).to_bytes(8, "little") + text
