"""Damage to the files of a study, as a function of a seed."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

from study.studies import SMALL, make_study

FILES = ("results.jsonl", "origin.json", "study.toml", "metrics.jsonl")
STRANGE = [None, 3, -1.5, "", "../x", "\ud800", [], [[1]], {}, {"a": [1]}, True, 10**400, 1e999, "<b>", [None, 1]]
PIECES = ["[" * 100_000, "NaN", '"', "}", "\\", "1e999", "9" * 5000, "\x00", "null", "-", "\n"]


def prepare(folder: Path, seed: int) -> str:
    """A study in this folder, and the name of the file that is damaged in it."""
    make_study(folder, SMALL, steps=8)
    name, random = FILES[seed % len(FILES)], Random(seed)
    (path, *_) = sorted([*folder.glob(name), *folder.glob(f"runs/*/{name}")])
    lines = path.read_text(encoding="utf-8").splitlines() if name.endswith(".jsonl") else [path.read_text("utf-8")]
    number = random.randrange(len(lines))
    lines[number] = damaged(lines[number], random)
    path.write_text("\n".join(lines), encoding="utf-8", errors="surrogatepass")
    return name


def damaged(text: str, random: Random) -> str:
    kind, start = random.randrange(4), random.randrange(len(text) or 1)
    if kind == 0:
        return text[:start] + text[start + random.randrange(1, 40) :]
    if kind == 1:
        return text[:start] + random.choice(PIECES) + text[start:]
    if kind == 2:
        return random.choice(["[]", "3", "null", '"x"', "{}", "NaN", "[" * 100_000, " ", "[[]]", "{", "[{}]"])
    try:
        return json.dumps(_changed(json.loads(text), random))
    except ValueError:  # not JSON
        return text[::-1]


def _changed(content: Any, random: Random) -> Any:
    """Parsed JSON of which one entry, at any depth, is of another kind, out of range, or gone."""
    place = content
    while isinstance(place, dict | list) and place:
        key = random.choice(list(place) if isinstance(place, dict) else list(range(len(place))))
        if isinstance(place[key], dict | list) and place[key] and random.random() < 0.75:
            place = place[key]
        elif random.random() < 0.25:
            del place[key]
            return content
        else:
            place[key] = random.choice(STRANGE)
            return content
    return random.choice(STRANGE)
