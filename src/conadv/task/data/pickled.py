"""Read the pickled tables of CIFAR's Python version without unpickling them.

pickletools parses the instructions and executes none. We execute only those that make numbers, strings, lists, dicts
and an array of bytes. An instruction that would import or call anything else is an error.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray


class ByteTable:
    """Stands for a NumPy array, which must be of bytes."""

    array: NDArray[np.uint8]

    def build(self, state: object) -> None:
        match state:
            case (int(), tuple(shape), ByteType(), bool(by_column), bytes(data)):
                self.array = np.frombuffer(data, np.uint8).reshape(shape, order="F" if by_column else "C")
            case _:
                raise ValueError("an array that is not of bytes")


class ByteType:
    """Stands for a NumPy dtype, which must be bytes."""

    def build(self, state: object) -> None:
        pass


_ARRAYS = ("numpy.core.multiarray _reconstruct", "numpy._core.multiarray _reconstruct")
_KNOWN = (*_ARRAYS, "numpy ndarray", "numpy dtype", "_codecs encode")


@dataclass(frozen=True)
class _Name:
    """A name that the pickle would import."""

    path: str

    def __post_init__(self) -> None:
        if self.path not in _KNOWN:
            raise ValueError(f"it would import {self.path}")

    def call(self, arguments: object) -> object:
        match self.path, arguments:
            case path, tuple() if path in _ARRAYS:
                return ByteTable()
            case "numpy dtype", (b"u1" | "u1", *_):
                return ByteType()
            case "_codecs encode", (str(text), b"latin1" | "latin1"):
                return text.encode("latin1")
        raise ValueError(f"it would call {self.path}")


def read_pickle(data: bytes) -> Any:
    """Read numbers, strings, lists, tuples, dicts and `ByteTable`s; anything else raises a ValueError."""
    machine = _Machine(len(data))
    for instruction, argument, _ in pickletools.genops(data):
        if instruction.name == "STOP":
            return machine.pop()
        machine.run(instruction.name, argument)
    raise ValueError("it has no STOP instruction")


_MARK = object()
_NUMBERS = {"INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"}
_TEXTS = {"UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8"}
_PLAIN = _NUMBERS | _TEXTS
_STRINGS = {"STRING", "BINSTRING", "SHORT_BINSTRING"}
_CONSTANTS: dict[str, Callable[[], object]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_DICT": dict,
    "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple,
    "MARK": lambda: _MARK,
}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


@dataclass
class _Machine:
    room: int
    """Bytes that may still be made of text, which has as many itself: the same text again and again has more."""
    stack: list[Any] = field(default_factory=list)
    memo: dict[int, Any] = field(default_factory=dict)

    def run(self, name: str, argument: Any) -> None:
        if name in _PLAIN:
            self.stack.append(argument)
        elif name in _STRINGS:  # Python 2's, which pickletools reads as Latin-1
            self.stack.append(argument.encode("latin1") if isinstance(argument, str) else argument)
        elif name in _CONSTANTS:
            self.stack.append(_CONSTANTS[name]())
        elif name in _TUPLES:
            self.stack[-_TUPLES[name] :] = [tuple(self.stack[-_TUPLES[name] :])]
        elif name in ("PUT", "BINPUT", "LONG_BINPUT"):
            self.memo[argument] = self.stack[-1]
        elif name in ("GET", "BINGET", "LONG_BINGET"):
            self.stack.append(self.memo[argument])
        elif name not in ("PROTO", "FRAME"):
            self._combine(name, argument)

    def _combine(self, name: str, argument: Any) -> None:
        """Execute an instruction that takes values from the stack."""
        match name:
            case "MEMOIZE":
                self.memo[len(self.memo)] = self.stack[-1]
            case "GLOBAL":
                self.stack.append(_Name(argument))
            case "STACK_GLOBAL":
                last, first = self.pop(), self.pop()
                if not (isinstance(first, str) and isinstance(last, str)):  # as text, nested tuples may be endless
                    raise ValueError("an import without a name")
                self.stack.append(_Name(f"{first} {last}"))
            case "REDUCE":
                arguments, called = self.pop(), self.pop()
                made = called.call(arguments)
                self.room -= len(made) if isinstance(made, bytes) else 0
                if self.room < 0:
                    raise ValueError("more bytes than the file has")
                self.stack.append(made)
            case "BUILD":
                state = self.pop()
                self.stack[-1].build(state)
            case "TUPLE":
                self.stack.append(tuple(self._marked()))
            case "LIST":
                self.stack.append(self._marked())
            case "APPEND":
                item = self.pop()
                self.stack[-1].append(item)
            case "APPENDS":
                items = self._marked()
                self.stack[-1].extend(items)
            case "DICT" | "SETITEM" | "SETITEMS":
                self._set_items(name)
            case _:
                raise ValueError(f"it has the instruction {name}, which is not allowed")

    def _set_items(self, name: str) -> None:
        items = [self.stack.pop(-2), self.pop()] if name == "SETITEM" else self._marked()
        if not all(isinstance(key, str | bytes | int) for key in items[::2]):  # nested tuples may take forever to hash
            raise ValueError("a key that is neither text nor a number")
        if name == "DICT":
            self.stack.append({})
        self.stack[-1].update(zip(items[::2], items[1::2], strict=True))

    def _marked(self) -> list[Any]:
        """Pop everything above the last mark."""
        place = len(self.stack) - 1
        while self.stack[place] is not _MARK:
            place -= 1
        items = self.stack[place + 1 :]
        del self.stack[place:]
        return items

    def pop(self) -> Any:
        return self.stack.pop()
