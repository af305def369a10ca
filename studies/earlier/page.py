"""Write README.md and cells.csv of the earlier studies from their results.

python studies/earlier/page.py
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from conadv.study.compare import cells, conditions, main_cells
from conadv.study.report import CSV, accuracy_table
from conadv.study.results import read_results

FOLDER = Path(__file__).parent
STUDIES = (
    "cifar10-batch",
    "cifar10-cost",
    "cifar10-data",
    "cifar10-500",
    "cifar10-branch",
    "cifar10-delay",
    "cifar10-batch-lars",
)
LONG = 12
HEAD = """# Earlier small studies (12 and 16 pixels)

These studies were run with version 0.1 and 0.2 on 2 CPU cores: a ResNet-8 on 500 or 2,000 CIFAR-10 images of 12 or 16
pixels. They are small, and their networks are far from what CIFAR-10 allows, so read them as experiments on the
method, not as results on CIFAR-10. [Results](../../docs/results.md) says what they show together, and the
[log](../../docs/log.md) has the commands, commits and failures.

Each folder has the study file, the results, and every cell as a line of `cells.csv`. A full report, with a figure of
every run:

```console
$ conadv report studies/earlier/cifar10-500 -o report.html
```

The tables have the mean ± standard deviation over the seeds; the mean difference from vanilla with the same data,
model and batch, over the seeds that both have, with its 95 % interval (Student's t); and the p-value of a paired
t-test, corrected by Holm's method within the study.
"""


def section(name: str) -> str:
    """A study as Markdown."""
    study = tomllib.loads((FOLDER / name / "study.toml").read_text(encoding="utf-8"))
    table = accuracy_table(conditions(main_cells(cells(read_results(FOLDER / name)))))
    rows = [list(table.columns), ["---"] * len(table.columns), *table.to_numpy().tolist()]
    text = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    if len(table) > LONG:
        text = f'<details markdown="1"><summary>{len(table)} conditions</summary>\n\n{text}\n\n</details>'
    about, conclusions = _joined(study["about"]), _joined(study["conclusions"])
    return "\n\n".join([f"## {name}", f"**{study['title']}.**", about, text, conclusions])


def _joined(text: str) -> str:
    """Paragraphs on one line each."""
    return "\n\n".join(" ".join(part.split()) for part in re.split(r"\n\s*\n", text) if part.strip())


def page() -> str:
    return "\n".join([HEAD, "\n\n".join(map(section, STUDIES))]) + "\n"


def csv(name: str) -> str:
    return str(cells(read_results(FOLDER / name))[CSV].to_csv(index=False))


def main() -> None:
    (FOLDER / "README.md").write_text(page(), encoding="utf-8")
    for name in STUDIES:
        (FOLDER / name / "cells.csv").write_text(csv(name), encoding="utf-8")


if __name__ == "__main__":
    main()
