"""Reports: their figures against ones worked out here, their structure, and studies of which little is there."""

from __future__ import annotations

import errno
import json
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from conadv import cli
from conadv.study import report
from conadv.study.report import write_report
from conadv.study.results import read_results, write_results
from study.reports import Page
from study.studies import FULL, accuracy, add_gallery, make_study

ONE_GRID = """
[grid]
method = ["vanilla", "conadv"]
seed = [0, 1, 2]
"""


def page_of(folder: Path) -> Page:
    write_report(folder)
    return Page((folder / "report.html").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study with everything, and its report."""
    folder = make_study(tmp_path_factory.mktemp("full"))
    for result in read_results(folder):
        if result.summary and result.values["method"] == "conadv" and result.values["seed"] == 0:
            add_gallery(folder / "runs" / result.cell)
    write_report(folder)
    return folder


@pytest.fixture(scope="module")
def page(full: Path) -> Page:
    return Page((full / "report.html").read_text(encoding="utf-8"))


def markdown_tables(path: Path) -> list[list[str]]:
    """The lines of each table, all of which have as many bars."""
    blocks = [block.splitlines() for block in path.read_text(encoding="utf-8").split("\n\n") if block.startswith("|")]
    for rows in blocks:
        assert len({len(re.findall(r"(?<!\\)\|", row)) for row in rows}) == 1
    return blocks


def top1(folder: Path, arm: str, grid: str = "final") -> dict[int, float]:
    """The test accuracies of an arm by seed, from the results alone."""
    lines = [json.loads(line) for line in (folder / "results.jsonl").read_text(encoding="utf-8").splitlines()]
    return {
        line["values"]["seed"]: line["summary"]["test_top1"]
        for line in lines
        if line["arm"] == arm and grid in line["grids"] and line["summary"]
    }


# Structure


def test_the_page_needs_nothing_but_itself(full: Path, page: Page) -> None:
    assert all(address.startswith(("#", "data:")) for address in page.addresses)
    text = (full / "report.html").read_text(encoding="utf-8")
    assert "http:" not in text and "https:" not in text and "@import" not in text
    assert all(place.startswith("#") for place in re.findall(r"url\(([^)]*)", text))
    assert "script" not in page.tags
    policy = re.search(r'<meta http-equiv="Content-Security-Policy" content="([^"]*)">', text)
    assert policy is not None
    assert policy[1] == "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


@pytest.mark.skipif(shutil.which("chromium") is None, reason="no Chromium on this machine")
@pytest.mark.parametrize("width", [390, 1400])
def test_a_browser_shows_it_without_a_complaint(full: Path, tmp_path: Path, width: int) -> None:
    picture = tmp_path / "page.png"
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr"]
    command = ["chromium", *flags, f"--user-data-dir={tmp_path}", f"--window-size={width},1200"]
    words = [*command, f"--screenshot={picture}", (full / "report.html").as_uri()]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=True)
    assert ":CONSOLE" not in done.stderr
    with Image.open(picture) as image:
        assert image.width == width
        assert len(image.getcolors(image.width * image.height)) > 20  # text and figures, not an empty page


def test_ids_are_unique_and_every_link_leads_somewhere(full: Path, page: Page) -> None:
    assert len(page.ids) == len(set(page.ids))
    text = (full / "report.html").read_text(encoding="utf-8")
    named = [name for names in re.findall(r'aria-labelledby="([^"]*)"', text) for name in names.split()]
    targets = [address.removeprefix("#") for address in page.addresses if address.startswith("#")]
    assert len(targets) > 10 and len(named) > 10
    assert set(targets) | set(named) <= set(page.ids)


def test_every_section_and_figure_of_a_whole_study_is_there(page: Page) -> None:
    assert page.titles == [
        "Conclusions",
        "Accuracy by method",
        "Accuracy by batch size",
        "Accuracy by augmentation",
        "Accuracy by ε",
        "Accuracy by delay",
        "Accuracy by epochs",
        "Beside the paper",
        "Learning rates",
        "Generalization gap",
        "Accuracy against work",
        "Time and throughput",
        "Training curves",
        "Images and their twins",
        "Failed cells",
        "Setup",
        "Every cell and its command",
    ]
    assert [figure.split(".")[0] for figure in page.figures] == [f"Figure {number}" for number in range(1, 13)]
    assert page.tags.count("figure") == 12
    assert page.tags.count("svg") >= 12 and page.tags.count("image") > 0


def test_tables_have_captions_in_order_and_headers_with_their_scope(page: Page) -> None:
    names = [table.caption.split(".")[0] for table in page.tables]
    assert names == [f"Table {number}" for number in range(1, len(names) + 1)]
    for table in page.tables:
        assert table.rows and all(len(row) == len(table.head) for row in table.rows)
        assert table.scopes == ["col"] * len(table.head) + ["row"] * len(table.rows)


def test_texts_of_the_study_are_texts_on_the_page(full: Path, page: Page) -> None:
    text = (full / "report.html").read_text(encoding="utf-8")
    assert "With &lt;tags&gt; &amp; &#34;quotes&#34; | pipes." in text
    assert page.table("Cells that failed").rows == [
        ["recycled · seed 10 · lr 20", "the loss of step 3 is not finite <b>"],
    ]


@pytest.mark.parametrize("name", ["<script>alert(1)</script>", 'a"b|c', "`x` **y** _z_ [l](m)", "&amp;"])
def test_names_of_arms_cannot_break_the_page_or_the_markdown(tmp_path: Path, name: str) -> None:
    text = f'arm = [{{name = {json.dumps(name)}}}, {{name = "plain", method = "vanilla"}}]\n[grid]\nseed = [0, 1]\n'
    found = page_of(make_study(tmp_path, text))
    assert "script" not in found.tags
    shown = found.table("The difference is taken").column("arm")
    assert shown == [name, "plain"]
    assert len(markdown_tables(tmp_path / "report.md")) == len(found.tables)


# Figures


def test_accuracies_are_means_and_sample_deviations_over_the_seeds(full: Path, page: Page) -> None:
    table = page.table("mean ± sample standard deviation over n seeds. The difference")
    for arm in ("vanilla", "DisAdv", "noise", "ConAdv + AA"):
        figures = list(top1(full, arm).values())
        row = table.row(arm)
        assert row["n"] == str(len(figures)) == "3"
        assert row["test accuracy, %"] == f"{np.mean(figures):.1f} ± {np.std(figures, ddof=1):.1f}"


def test_differences_are_taken_seed_by_seed_from_vanilla_on_the_same_data(full: Path, page: Page) -> None:
    table = page.table("mean ± sample standard deviation over n seeds. The difference")
    for arm, plain in (("DisAdv", "vanilla"), ("recycled", "vanilla"), ("ConAdv + AA", "vanilla + AA")):
        mine, theirs = top1(full, arm), top1(full, plain)
        figures = [mine[seed] - theirs[seed] for seed in mine]
        row = table.row(arm)
        assert row["minus vanilla, points"] == f"{np.mean(figures):+.1f} ± {np.std(figures, ddof=1):.1f}"
    assert table.row("recycled")["n"] == "2 (1 to do)"
    assert [table.row(arm)["minus vanilla, points"] for arm in ("vanilla", "vanilla + AA")] == ["baseline"] * 2


def test_settings_are_compared_across_arms_that_differ_in_them_alone(full: Path, page: Page) -> None:
    by_delay = page.table("by delay, everything else equal")
    assert by_delay.head == ["arm", "delay 0", "delay 1", "delay 2", "delay 4"]
    means = [
        np.mean(list(top1(full, arm).values())) for arm in ("DisAdv", "ConAdv", "ConAdv, delay 2", "ConAdv, delay 4")
    ]
    row = by_delay.row("ConAdv, batch 50")
    assert [row[name].split(" ")[0] for name in by_delay.head[1:]] == [f"{mean:.1f}" for mean in means]
    by_epsilon = page.table("by ε, everything else equal")
    assert by_epsilon.column("ε") == ["0", "4/255", "8/255", "12/255", "24/255", "32/255"]
    by_augment = page.table("by augmentation, everything else equal")
    assert by_augment.head == ["arm", "no augmentation", "autoaugment-cifar10"]
    assert by_augment.column("arm") == ["vanilla", "ConAdv"]
    by_batch = page.table("by batch, everything else equal")
    assert by_batch.column("arm") == ["vanilla", "DisAdv", "ConAdv", "recycled"]


def test_the_learning_rate_grid_shows_what_was_tried_failed_and_chosen(page: Page) -> None:
    table = page.table("by peak learning rate")
    assert table.head == ["arm", "rate 5", "rate 10", "rate 20"]
    assert table.row("recycled")["rate 20"] == "failed"
    assert table.row("ConAdv")["rate 10"].endswith("(1) ✓")
    assert not table.row("ConAdv")["rate 5"].endswith("✓")
    assert "seed 10" in table.caption and "same runs" not in table.caption


TUNED_ELSEWHERE = """
base = {chunk_size = 25}
arm = [
    {name = "plain", method = "vanilla", grids = ["final"], batch_size = 25, optimizer.lr = 5},
    {name = "plain", method = "vanilla", grids = ["final"], batch_size = 50, optimizer.lr = 20},
    {name = "plain", method = "vanilla", grids = ["tuning"]},
]
grid = [
    {name = "final", seed = [0, 1], data.path = ["images"]},
    {name = "tuning", seed = [10], data.path = ["others"], batch_size = [25, 50, 100], optimizer.lr = [5, 10, 20]},
]
"""


def test_the_chosen_rate_is_that_of_its_batch_size_though_tuned_on_other_images(tmp_path: Path) -> None:
    table = page_of(make_study(tmp_path, TUNED_ELSEWHERE)).table("by peak learning rate")
    rows = {batch: table.row(f"plain, batch {batch}") for batch in (25, 50, 100)}
    chosen = {batch: [rate for rate, entry in row.items() if entry.endswith("✓")] for batch, row in rows.items()}
    assert chosen == {25: ["rate 5"], 50: ["rate 20"], 100: []}  # nothing else on the page has a batch of 100


BY_BATCH = """
base = {chunk_size = 25}
arm = [
    {name = "plain", method = "vanilla", batch_size = 50, optimizer.lr = 5},
    {name = "plain", method = "vanilla", batch_size = 25, optimizer.lr = 10},
    {name = "plain + AA", method = "vanilla", batch_size = 50, optimizer.lr = 5, data.augment = "autoaugment-cifar10"},
    {name = "plain + AA", method = "vanilla", batch_size = 25, optimizer.lr = 20, data.augment = "autoaugment-cifar10"},
    {name = "rate 2", method = "conadv", batch_size = 50, optimizer.lr = 2, data.augment = "autoaugment-cifar10"},
    {name = "ConAdv + AA", method = "conadv", batch_size = 50, data.augment = "autoaugment-cifar10"},
    {name = "ConAdv + AA", method = "conadv", batch_size = 25, data.augment = "autoaugment-cifar10"},
]
grid = {seed = [0, 1]}
"""


def test_rows_by_setting_name_their_baseline_and_leave_out_tuned_rates(tmp_path: Path) -> None:
    page = page_of(make_study(tmp_path, BY_BATCH, lambda values: 40.0 + values["optimizer.lr"]))
    rates = [page.table("in percent by batch").row("ConAdv + AA")[f"batch {batch}"] for batch in (25, 50)]
    assert rates == ["50.0 ± 0.0 (2)"] * 2  # the default, 10, at both: not the arm with another rate
    assert page.table("as differences, by batch").column("arm") == ["ConAdv + AA minus plain + AA"]
    assert page.table("in percent by augmentation").column("arm") == ["plain, batch 25", "plain, batch 50"]


BY_EPSILON = """
base = {chunk_size = 25, batch_size = 50, method = "conadv"}
arm = [
    {name = "plain", method = "vanilla", grids = ["two"]},
    {name = "one branch", twin_branch = "main"},
    {name = "tuned", optimizer.lr = 1},
    {name = "rate 8", optimizer.lr = 8},
    {name = "rate 8, nothing", optimizer.lr = 8, attack.epsilon = 0},
    {name = "small batch", batch_size = 25},
    {name = "small batch, nothing", batch_size = 25, attack.epsilon = 0},
]
grid = [{name = "two", seed = [0, 1]}, {name = "three", seed = [0, 1, 2]}]
"""


def test_rows_by_setting_take_one_rate_and_name_their_batch(tmp_path: Path) -> None:
    page = page_of(make_study(tmp_path, BY_EPSILON, lambda values: 40.0 + values["optimizer.lr"]))
    table = page.table("by ε, everything else equal")
    assert table.head[:3] == ["arm", "ε 0", "ε 24/255"]
    assert table.column("arm") == ["rate 8, batch 50", "small batch, batch 25"]
    assert table.row("rate 8, batch 50")["ε 24/255"] == "48.0 ± 0.0 (3)"  # not the arm with rate 1
    assert page.table("by batch, everything else but the learning rate equal").column("arm")[0] == "tuned"


def test_a_chart_has_no_more_lines_than_styles(tmp_path: Path) -> None:
    arms = [f'{{name = "{letter}", batch_size = {batch}, attack.epsilon = "{number}/255"}}'
            for number, letter in enumerate("abcdefghij")
            for batch in ((25, 50, 100) if letter in "aj" else (25, 50))]  # fmt: skip
    page_of(make_study(tmp_path, f"base = {{chunk_size = 25}}\narm = [{', '.join(arms)}]\n[grid]\nseed = [0, 1]\n"))
    chart = ElementTree.parse(tmp_path / "report-figures" / "figure-batch-size.svg").getroot()
    legend = [text.text for text in chart.iter() if text.tag.endswith("text") and text.text in list("abcdefghij")]
    assert legend == list("abcdefgj")  # the complete ones, then the first
    assert "The 8 arms with the most values" in (tmp_path / "report.md").read_text(encoding="utf-8")


def test_a_difference_on_fewer_seeds_says_on_how_many(tmp_path: Path) -> None:
    page = page_of(make_study(tmp_path, BY_EPSILON, lambda values: 40.0 + values["optimizer.lr"]))
    row = page.table("The difference is taken").row("rate 8")
    assert (row["n"], row["minus vanilla, points"]) == ("3", "−2.0 ± 0.0 (2)")


def test_only_conditions_that_the_paper_has_stand_beside_its_figures(tmp_path: Path) -> None:
    def outcome(values: dict[str, Any]) -> float:
        return 40.0 if values["method"] == "vanilla" else 60.0 if values["twin_branch"] == "main" else 45.0

    page = page_of(make_study(tmp_path, BY_EPSILON, outcome))
    assert page.table("What each method adds").row("ConAdv minus vanilla")["ours"] == "+5.0 ± 0.0"


def test_arms_that_differ_in_a_number_alone_do_not_name_their_row(tmp_path: Path) -> None:
    arms = ", ".join(f'{{name = "delay {delay}", method = "conadv", delay = {delay}}}' for delay in (1, 2, 4))
    page = page_of(make_study(tmp_path, f"arm = [{arms}]\n[grid]\nseed = [0, 1]\n"))
    assert page.table("in percent by delay").head == ["delay", "conadv"]


def test_a_study_that_is_not_timed_shows_no_times(tmp_path: Path, page: Page) -> None:
    names = ("Time of training, one process", "the paper's table 3")
    assert [sum(name in table.caption for table in page.tables) for name in names] == [1, 1]
    untimed = page_of(make_study(tmp_path, "timed = false\n" + FULL))
    assert not any(name in table.caption for name in names for table in untimed.tables)
    assert len(untimed.tables) == len(page.tables) - 2 and "Time and throughput" not in untimed.titles


def test_cells_name_their_commits_only_where_they_differ(tmp_path: Path) -> None:
    folder = make_study(tmp_path, ONE_GRID)
    results = read_results(folder)
    write_results(folder, [replace(result, commit="aaaa") for result in results])
    assert "commit" not in page_of(folder).table("Each cell").head
    write_results(folder, [replace(result, commit="aaaa") for result in results[:2]] + results[2:])
    assert page_of(folder).table("Each cell").column("commit") == ["aaaa", "aaaa", "–", "–", "–", "–"]


def test_gap_time_and_throughput(page: Page) -> None:
    gap = page.table("Generalization gap: accuracy on the training images").row("vanilla")
    assert gap["training accuracy, %"] == "99.0 ± 0.0"
    time = page.table("Time of training, one process").row("ConAdv")
    assert time["training, s"] == "81.0 ± 1.0"  # 10 × 8 + seed
    assert time["a step, ms"] == "2025"
    assert time["images/s"] == "25"  # 40 steps of 50 images
    ratios = [(80 + seed) / (30 + seed) for seed in (0, 1, 2)]
    assert time["time a step, relative to vanilla"] == f"{np.mean(ratios):.2f} ± {np.std(ratios, ddof=1):.2f}"


def test_the_papers_figures_stand_beside_ours(page: Page) -> None:
    """The paper's, written out from its tables."""
    gains = page.table("What each method adds")
    assert [gains.row("ConAdv minus vanilla")[f"paper, {batch}k"] for batch in (32, 64, 96)] == ["+0.7", "+0.9", "+1.0"]
    assert [gains.row("ConAdv, ε = 0 minus vanilla")[f"paper, {batch}k"] for batch in (32, 64, 96)] == [
        "+0.2",
        "+0.4",
        "+0.3",
    ]
    combined = gains.row("ConAdv + AutoAugment minus vanilla + AutoAugment")
    assert [combined[f"paper, {batch}k"] for batch in (32, 64, 96)] == ["+1.4", "+1.7", "+1.9"]
    gap = page.table("(the paper's table 4)").row("vanilla")
    assert [gap[f"paper, {batch}k"] for batch in (16, 32, 64, 96)] == ["4.8", "5.9", "4.3", "4.6"]
    time = page.table("the paper's table 3").row("ConAdv / vanilla")
    assert time["paper, 16k"] == f"{1277 / 1194:.2f}" and time["paper, 32k"] == f"{677 / 622:.2f}"
    assert time["paper, 2k at the limit of workers"] == f"{75.7 / 71.3:.2f}"
    accuracies = page.table("The paper's own top-1").row("ConAdv")
    assert list(accuracies.values())[1:] == ["77.4", "77.4", "77.4", "77.4", "77.3", "76.2", "75.3"]


def test_where_and_when_and_how_to_repeat(full: Path, page: Page) -> None:
    text = (full / "report.html").read_text(encoding="utf-8")
    for fact in ("A processor, 2 cores, 25.3 GB", "torch 2.13.0", "0123456789ab", "2026-11-15"):
        assert fact in text
    commands = page.table("the command that repeats it")
    results = read_results(full)
    assert commands.column("command") == [result.command for result in results]
    told = {"to do", "failed", *(f"{result.summary['test_top1']:.2f}" for result in results if result.summary)}
    assert set(commands.column("test accuracy, %")) == told


# Markdown


def test_markdown_has_the_same_tables_and_its_figures_as_files(full: Path, page: Page) -> None:
    text = (full / "report.md").read_text(encoding="utf-8")
    assert re.findall(r"^\*\*(Table \d+)\.\*\*", text, re.MULTILINE) == [
        table.caption.split(".")[0] for table in page.tables
    ]
    named = re.findall(r"!\[[^]]*\]\(([^)]*)\)", text)
    assert sorted(named) == sorted(f"report-figures/{path.name}" for path in (full / "report-figures").iterdir())
    for name in named:
        root = ElementTree.parse(full / name).getroot()
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert len(markdown_tables(full / "report.md")) == len(page.tables)


# Studies of which little is there


def test_one_seed_claims_no_spread(tmp_path: Path) -> None:
    found = page_of(make_study(tmp_path, ONE_GRID.replace("[0, 1, 2]", "[0]")))
    table = found.table("nothing can be concluded")
    assert "±" not in "".join(table.column("test accuracy, %"))
    assert table.row("conadv")["95 % interval"] == "–"
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "**On one seed alone** conadv" in text and "More accurate" not in text


def test_without_vanilla_there_is_nothing_to_compare_with(tmp_path: Path) -> None:
    found = page_of(make_study(tmp_path, '[grid]\nmethod = ["conadv", "recycled"]\nseed = [0, 1]\n'))
    assert set(found.table("mean ± sample").column("minus vanilla, points")) == {"–"}
    assert "Beside the paper" not in found.titles


def test_a_study_of_which_nothing_is_done_says_so(tmp_path: Path) -> None:
    found = page_of(make_study(tmp_path, ONE_GRID, lambda values: None))
    assert found.titles == ["Setup", "Every cell and its command"]
    assert "0 of 6 done, 6 not run to their end yet" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_a_study_of_which_everything_failed_says_so(tmp_path: Path) -> None:
    found = page_of(make_study(tmp_path, ONE_GRID, lambda values: "no such luck"))
    assert found.titles == ["Failed cells", "Setup", "Every cell and its command"]
    assert found.table("Cells that failed").column("error") == ["no such luck"] * 6


def test_tuning_alone_is_reported_at_its_best_rate_with_a_caution(tmp_path: Path) -> None:
    text = 'arm = [{name = "a"}, {name = "plain", method = "vanilla"}]\n'
    text += 'grid = [{name = "tuning", seed = [0, 1], optimizer.lr = [5, 10, 20, 40]}]\n'
    found = page_of(make_study(tmp_path, text))
    assert found.table("mean ± sample standard deviation over n").row("a")["n"] == "2"
    rates = found.table("by peak learning rate")
    assert "same runs" in rates.caption
    assert [name for name, entry in rates.row("a").items() if entry.endswith("✓")] == ["rate 10"]


def test_a_best_rate_at_the_edge_of_the_grid_is_pointed_out(tmp_path: Path) -> None:
    text = '[grid]\nmethod = ["vanilla", "conadv"]\noptimizer.lr = [10, 20, 40]\nseed = [0]\n'
    page_of(make_study(tmp_path, text))
    assert "at the edge of the grid for **vanilla; conadv**" in (tmp_path / "report.md").read_text(encoding="utf-8")


def test_runs_of_vanilla_that_differ_in_epsilon_count_once(tmp_path: Path) -> None:
    text = '[grid]\nmethod = ["vanilla", "conadv"]\nattack.epsilon = ["4/255", "8/255", "16/255"]\nseed = [0, 1]\n'
    found = page_of(make_study(tmp_path, text))
    assert found.table("mean ± sample standard deviation over n").row("vanilla")["n"] == "2"
    by_epsilon = found.table("by ε, everything else equal")
    assert by_epsilon.head == ["ε", "conadv", "minus vanilla"]
    assert all(entry.endswith("(2)") for entry in by_epsilon.column("minus vanilla"))


def test_vanilla_is_not_compared_with_itself_where_only_twins_differ(tmp_path: Path) -> None:
    text = '[grid]\nmethod = ["vanilla", "recycled"]\ntwin_share = ["1/4", "1/2", 1]\nseed = [0, 1]\n'
    found = page_of(make_study(tmp_path, text))
    assert found.table("(comparisons on this page: 3)").column("arm").count("vanilla") == 1
    assert found.table("in percent by twin share").head == ["twin share", "recycled", "minus vanilla"]


def test_results_alone_are_enough(tmp_path: Path) -> None:
    """Such as the results that a repository keeps, without the runs."""
    folder = make_study(tmp_path / "whole", ONE_GRID)
    alone = tmp_path / "alone"
    alone.mkdir()
    (alone / "results.jsonl").write_bytes((folder / "results.jsonl").read_bytes())
    found = page_of(alone)
    assert "Training curves" not in found.titles and "Images and their twins" not in found.titles
    assert found.table("mean ± sample standard deviation over n").row("conadv")["n"] == "3"


def test_figures_that_were_not_finite_are_left_out(tmp_path: Path) -> None:
    folder = make_study(tmp_path, ONE_GRID)
    for result in read_results(folder)[:1]:
        path = folder / "runs" / result.cell / "metrics.jsonl"
        path.write_text('{"step": 0, "epoch": 1.0, "clean_loss": NaN}\n{"step": 1, "ep', encoding="utf-8")
    lines = [json.loads(line) for line in (folder / "results.jsonl").read_text(encoding="utf-8").splitlines()]
    lines[3]["summary"]["gap"] = None
    (folder / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    found = page_of(folder)
    assert found.table("Generalization gap: acc").row("conadv")["gap, points"].count("±") == 1


@pytest.mark.parametrize("cut", range(0, 91, 15))
def test_a_study_can_be_reported_at_any_moment(tmp_path: Path, cut: int) -> None:
    """Of the whole study the first so many cells are done."""
    count = 0

    def outcome(values: dict[str, Any]) -> float | str | None:
        nonlocal count
        count += 1
        return accuracy(values) if count <= cut else None

    found = page_of(make_study(tmp_path, FULL, outcome, steps=3))
    assert len(found.ids) == len(set(found.ids))
    assert found.titles[-1] == "Every cell and its command"


# The command


def test_the_command_says_what_it_wrote(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_study(tmp_path / "study", ONE_GRID)
    out = tmp_path / "docs" / "page.html"
    assert cli.main(["report", str(folder), "-o", str(out), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told == {"page": str(out), "markdown": str(out.with_suffix(".md")), "cells": 6, "done": 6}
    assert sorted(path.name for path in out.parent.iterdir()) == ["page-figures", "page.html", "page.md"]
    assert not (folder / "report.html").exists()


@pytest.mark.parametrize(
    ("results", "words", "told"),
    [
        (None, [], "is not a study"),
        ("", [], "has no cells"),
        ("{]\n", [], "is damaged"),
        ('{"cell": 3}\n', [], "is damaged"),
        ("[]\n", [], "is damaged"),
        ("good", ["-o", "page.pdf"], "ends in .html"),
    ],
)
def test_bad_input_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], results: str | None, words: list[str], told: str
) -> None:
    if results == "good":
        make_study(tmp_path, ONE_GRID)
    elif results is not None:
        (tmp_path / "results.jsonl").write_text(results, encoding="utf-8")
    assert cli.main(["report", str(tmp_path), *words]) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ") and told in message and message.count("\n") == 1


def test_a_page_that_cannot_be_written_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_study(tmp_path / "study", ONE_GRID)
    (tmp_path / "file").write_text("", encoding="utf-8")
    assert cli.main(["report", str(folder), "-o", str(tmp_path / "file" / "page.html")]) == 2
    assert "choose another file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "told"), [("page.html", "a folder"), ("page.md", "a folder"), ("page-figures", "not a folder")]
)
def test_targets_are_checked_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, told: str
) -> None:
    folder, out = make_study(tmp_path / "study", ONE_GRID), tmp_path / "out"
    out.mkdir()
    if told == "a folder":
        (out / name).mkdir()
    else:
        (out / name).write_text("", encoding="utf-8")
    before = sorted(folder.rglob("*"))
    assert cli.main(["report", str(folder), "-o", str(out / "page.html")]) == 2
    message = capsys.readouterr().err
    assert message == f"error: cannot write {str(out / name)!r}, which is {told}: choose another file with -o\n"
    assert [path.name for path in out.iterdir()] == [name]
    assert sorted(folder.rglob("*")) == before


def test_a_full_disk_is_told_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(report, "replace_file", refuse)
    with pytest.raises(ValueError, match=r"cannot write '.*report.html' \(No space left on device\): choose another"):
        write_report(make_study(tmp_path, ONE_GRID))


def test_a_report_needs_no_torch(full: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from conadv.cli import main; "
        f"status = main(['report', {str(full)!r}, '-o', {str(tmp_path / 'page.html')!r}]); "
        "assert status == 0 and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
