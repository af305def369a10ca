"""The section that compares with the paper, by differences and ratios, because data and network differ."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from conadv.study import paper

from .conditions import TOP1, Condition, Spread, number
from .document import Paragraph, Section, Table
from .evidence import Evidence

_BATCHES = (32, 64, 96)
# With other values a condition is none of the paper's methods.
_AS_PUBLISHED = {"twin_branch": "adv", "twin_share": 1, "adv_weight": 0.5}
_NO_ADVERSARY = {paper.CONADV: "ConAdv, ε = 0", paper.CONADV_AUTOAUGMENT: "ConAdv + AutoAugment, ε = 0"}
# A method and its baseline.
_GAINS = (
    (paper.DISADV, paper.VANILLA),
    (paper.CONADV, paper.VANILLA),
    (_NO_ADVERSARY[paper.CONADV], paper.VANILLA),
    (paper.AUTOAUGMENT, paper.VANILLA),
    (paper.CONADV_AUTOAUGMENT, paper.AUTOAUGMENT),
    (_NO_ADVERSARY[paper.CONADV_AUTOAUGMENT], paper.AUTOAUGMENT),
)

Found = Mapping[str, Condition]


def section(evidence: Evidence) -> Section | None:
    """The section; None if the study has nothing to compare with the paper."""
    batch, found = _at_one_batch(evidence.main)
    gains = [
        (method, reference, gain)
        for method, reference in _GAINS
        if method in found and reference in found and (gain := found[method].minus(found[reference], TOP1))
    ]
    if not gains:
        return None
    note = (
        f"Source: {paper.SOURCE}. Data, network and batch differ from ours, so only differences and ratios are "
        "comparable, and those in sign and order rather than in size. "
        f"Ours are those of runs with a batch of {batch:,}."
    )
    times = [_time_table(evidence, found)] if evidence.timed else []
    tables = [_gain_table(gains), _gap_table(found), *times, _accuracy_table()]
    return Section("paper", "Beside the paper", [Paragraph(note), *tables])


def _at_one_batch(conditions: list[Condition]) -> tuple[int, dict[str, Condition]]:
    """The batch size with the most conditions that the paper has too (the largest, in a tie), and these conditions."""
    by_batch: dict[int, dict[str, Condition]] = {}
    for condition in sorted(conditions, key=lambda one: -len(one.runs)):  # of several, that with the most seeds
        at = by_batch.setdefault(condition.settings["batch_size"], {})
        at.setdefault(_paper_name(condition.settings), condition)
    return max(by_batch.items(), key=lambda item: (len(item[1].keys() - {""}), item[0]), default=(0, {}))


def _paper_name(settings: Mapping[str, Any]) -> str:
    """The paper's name for a condition, from its settings, because an arm may have any name; empty: none."""
    augmented = str(settings.get("data.augment", "")).startswith("autoaugment")
    method, epsilon = settings["method"], settings.get("attack.epsilon")
    if any(settings.get(key, usual) != usual for key, usual in _AS_PUBLISHED.items()):
        return ""
    if method == "vanilla":
        return paper.AUTOAUGMENT if augmented else paper.VANILLA
    if method == "conadv" and not epsilon:
        return _NO_ADVERSARY[paper.CONADV_AUTOAUGMENT if augmented else paper.CONADV]
    if not epsilon or settings.get("attack.direction") == "noise":
        return ""
    if method == "conadv" and settings["delay"] == 1:
        return paper.CONADV_AUTOAUGMENT if augmented else paper.CONADV
    return paper.DISADV if method == "disadv" and not augmented else ""


def _published(method: str, batch: int) -> float:
    """The paper's accuracy at a batch size in thousands of images."""
    for name, without in _NO_ADVERSARY.items():
        if method == without:
            return paper.TOP1_BY_EPSILON[name, batch][paper.EPSILONS.index(0)]
    return paper.TOP1[method][paper.BATCHES.index(batch)]


def _gain_table(gains: list[tuple[str, str, Spread]]) -> Table:
    rows = [
        [
            f"{method} minus {reference}",
            *(number(_published(method, at) - _published(reference, at), 1, signed=True) for at in _BATCHES),
            *(gain.text(signed=True), gain.interval_text(), str(gain.n)),
        ]
        for method, reference, gain in gains
    ]
    published = [f"paper, {batch}k" for batch in _BATCHES]
    head = ["difference of test accuracy, points", *published, "ours", "95 % interval", "n"]
    caption = (
        "What each method adds, in the paper at three batch sizes and in this study, over n seeds that both arms have."
    )
    return Table("paper-gains", caption, head, rows)


def _gap_table(found: Found) -> Table:
    rows = []
    for name, published in paper.GAP.items():
        gap = found[name].metric("gap") if name in found else None
        rows.append([name, *(f"{points:.1f}" for points in published), gap.text_n() if gap else "–"])
    head = ["gap, points", *(f"paper, {batch}k" for batch in paper.GAP_BATCHES), "ours (n)"]
    return Table("paper-gap", "Generalization gap: training minus test accuracy (the paper's table 4).", head, rows)


def _time_table(evidence: Evidence, found: Found) -> Table:
    rows = []
    for name in (paper.DISADV, paper.CONADV):
        ratio = evidence.step_ratio(found[name]) if name in found else None
        seconds = [
            f"{mine / vanilla:.2f}" if mine and vanilla else "–"
            for mine, vanilla in zip(paper.SECONDS[name], paper.SECONDS[paper.VANILLA], strict=True)
        ]
        limit = paper.LIMIT_THROUGHPUT[paper.VANILLA] / paper.LIMIT_THROUGHPUT[name]
        rows.append([f"{name} / vanilla", *seconds[:2], f"{limit:.2f}", ratio.text_n(2) if ratio else "–"])
    head = ["time, relative to vanilla", "paper, 16k", "paper, 32k", "paper, 2k at the limit of workers", "ours (n)"]
    caption = (
        "Time of training relative to vanilla (the paper's table 3 and its throughput at the limit of workers). The "
        "paper spreads a method over as many devices as it can use; here one process does all of its work."
    )
    return Table("paper-time", caption, head, rows)


def _accuracy_table() -> Table:
    rows = [[name, *(f"{top1:.1f}" for top1 in several)] for name, several in paper.TOP1.items()]
    caption = "The paper's own top-1 accuracies on ImageNet, percent, by batch size (its tables 1 and 2)."
    return Table("paper-accuracy", caption, ["method", *(f"{batch}k" for batch in paper.BATCHES)], rows)
