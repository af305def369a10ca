"""Name the signal that ends a run, such as SIGILL, or SIGKILL when memory runs out.

    run ──pipe──► witness, a small process that prints one line if the run dies

Python's faulthandler writes into the pipe when the run crashes, and `leave` when it ends by itself. If neither did, the
run was killed: no process can catch SIGKILL. Signals that ask a run to stop are not reported.
"""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_GOODBYE = b"left"
_NAME = "name: "
# As faulthandler calls them.
_CRASHES = {
    "Aborted": "SIGABRT",
    "Bus error": "SIGBUS",
    "Floating point exception": "SIGFPE",
    "Illegal instruction": "SIGILL",
    "Segmentation fault": "SIGSEGV",
}
_REASONS = {
    "SIGILL": "an instruction that the processor or the virtual machine lacks; if bfloat16 was used, "
    "set ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16",
    "SIGKILL": "by the system if memory ran out, or by a launcher or a user",
}

# Before and after a run listens to these, they end it by default.
_REQUESTS = (signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)

_pipe: int | None = None


def explained(name: str) -> str:
    """Return the name of a signal with what it means, where that is not obvious."""
    return f"{name} ({_REASONS[name]})" if name in _REASONS else name


def explained_status(status: int) -> str:
    """Describe the exit status of a child process, which is negative for a signal."""
    return f"died of {explained(signal.Signals(-status).name)}" if status < 0 else f"ended with status {status}"


@contextmanager
def witnessed(who: str) -> Iterator[None]:
    """Have one line printed on standard error if this process dies by a signal within the context.

    Args:
        who: What the line calls this process.
    """
    global _pipe
    reader, _pipe = os.pipe()
    with suppress(OSError):  # no more processes: then without a witness
        subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, who],
            env={key: value for key, value in os.environ.items() if key != "RANK"},  # it is no rank
            stdin=reader,
            stdout=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,  # signals to the group of the run do not reach it
        )
    os.close(reader)
    faulthandler.enable(_pipe, all_threads=False)
    for number in _REQUESTS:
        faulthandler.register(number, _pipe, all_threads=False, chain=True)
    try:
        yield
    finally:
        leave()


def rename(who: str) -> None:
    """Let the line call this process so from now on."""
    if _pipe is not None:
        os.write(_pipe, f"{_NAME}{who}\n".encode())


def leave() -> None:
    """Tell the witness that this process ends by itself; to be called before os._exit."""
    global _pipe
    if _pipe is None:
        return
    faulthandler.disable()
    for number in _REQUESTS:
        faulthandler.unregister(number)
    with suppress(OSError):
        os.write(_pipe, _GOODBYE)
    os.close(_pipe)
    _pipe = None


def verdict(who: str, words: bytes) -> str | None:
    """Return what a witness prints after the last words of a process; None: it ended by itself, or was asked to."""
    lines = words.decode(errors="replace").splitlines(keepends=True)
    text = "".join(line for line in lines if not line.startswith(_NAME))
    who = next((line.removeprefix(_NAME).strip() for line in lines[::-1] if line.startswith(_NAME)), who)
    found = re.search("Fatal Python error: (.+)", text)
    asked = text and not found  # then they are the stack where a request to stop came
    if asked or words.endswith(_GOODBYE):
        return None
    name = _CRASHES.get(found[1].replace("-", " "), found[1]) if found else "SIGKILL"
    stack = text.partition("\nExtension modules")[0]
    return f"{who} died of {explained(name)}\n{stack}".rstrip()


def _witness(who: str) -> None:
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    line = verdict(who, sys.stdin.buffer.read())
    if line is not None:
        print(line, file=sys.stderr)


if __name__ == "__main__":
    _witness(sys.argv[1])
