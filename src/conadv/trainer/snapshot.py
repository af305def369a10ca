"""A copy of the state of a run on the host, made while the next step computes, and laid out as it goes into the file.

save ──► a thread (on CUDA: a stream) copies all tensors ──► before_update: now they may change ──► write

Between two updates nothing writes into weights, optimizer or stale weights, so training does not wait for the copy. It
is one string of bytes in safetensors' format: to write it takes no further copy, and neither copying nor hashing nor
writing holds the interpreter lock.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from concurrent.futures import Future

import torch
from torch import Tensor

# Names of types in the header of a safetensors file.
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
    """The bytes of a safetensors file, into which the tensors are copied later.

    Args:
        tensors: By name. Those on CUDA are copied in the order of the device's queue, from now on; the others by
            `copy`, until which they must stay as they are.
        buffer: That of an earlier snapshot, which is used again if it has the right size.
    """

    def __init__(self, tensors: Mapping[str, Tensor], buffer: Tensor | None = None) -> None:
        self._tensors = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
        header = _header(self._tensors)
        size = len(header) + sum(tensor.nbytes for tensor in tensors.values())
        self._on_cuda = any(tensor.is_cuda for tensor in tensors.values())
        if buffer is None or buffer.numel() != size:
            buffer = torch.empty(size, dtype=torch.uint8, pin_memory=self._on_cuda)
        self.buffer = buffer
        self._begin = len(header)
        buffer[: len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        self._there: torch.cuda.Event | None = None
        if self._on_cuda:
            self._copy_on_device()

    def copy(self) -> memoryview:
        """Copy the tensors, in any thread, and return the whole file."""
        if self._there is not None:
            self._there.synchronize()
        else:
            self._copy_all()
        return self.buffer.numpy().data

    def before_update(self, copied: Future[None]) -> None:
        """Let what follows come after the copy: on CUDA in the order of the queue, else wait for the thread."""
        if self._there is not None:
            torch.cuda.current_stream().wait_event(self._there)
        else:
            copied.result()

    def _copy_on_device(self) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._copy_all()
            self._there = torch.cuda.Event()
            self._there.record()

    @torch.no_grad()
    def _copy_all(self) -> None:
        begin = self._begin
        for _, tensor in self._tensors:
            place = self.buffer[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            place.copy_(tensor, non_blocking=True)
            begin += tensor.nbytes


def _header(tensors: list[tuple[str, Tensor]]) -> bytes:
    """What comes before the tensors: its size, and their names, types, shapes and places as JSON."""
    entries, end = {}, 0
    for name, tensor in tensors:
        begin, end = end, end + tensor.nbytes
        place = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
        entries[name] = place
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # so that every tensor begins at a multiple of its element's size
    return len(text).to_bytes(8, "little") + text
