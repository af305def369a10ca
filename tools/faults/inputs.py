"""Hostile inputs beside data sets, each a function of a seed: `build` writes one, `exercise` reads it as users would.

recipes, study files, flags of every command, layouts, checkpoints (safetensors and their JSON), metrics,
reports and traces. Where a file has a digest, half of the cases have a digest that is right.
"""

from __future__ import annotations

import contextlib
import io
import json
import string
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import safetensors.torch
import torch

from conadv import cli, config, trained
from conadv.catalog import METHODS
from conadv.ranks.layout import Layout
from conadv.study.study_file import read_study
from conadv.study.timeline import read_timeline
from conadv.trainer import checkpoint, metrics, train
from faults.hostile import DAMAGES
from faults.studies import damaged, prepare
from study.studies import SMALL as STUDY

NUMBERS = (
    "0",
    "-1",
    "1",
    "1e308",
    "-1e-308",
    "nan",
    "inf",
    "1e39",
    "9" * 400,
    str(2**63),
    "0x10",
    "1_0",
    "4/255",
    "1/0",
    "5%",
)
TEXTS = (
    "",
    " ",
    "none",
    "true",
    "x:y",
    "../..",
    "a\nb",
    "\x1b[31m",
    "\u202e",
    "é",
    "--seed",
    "'",
    '"',
    "[" * 3000,
    "|",
    "+",
)


def build(seed: int, root: Path) -> tuple[str, Path]:
    """Write the input of this seed below `root`: its kind, and its path."""
    kind = KINDS[seed % len(KINDS)]
    return kind.__name__.lstrip("_"), kind(Random(seed), root)


def exercise(seed: int, path: Path) -> str:
    """Use the input: "read", or "refused" where one line says why not."""
    return USES[KINDS[seed % len(KINDS)]](Random(seed), path)


def _recipe(random: Random, root: Path) -> Path:
    text = config.find_recipe(random.choice(config.recipe_names())).read_text()
    path = root / "recipe.toml"
    path.write_text(_spoiled_toml(random, text))
    if random.random() < 0.3:
        random.choice(DAMAGES)(random, path)
    return path


def _study(random: Random, root: Path) -> Path:
    path = root / "study.toml"
    path.write_text(_spoiled_toml(random, STUDY))
    if random.random() < 0.3:
        random.choice(DAMAGES)(random, path)
    return path


def _flags(random: Random, root: Path) -> Path:
    """One word per line, since words have no line breaks of their own here but for escaped ones."""
    command = random.choice(("train", "eval", "export", "recipes", "data inspect", "report", "timeline"))
    words = command.split() + [random.choice(("digits", str(root), *TEXTS))] * random.randrange(3)
    for key in random.choices([*config.flatten(config.Recipe())], k=random.randrange(4)):
        words += [config.flag(key), _value(random)]
    (root / "words.json").write_text(json.dumps(words))
    return root / "words.json"


def _layout(random: Random, root: Path) -> Path:
    parts = ("clean", "adv", "attack", "+", "|", " ", "x", "*", "2", "(", ")", "0", "-1", "auto", "é", "\n", "9" * 30)
    text = "".join(random.choices(parts, k=random.randrange(9)))
    if random.random() < 0.5:
        text = random.choice(("clean | adv | attack", "clean+adv | attack", "clean | adv", "clean", "auto")) + text[:2]
    (root / "layout.txt").write_text(text)
    return root / "layout.txt"


