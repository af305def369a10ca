"""How a process ends: at once with one line, or by a signal that a witness names, such as SIGILL or SIGKILL.

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
from typing import NoReturn

_GOODBYE, _NAME = b"left", "name: "
_REASONS = {
    "SIGILL": " (an instruction that the processor or the virtual machine lacks; if bfloat16 was used, "
    "set ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16)",
    "SIGKILL": " (by the system if memory ran out, by other ranks that it kept waiting, by a launcher or a user)",
}
# Before and after a run listens to these, they end it by default.
_REQUESTS = (signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)

_pipe: int | None = None


def say_line(text: str) -> None:
    """Print one line on standard error, if anything still reads it."""
    with suppress(OSError):
        print(" ".join(text.split()), file=sys.stderr, flush=True)


def end_process(status: int) -> NoReturn:
    """Exit immediately: a normal exit would wait for connections to ranks that do not answer."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    leave()
    os._exit(status)


def explained_status(status: int) -> str:
    """Describe the exit status of a child process, which is negative for a signal."""
    if status >= 0:
        return f"ended with status {status}"
    name = signal.Signals(-status).name
    return f"died of {name}{_REASONS.get(name, '')}"


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
            [sys.executable, "-I", "-S", __file__],
            env={key: value for key, value in os.environ.items() if key != "RANK"},  # it is no rank
            stdin=reader,
            stdout=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,  # signals to the group of the run do not reach it
        )
    os.close(reader)
    rename(who)
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
    if _pipe is not None:
        faulthandler.disable()
        for number in _REQUESTS:
            faulthandler.unregister(number)
        with suppress(OSError):
            os.write(_pipe, _GOODBYE)
        os.close(_pipe)
        _pipe = None


def _witness(words: bytes) -> None:
    """Say what a process died of, from its last words; nothing if it ended by itself, or was asked to."""
    text = words.decode(errors="replace")
    (*_, who), stack = re.findall(f"^{_NAME}(.*)$", text, re.MULTILINE), re.sub(f"{_NAME}.*\n", "", text)
    crash = re.search("Fatal Python error: (.+)", stack)
    if words.endswith(_GOODBYE) or (stack and not crash):  # then it is the stack where a request to stop came
        return
    described = crash[1].replace("-", " ") if crash else "Killed"
    matching = (number for number in signal.Signals if signal.strsignal(number) == described)
    number = next(matching, signal.SIGABRT)
    stack = stack.partition("\nExtension modules")[0]
    print(f"{who} {explained_status(-number)}\n{stack}".rstrip(), file=sys.stderr)


if __name__ == "__main__":
    for request in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(request, signal.SIG_IGN)
    _witness(sys.stdin.buffer.read())
