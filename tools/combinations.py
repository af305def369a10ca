"""The loops and libraries that are tested with every method, and the tables of them and of refusals.py.

tests/integrations/test_combinations.py trains or makes the mistake of each row. `python tools/combinations.py` writes
both tables to docs/integrations.md, and a test compares.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support import loops
from support.refusals import REFUSALS

DOCS = Path(__file__).parents[1] / "docs" / "integrations.md"
START, END = "<!-- written by tools/combinations.py -->", "<!-- end -->"


@dataclass(frozen=True)
class Combination:
    """A loop that takes the steps of a plain one with every method, where twins are the images."""

    loop: str
    train: loops.Loop
    library: str = "torch"
    ranks: tuple[int, ...] = (1, 2)
    slow: bool = False
    """Whether half of its tests are slow ones: see the test."""

    def __str__(self) -> str:
        return self.train.__name__


COMBINATIONS = (
    Combination("`method.loss(batch).backward()`, `DistributedDataParallel`", loops.backward),
    Combination("`GradScaler`", loops.grad_scaler),
    Combination("`torch.compile(model)`, `DistributedDataParallel` around it", loops.compiled, slow=True),
    Combination("`torch.compile` around `DistributedDataParallel`", loops.compiled_outside, ranks=(2,), slow=True),
    Combination("FSDP2 (`fully_shard`)", loops.fsdp, ranks=(2,)),
    Combination("Lightning, automatic optimization", loops.lightning, "lightning"),
    Combination("Fabric", loops.fabric, "lightning"),
    Combination("Accelerate", loops.accelerate, "accelerate"),
    Combination("Transformers `Trainer`", loops.transformers, "transformers"),
    Combination("the same, with a model that takes `**kwargs`", loops.transformers_with_options, "transformers"),
    Combination("timm's loop, optimizer, scaler and EMA", loops.timm, "timm"),
    Combination("torchvision's loop and EMA", loops.torchvision),
)


def tables() -> str:
    """Both tables in Markdown."""
    kinds = [(1, 1), (1, 2), (2, 1), (2, 2)]
    head = ["loop", "1 process", "accumulation", "2 processes", "2 processes, accumulation"]
    works = [[row.loop, *("works" if n in row.ranks else "" for n, _ in kinds)] for row in COMBINATIONS]
    refused = [[row.mistake, f"{'warning' if row.warns else 'error'}: {_code(row.message)}"] for row in REFUSALS]
    return f"{_table(head, works)}\n\n{_table(['mistake', 'answer'], refused)}"


def written(text: str) -> str:
    """The page with these tables between its two marks."""
    before, _, rest = text.partition(START)
    return f"{before}{START}\n{tables()}\n{END}{rest.partition(END)[2]}"


def _code(text: str) -> str:
    return f"`` {text} ``" if "`" in text else f"`{text}`"


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


if __name__ == "__main__":
    DOCS.write_text(written(DOCS.read_text()))
