"""Layers that track statistics in a run: those of one's own model are split by its author, or refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

from conadv import cli
from conadv.catalog import METHODS
from conadv.ranks.layout import Layout
from conadv.ranks.member import check_statistics
from support import tiny


def train(run: Path, **changes: str) -> int:
    return cli.main(["train", *tiny.words(**changes), "--run-dir", str(run)])


def test_a_model_that_its_author_split_is_trained_and_exported(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert train(run, model="support.tiny:split_by_its_author", method="conadv") == 0
    assert cli.main(["export", str(run), str(tmp_path / "model.safetensors")]) == 0


@pytest.mark.parametrize(
    ("model", "method", "message"),
    [
        ("support.tiny:tracking", "conadv", "0 (InstanceNorm2d) tracks statistics of images"),
        ("support.tiny:split_by_its_author", "vanilla", "this run needs ('main',)"),
    ],
)
def test_other_statistics_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], model: str, method: str, message: str
) -> None:
    assert train(tmp_path / "run", model=model, method=method) != 0
    assert message in capsys.readouterr().err


def test_synchronized_batchnorm_is_refused_where_ranks_have_different_roles():
    model = nn.SyncBatchNorm.convert_sync_batchnorm(tiny.net(10, 1))
    duties = METHODS["conadv"].duties
    check_statistics(model, Layout.fit(None, duties, 2))
    check_statistics(tiny.net(10, 1), Layout.fit("clean | adv | attack", duties, 3))
    with pytest.raises(ValueError, match="drop the layout, or use BatchNorm"):
        check_statistics(model, Layout.fit("clean | adv | attack", duties, 3))
