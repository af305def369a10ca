"""The lock of a run folder (run.lock), so that no two processes write into it at the same time.

The kernel's lock (flock) ends with its process. Not every network file system shares it between machines, so the holder
also writes heartbeats to the file: a lock file from another machine is taken over only after a while without one.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from .files import writing

# Seconds between two heartbeats, and how long to wait for one of another machine before its lock is taken over.
_BEAT = 4.0
_WATCH = 13.0
_LARGEST = 1000


class FolderLock:
    """The right to write into a run folder.

    Args:
        folder: The folder, which exists when the lock is acquired.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path = folder / "run.lock"
        self._file: int | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="lock", daemon=True)

    def acquire(self) -> None:
        """Take the lock, also one that a dead process left; a ValueError names a process that holds it."""
        if self._path.is_symlink():  # what it points to would be written over
            raise ValueError(f"{self._path} is a symbolic link: remove it")
        with writing(self._path):
            file, by_kernel = self._open()
            before = _holder(file)
            if before and not (by_kernel and before.get("host") == socket.gethostname()):
                self._watch(before)
            self._file = file
            self._write(0)
        self._thread.start()

    def release(self) -> None:
        """Remove the lock if this process holds it."""
        self._over.set()
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):
                self._path.unlink()
            os.close(file)

    def _open(self) -> tuple[int, bool]:
        """Return the open file, and whether we hold the kernel's lock; False: the file system has no locks."""
        while True:
            file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = _holder(file)
                os.close(file)
                self._refuse(holder)
            except OSError:
                return file, False
            with suppress(FileNotFoundError):  # its holder removed it between our two calls
                if os.path.samestat(self._path.stat(), os.fstat(file)):
                    return file, True
            os.close(file)

    def _watch(self, before: dict[str, Any]) -> None:
        """Wait for a heartbeat of another machine, and refuse if there is one."""
        end = time.monotonic() + _WATCH
        while time.monotonic() < end:
            time.sleep(_BEAT / 4)
            try:
                file = os.open(self._path, os.O_RDONLY)  # opened again, so that a network file system asks the server
            except FileNotFoundError:
                return
            now = _holder(file)
            os.close(file)
            if now != before:
                self._refuse(now)

    def _refuse(self, holder: dict[str, Any]) -> NoReturn:
        who = f"process {holder.get('pid', '?')} on {holder.get('host', '?')}"
        raise ValueError(f"{self._folder} is in use by {who}: stop that run or wait for its end, then resume")

    def _beat(self) -> None:
        beats = 0
        while not self._over.wait(_BEAT):
            beats += 1
            with suppress(OSError):
                self._write(beats)

    def _write(self, beats: int) -> None:
        file = self._file
        if file is not None:
            text = json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "beats": beats}) + "\n"
            os.pwrite(file, text.encode(), 0)
            os.ftruncate(file, len(text))


def _holder(file: int) -> dict[str, Any]:
    """Read which process wrote a lock file; empty if the file is empty or half written."""
    try:
        found = json.loads(os.pread(file, _LARGEST, 0))
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
