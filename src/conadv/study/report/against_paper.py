"""The section that puts the paper's figures beside ours: differences and ratios, since data and network are others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from conadv.study import paper

from .accuracy import TOP1
from .blocks import Paragraph, Section, Table
from .conditions import Condition
from .cost import step_ratio
from .evidence import Evidence
from .spread import Spread, number

Settings = Any
_BATCHES = (32, 64, 96)


def paper_section(evidence: Evidence) -> Section | None:
    """None where a study has nothing that the paper has."""
    found = {name: _find(evidence, fits) for name, fits in _ARMS.items()}
    gains = _gains(found)
    if not gains:
        return None
    tables = [_gain_table(gains), *_gap_table(found), *_time_table(evidence, found), _accuracy_table()]
    note = (
        f"Source: {paper.SOURCE}. Data, network and batch differ from ours, so only differences and ratios are "
        "comparable, and those in sign and order rather than in size."
    )
    return Section("paper", "Beside the paper", [Paragraph(note), *tables])


def _augmented(settings: Settings) -> bool:
    return str(settings.get("data.augment", "")).startswith("autoaugment")


def _adversarial(settings: Settings) -> bool:
    return bool(settings.get("attack.epsilon")) and settings.get("attack.direction") != "noise"


# What the paper has, told from the settings alone, since an arm may have any name.
_ARMS: dict[str, Callable[[Settings], bool]] = {
    paper.VANILLA: lambda of: of["method"] == "vanilla" and not _augmented(of),
    paper.AUTOAUGMENT: lambda of: of["method"] == "vanilla" and _augmented(of),
    paper.DISADV: lambda of: of["method"] == "disadv" and _adversarial(of) and not _augmented(of),
    paper.CONADV: lambda of: of["method"] == "conadv" and of["delay"] == 1 and _adversarial(of) and not _augmented(of),
    paper.CONADV_AUTOAUGMENT: lambda of: (
        of["method"] == "conadv" and of["delay"] == 1 and _adversarial(of) and _augmented(of)
    ),
    "ConAdv, ε = 0": lambda of: of["method"] == "conadv" and of["attack.epsilon"] == 0 and not _augmented(of),
    "ConAdv + AutoAugment, ε = 0": lambda of: of["method"] == "conadv" and of["attack.epsilon"] == 0 and _augmented(of),
}

# A method, what it is compared with, and the paper's difference at a batch.
_GAINS: tuple[tuple[str, str, Callable[[int], float]], ...] = (
    (paper.DISADV, paper.VANILLA, lambda batch: paper.top1(paper.DISADV, batch) - paper.top1(paper.VANILLA, batch)),
    (paper.CONADV, paper.VANILLA, lambda batch: paper.top1(paper.CONADV, batch) - paper.top1(paper.VANILLA, batch)),
    (
        "ConAdv, ε = 0",
        paper.VANILLA,
        lambda batch: paper.top1_without_adversary(paper.CONADV, batch) - paper.top1(paper.VANILLA, batch),
    ),
    (
        paper.AUTOAUGMENT,
        paper.VANILLA,
        lambda batch: paper.top1(paper.AUTOAUGMENT, batch) - paper.top1(paper.VANILLA, batch),
    ),
    (
        paper.CONADV_AUTOAUGMENT,
        paper.AUTOAUGMENT,
        lambda batch: paper.top1(paper.CONADV_AUTOAUGMENT, batch) - paper.top1(paper.AUTOAUGMENT, batch),
    ),
    (
        "ConAdv + AutoAugment, ε = 0",
        paper.AUTOAUGMENT,
        lambda batch: (
            paper.top1_without_adversary(paper.CONADV_AUTOAUGMENT, batch) - paper.top1(paper.AUTOAUGMENT, batch)
        ),
    ),
)


def _find(evidence: Evidence, fits: Callable[[Settings], bool]) -> Condition | None:
    """The first condition that is what the paper has."""
    return next((condition for condition in evidence.main if fits(condition.settings)), None)


def _gains(found: dict[str, Condition | None]) -> list[tuple[str, Callable[[int], float], Spread]]:
    gains = []
    for method, reference, published in _GAINS:
        ours, plain = found[method], found[reference]
        difference = ours.minus(plain, TOP1) if ours and plain else None
        if difference:
            gains.append((f"{method} minus {reference}", published, difference))
    return gains


def _gain_table(gains: list[tuple[str, Callable[[int], float], Spread]]) -> Table:
    rows = [
        [
            name,
            *(number(published(batch), 1, signed=True) for batch in _BATCHES),
            of.text(signed=True),
            of.interval_text(),
            str(of.n),
        ]
        for name, published, of in gains
    ]
    head = [
        "difference of test accuracy, points",
        *(f"paper, {batch}k" for batch in _BATCHES),
        "ours",
        "95 % interval",
        "n",
    ]
    caption = (
        "What each method adds, in the paper at three batch sizes and in this study, over n seeds that both arms have."
    )
    return Table("paper-gains", caption, head, rows)


def _gap_table(found: dict[str, Condition | None]) -> list[Table]:
    rows = []
    for name, published in paper.GAP.items():
        gap = condition.figure("gap") if (condition := found[name]) else None
        rows.append([name, *(f"{figure:.1f}" for figure in published), f"{gap.text()} ({gap.n})" if gap else "–"])
    head = ["gap, points", *(f"paper, {batch}k" for batch in paper.GAP_BATCHES), "ours (n)"]
    caption = "Generalization gap: training minus test accuracy (the paper's table 4)."
    return [Table("paper-gap", caption, head, rows)]


def _time_table(evidence: Evidence, found: dict[str, Condition | None]) -> list[Table]:
    rows = []
    for name in (paper.DISADV, paper.CONADV):
        ratio = step_ratio(evidence, condition) if (condition := found[name]) else None
        seconds = [
            _ratio(mine, plain) for mine, plain in zip(paper.SECONDS[name], paper.SECONDS[paper.VANILLA], strict=True)
        ]
        limit = paper.LIMIT_THROUGHPUT[paper.VANILLA] / paper.LIMIT_THROUGHPUT[name]
        rows.append(
            [f"{name} / vanilla", *seconds[:2], f"{limit:.2f}", f"{ratio.text(2)} ({ratio.n})" if ratio else "–"]
        )
    head = ["time, relative to vanilla", "paper, 16k", "paper, 32k", "paper, 2k at the limit of workers", "ours (n)"]
    caption = (
        "Time of training relative to vanilla (the paper's table 3 and its throughput at the limit of workers). The "
        "paper spreads a method over as many devices as it can use; here one process does all of its work."
    )
    return [Table("paper-time", caption, head, rows)]


def _ratio(mine: float | None, plain: float | None) -> str:
    return f"{mine / plain:.2f}" if mine and plain else "–"


def _accuracy_table() -> Table:
    rows = [[name, *(f"{figure:.1f}" for figure in figures)] for name, figures in paper.TOP1.items()]
    caption = "The paper's own top-1 accuracies on ImageNet, percent, by batch size (its tables 1 and 2)."
    return Table("paper-accuracy", caption, ["method", *(f"{batch}k" for batch in paper.BATCHES)], rows)
