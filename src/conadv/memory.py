"""Out of memory, as the libraries below us report it."""

from __future__ import annotations

ADVICE = (
    "out of memory: lower --chunk-size, --width, --delay, --data.image-size, --data.memory, --data.workers or the "
    "number of ranks on this machine"
)

# Messages of PyTorch's allocators for the CPU and CUDA, for sizes that overflow, and for threads without a stack.
_SAID = ("can't allocate memory", "out of memory", "Storage size calculation overflowed", "can't start new thread")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that memory ran out. PyTorch raises RuntimeError for it."""
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(text in str(error) for text in _SAID)
    )