def _checkpoint(random: Random, root: Path) -> Path:
    """A checkpoint of one step; where its digest is right, its content is not."""
    tensors = {"model.weight": torch.ones(3), "stale.0.weight": torch.zeros(2, 2)}
    about: Any = {"format": 3, "step": 1, "recipe": {}, "versions": {}, "plain": ["weight"], "numbers": {}}
    about |= {"position": {"seconds": 1.0}}
    body = json.dumps(about)
    if random.random() < 0.6:
        body = _spoiled_json(random, about).decode("utf-8", "replace")
    data = safetensors.torch.save(tensors, {"about": body, "digest": checkpoint._digest(tensors, body)})
    if random.random() < 0.4:
        length = random.choice((0, 1, 8, len(data), 2**40, 2**63, 2**64 - 1))
        header = _spoiled_json(random, json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")]))
        data = (length if random.random() < 0.4 else len(header)).to_bytes(8, "little") + header + bytes(40)
    folder = root / "checkpoints"
    folder.mkdir()
    (folder / "step-00000001.safetensors").write_bytes(data)
    if random.random() < 0.5:
        random.choice(DAMAGES)(random, folder / "step-00000001.safetensors")
    return folder


def _metrics(random: Random, root: Path) -> Path:
    path = root / "metrics.jsonl"
    writer = metrics.Metrics(path, 0)
    for step in range(5):
        writer.log(step, {"loss": random.random(), "epoch": step / 2})
    writer.close()
    if random.random() < 0.5:
        path.write_text("\n".join(damaged(line, random) for line in path.read_text().splitlines()), errors="replace")
    else:
        random.choice(DAMAGES[:8])(random, path)
    return path


def _trace(random: Random, root: Path) -> Path:
    events = [
        {"cat": "user_annotation", "name": f"conadv: {name}", "ts": 1.0, "dur": 9.0} for name in ("step", "update")
    ]
    path = root / "traces" / "rank-0.json"
    path.parent.mkdir()
    path.write_bytes(_spoiled_json(random, {"baseTimeNanoseconds": 10**9, "traceEvents": events}))
    if random.random() < 0.3:
        random.choice(DAMAGES)(random, path)
    return root


def _report(random: Random, root: Path) -> Path:
    prepare(root / "study", random.getrandbits(30))
    return root / "study"


def _value(random: Random) -> str:
    made = "".join(random.choices(string.printable + "é😀", k=random.randrange(12)))
    return random.choice((random.choice(NUMBERS), random.choice(TEXTS), made, str(random.getrandbits(80))))


def _spoiled_toml(random: Random, text: str) -> str:
    """A TOML file with one to three lines changed, repeated or gone."""
    lines = text.splitlines()
    for _ in range(random.randrange(1, 4)):
        place = random.randrange(len(lines))
        key = lines[place].partition("=")[0]
        value = random.choice((_value(random), json.dumps(_value(random)), f"[{_value(random)}]", "{}", "[[]]", "nan"))
        change = random.randrange(4)
        lines[place : place + (change > 0)] = [f"{key} = {value}"] if change < 3 else []
    return "\n".join(lines).encode(errors="replace").decode()


def _spoiled_json(random: Random, content: Any) -> bytes:
    text = json.dumps(content)
    for _ in range(random.randrange(1, 3)):
        with contextlib.suppress(TypeError, RecursionError):  # it is not JSON of several parts any more
            text = damaged(text, random)
    return text.encode(errors="surrogatepass")


def _use_recipe(random: Random, path: Path) -> str:
    def use() -> None:
        recipe = config.load_recipe(path)
        again = path.with_name("again.toml")
        again.write_text(config.dump_recipe(recipe), encoding="utf-8")
        assert config.load_recipe(again) == recipe, "a recipe that does not come back as it is"

    return _allowed(use)


def _use_command(random: Random, path: Path) -> str:
    """Run the command line; what would compute is left out."""
    said = io.StringIO()
    computing = [(train, "train_recipe"), (trained, "evaluate"), (trained, "export")]
    kept = [(module, name, getattr(module, name)) for module, name in computing]
    try:
        for module, name in computing:
            setattr(module, name, lambda *_, **__: {})
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()), contextlib.chdir(path.parent):
            words = json.loads(path.read_text())
            status = cli.main(words) if words[0] != "bench" else cli.main([*words, "--rounds", "0"])
    except SystemExit as end:  # --help
        status = int(end.code or 0)
    finally:
        for module, name, function in kept:
            setattr(module, name, function)
    lines = said.getvalue().splitlines()
    assert status in (0, 1, 2), f"status {status}"
    assert status == 0 or (len(lines) == 1 and lines[0].startswith("error: ")), said.getvalue()
    return "refused" if status else "read"


def _use_layout(random: Random, path: Path) -> str:
    method, size = random.choice([*METHODS.values()]), random.choice((0, 1, 2, 3, 4, 6, 4608))
    return _allowed(lambda: Layout.fit(path.read_text(), method.duties, size).place(0, 12))


def _use_checkpoint(random: Random, path: Path) -> str:
    return _allowed(lambda: checkpoint.newest_whole(path, lambda text: None))


def _allowed(use: Callable[[], object]) -> str:
    try:
        use()
    except ValueError as error:
        text = str(error)
        assert text and "\n" not in text and len(text) < 5000, f"not one line: {text[:200]!r}"
        return "refused"
    return "read"


def _use_report(random: Random, path: Path) -> str:
    (path.parent / "words.json").write_text(json.dumps(["report", str(path)]))
    return _use_command(random, path.parent / "words.json")


USES: dict[Callable[[Random, Path], Path], Callable[[Random, Path], str]] = {
    _recipe: _use_recipe,
    _study: lambda random, path: _allowed(lambda: read_study(path)),
    _flags: _use_command,
    _layout: _use_layout,
    _checkpoint: _use_checkpoint,
    _metrics: lambda random, path: _allowed(lambda: metrics.read_metrics(path)),
    _trace: lambda random, path: _allowed(lambda: read_timeline(path)),
    _report: _use_report,
}
# A report takes a second, a command a third of one, everything else milliseconds.
_SELDOM = {_flags: 3, _report: 1}
KINDS = [kind for kind in USES for _ in range(_SELDOM.get(kind, 9))]
