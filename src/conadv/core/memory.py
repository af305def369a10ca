"""Out of memory, as the libraries below us report it."""

from __future__ import annotations

ADVICE = (
    "out of memory: lower --chunk-size, --width, --delay, --data.image-size, --data.memory, --data.workers or the "
    "number of ranks on this machine"
)

# PyTorch's allocator for the CPU, CUDA's, sizes that no allocator is asked for, and threads without a stack.
_SAID = ("can't allocate memory", "out of memory", "Storage size calculation overflowed", "can't start new thread")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory did not suffice. PyTorch raises RuntimeError for it."""
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(text in str(error) for text in _SAID)
    )
