"""Metric sinks: what was logged can be read back by other programs, also after a stop and a resume."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from conadv import cli
from conadv.sinks import SINKS, TensorBoard, Wandb
from conadv.trainer.evaluation import NAME
from conadv.trainer.metrics import read_metrics
from conadv.trainer.train import train_recipe as train
from support import tiny


def summaries(folder: Path) -> dict[str, list[tuple[int, Any]]]:
    """The values in the event files of a folder, by name, read record by record with TensorBoard's own messages."""
    event_pb2 = pytest.importorskip("tensorboardX.proto.event_pb2")
    found: dict[str, list[tuple[int, Any]]] = {}
    for path in sorted(folder.glob("events.*")):
        data = path.read_bytes()
        while data:
            size = int.from_bytes(data[:8], "little")
            event = event_pb2.Event.FromString(data[12 : 12 + size])
            data = data[16 + size :]
            for value in event.summary.value:
                found.setdefault(value.tag, []).append((event.step, value))
    return found


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Its scalars alone."""
    found = summaries(folder)
    kept = {name: own for name, own in found.items() if own[0][1].WhichOneof("value") == "simple_value"}
    return {name: [(step, value.simple_value) for step, value in own] for name, own in kept.items()}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of protobuf
def test_tensorboard_has_the_numbers_of_metrics_jsonl(tmp_path):
    pytest.importorskip("tensorboardX")
    summary = train(tiny.recipe(log="tensorboard"), tmp_path / "run", None, quiet=True)
    found = scalars(tmp_path / "run" / "tensorboard")
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [step for step, _ in found["loss"]] == [line["step"] for line in lines]
    assert [value for _, value in found["loss"]] == pytest.approx([line["loss"] for line in lines], rel=1e-6)
    assert found["test_top1"] == [(summary["steps"], pytest.approx(summary["test_top1"], rel=1e-6))]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_leaves_out_what_cannot_be_plotted(tmp_path):
    pytest.importorskip("tensorboardX")
    sink = TensorBoard(tmp_path, 0, {})
    sink.log(0, {"loss": float("nan"), "lr": 0.5, "other": None})
    sink.close()
    assert scalars(tmp_path / "tensorboard") == {"lr": [(0, 0.5)]}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_has_hyper_parameters_twins_and_the_accuracy_by_branch(tmp_path, monkeypatch):
    from PIL import Image

    plugin_pb2 = pytest.importorskip("tensorboardX.proto.plugin_hparams_pb2")
    monkeypatch.setattr("conadv.trainer.evaluation._SHOWN", 10_000)  # all, as for test_top1
    summary = train(tiny.recipe(log="tensorboard", eval_every=1, seed=7), tmp_path / "run", None, quiet=True)
    found = summaries(tmp_path / "run" / "tensorboard")
    ((_, start),) = found["_hparams_/session_start_info"]
    content = plugin_pb2.HParamsPluginData.FromString(start.metadata.plugin_data.content)
    known = content.session_start_info.hparams
    assert (known["seed"].number_value, known["method"].string_value) == (7, "conadv")
    steps = [step for step, _ in scalars(tmp_path / "run" / "tensorboard")["test_top1"]]
    assert [step for step, _ in found[NAME]] == steps and len(steps) == 3
    picture = np.asarray(Image.open(io.BytesIO(found[NAME][-1][1].image.encoded_image_string)), dtype=int)
    images, twins, _ = np.split(picture, 3)
    changed = np.abs(twins - images)
    assert 0 < changed.max() <= round(255 * tiny.recipe().attack.epsilon) + 1
    branches = scalars(tmp_path / "run" / "tensorboard")
    assert branches["main_branch_top1"][-1] == (summary["steps"], pytest.approx(summary["test_top1"], rel=1e-6))
    assert 0 <= branches["adv_branch_top1"][-1][1] <= 100


class FakeWandb:
    """A stand-in that records what it is called with: the package is not among our tests' dependencies."""

    Image = staticmethod(lambda array: ("image", array.shape))
    __spec__ = "present"

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def init(self, **options: Any) -> SimpleNamespace:
        self.calls.append(options)
        return SimpleNamespace(
            log=lambda metrics, step: self.calls.append((step, metrics)), finish=lambda: self.calls.append("end")
        )


@pytest.mark.parametrize(("variable", "mode"), [(None, "offline"), ("online", "online")])
def test_wandb_is_offline_unless_told_and_a_resumed_run_is_the_same_one(variable, mode, tmp_path, monkeypatch):
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    if variable:
        monkeypatch.setenv("WANDB_MODE", variable)
    for start in (0, 3):
        sink = Wandb(tmp_path, start, {"seed": 1})
        sink.log(start, {"loss": 0.5, "other": float("nan")})
        sink.show(start, "twins", np.zeros((6, 8, 3), np.uint8))
        sink.close()
    first, *logged, last = fake.calls[:4]
    assert (first["mode"], first["config"], first["resume"]) == (mode, {"seed": 1}, "allow")
    assert logged == [(0, {"loss": 0.5}), (0, {"twins": ("image", (6, 8, 3))})] and last == "end"
    assert fake.calls[4] == first and len(first["id"]) > 8
    other = tmp_path / "other"
    other.mkdir()
    Wandb(other, 0, {})
    assert fake.calls[-1]["id"] != first["id"]


def test_showing_twins_does_not_change_a_run(tmp_path, monkeypatch):
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    runs = [train(tiny.recipe(log=log, eval_every=1), tmp_path / log, None, quiet=True) for log in ("none", "wandb")]
    first, second = ({name: run[name] for name in run if "second" not in name and name != "run"} for run in runs)
    assert first == second
    assert sum(NAME in call[1] for call in fake.calls if isinstance(call, tuple)) == 3


@pytest.mark.parametrize("name", SINKS)
def test_a_missing_package_is_one_line_and_leaves_no_folder(name, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("conadv.sinks.find_spec", lambda package: None)
    status = cli.main(["train", *tiny.words(log=name), "--run", str(tmp_path / "run")])
    assert status == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(f"is not installed: pip install 'conadv[{name}]'")
    assert not (tmp_path / "run").exists()


def test_several_sinks_are_separated_by_commas():
    names = ",".join(SINKS)
    assert tiny.recipe(log=names).log == tuple(SINKS)
    assert tiny.recipe(log="none").log == ()
    with pytest.raises(ValueError, match=r"'wandbe' is not one of .*did you mean wandb"):
        tiny.recipe(log="wandbe")
