"""Damaged and malicious data sets, each a function of a seed: `build` writes one, `exercise` uses it.

A case starts from a small healthy data set of some format. Then either one of its files is damaged as a disk or a
network would do it, or a part of the format is replaced by something that its author never meant.
"""

from __future__ import annotations

import gzip
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from random import Random

from conadv.task.augment import augmentation
from conadv.task.data import Fit, Stream, evaluation_batches, open_data
from conadv.task.data.inspection import inspect_data
from task.data.hostile_formats import FORMATS, STRUCTURES
from task.data.samples import jpeg_set

EXTREMES = (0, 1, 2**7, 2**8 - 1, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**60, 2**63 - 1, 2**64 - 1)


def build(seed: int, root: Path) -> tuple[str, Path]:
    """Write the data set of this seed below `root`: the name of its format, and its path."""
    random = Random(seed)
    name = list(FORMATS)[seed % len(FORMATS)]
    path = FORMATS[name](random, root / "data")
    structures = STRUCTURES.get(name)
    if structures and random.random() < 0.5:
        random.choice(structures)(random, path)
    for _ in range(random.choice((0, 1, 1, 1, 2)) if structures else 1):
        files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
        if files:
            random.choice(DAMAGES)(random, random.choice(files))
    return name, path


def exercise(seed: int, path: Path) -> str:
    """Train and look at the data set: "read", or "refused" where a ValueError of one line says why not."""
    random = Random(seed)
    augment = random.choice(("none", "crop-flip", "resized-crop", "autoaugment-imagenet"))
    size = random.choice((None, 8, 16))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return (
            "read" if all([_allowed(lambda: _train(path, augment, size)), _allowed(lambda: _look(path))]) else "refused"
        )


def _allowed(use: Callable[[], None]) -> bool:
    try:
        use()
    except ValueError as error:
        text = str(error)
        if not text.isprintable() or not text or len(text) > 5000:
            raise AssertionError(f"not one line: {text[:200]!r}") from error
        return False
    return True


def _train(path: Path, augment: str, size: int | None) -> None:
    data = open_data("path", path)
    stream = Stream(data.train, 1, 1, 0, augmentation(augment, size))
    for batch in stream.batches(0, min(4, len(data.train))):
        for _ in batch.chunks:
            pass
    for _ in evaluation_batches(data.test, 1, Fit(size), indices=range(min(2, len(data.test)))):
        pass


def _look(path: Path) -> None:
    inspect_data(path, path.parent / "sheet.png").lines()


def _change(random: Random, file: Path, change: Callable[[bytearray], bytearray | None]) -> None:
    if file.stat().st_size > 10**9:
        return  # it is full of holes already
    content = bytearray(file.read_bytes())
    result = change(content)
    file.write_bytes(content if result is None else result)


def _place(random: Random, length: int) -> int:
    """More often near the ends, where headers and directories are."""
    place = random.choice((random.randrange(512), -random.randrange(1, 512), random.randrange(max(1, length))))
    return place % max(1, length)


def flip(random: Random, file: Path) -> None:
    def change(content: bytearray) -> None:
        for _ in range(random.choice((1, 1, 4, 30))):
            if content:
                content[_place(random, len(content))] = random.randrange(256)

    _change(random, file, change)


def number(random: Random, file: Path) -> None:
    """An extreme number somewhere."""

    def change(content: bytearray) -> None:
        width, order = random.choice((1, 2, 4, 8)), random.choice(("little", "big"))
        place = _place(random, len(content))
        value = random.choice(EXTREMES) & (2 ** (8 * width) - 1)
        content[place : place + width] = value.to_bytes(width, order)

    _change(random, file, change)


def cut(random: Random, file: Path) -> None:
    _change(random, file, lambda content: content[: random.randrange(len(content) + 1)])


def insert(random: Random, file: Path) -> None:
    def change(content: bytearray) -> None:
        place = _place(random, len(content))
        content[place:place] = random.randbytes(random.choice((1, 10, 1000)))

    _change(random, file, change)


def repeat(random: Random, file: Path) -> None:
    def change(content: bytearray) -> None:
        start = _place(random, len(content))
        part = content[start : start + random.randrange(1, 600)]
        place = _place(random, len(content))
        content[place : place + random.choice((0, len(part)))] = part

    _change(random, file, change)


def replace(random: Random, file: Path) -> None:
    """Something else under the name of the file."""
    other = (b"", b"\0" * 2000, random.randbytes(3000), jpeg_set(1)[0][0], gzip.compress(bytes(10**6)), b"PAR1" * 9)
    file.write_bytes(random.choice(other))


def huge(random: Random, file: Path) -> None:
    """A file with a terabyte of holes behind, or in place of, its content."""
    if random.random() < 0.5:
        file.write_bytes(b"")
    os.truncate(file, 2**40)


def special(random: Random, file: Path) -> None:
    """No regular file: to read it could block for ever, or never end."""
    file.unlink()
    match random.randrange(6):
        case 0:
            os.mkfifo(file)
        case 1:
            file.symlink_to("/dev/zero")
        case 2:
            file.symlink_to(file.name)
        case 3:
            file.mkdir()
        case 4:
            file.symlink_to("/dev/tty")
        case _:
            file.symlink_to("missing")


def missing(random: Random, file: Path) -> None:
    if random.random() < 0.5 or file.parent == file.parent.parent:
        file.unlink()
    else:
        shutil.rmtree(file.parent)


def rename(random: Random, file: Path) -> None:
    strange = ("a\nb", "\x1b[31m", "\udcff", "x" * 200, "..", "ü", " ")
    target = file.with_name(f"{random.choice(strange)}{file.name}")
    if len(target.name) < 250 and not target.exists():
        file.rename(target)


def note(random: Random, file: Path) -> None:
    """Names of classes beside the data."""
    folder = file.parent
    content = (b"a\n", b"\xff\xfe", b"", b"a\0b\n" * 5, b"x" * 100_000, b"\x1b[2J\n" * 20, b"\n" * 200_000)
    (folder / "classes.txt").write_bytes(random.choice(content))


DAMAGES = (
    flip,
    flip,
    flip,
    number,
    number,
    number,
    cut,
    cut,
    insert,
    repeat,
    replace,
    huge,
    special,
    missing,
    rename,
    note,
)
