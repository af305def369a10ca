"""Pictures: twins inside the ball, differences around grey, and a run that has none prevents no other."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from conadv import cli, config
from conadv.core.pgd import PGD
from conadv.study.gallery import add_galleries, generate_twins, make_gallery
from conadv.study.report import write_report
from conadv.study.results import read_results
from conadv.trainer.build_task import Task, build_task
from study.reports import Page
from study.studies import make_study


def task_of(**overrides: Any) -> Task:
    changes = {"threads": 1, **{key.replace("__", "."): value for key, value in overrides.items()}}
    return build_task(config.load_recipe("digits", changes), torch.device("cpu"))


def values(epsilon: float, chunk_size: int = 100, **changes: Any) -> dict[str, Any]:
    """What a gallery takes from the recipe of a run."""
    attack = {"attack.epsilon": epsilon, "attack.random_start": 0.0}
    return {"method": "conadv", "chunk_size": chunk_size, **attack, **changes}


def pixels(data: str) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(data)))).astype(int)


def test_twins_lie_in_the_ball_and_the_difference_is_magnified_around_grey() -> None:
    gallery = make_gallery(task_of(), values(8 / 255))
    assert gallery["magnified"] == pytest.approx(255 / 16, rel=1e-4)
    assert len(gallery["images"]) == 6
    for image in gallery["images"]:
        clean, twin, shown = (pixels(image[kind]) for kind in ("image", "twin", "perturbation"))
        assert clean.shape == (8, 8)
        assert np.abs(twin - clean).max() == 8
        expected = 255 * (0.5 + (twin - clean) / 255 * 255 / 16)
        assert np.abs(shown - expected).max() <= 1


def test_images_are_of_different_classes_and_are_those_of_the_data() -> None:
    task = task_of()
    gallery = make_gallery(task, values(0.0))
    labels = [image["label"] for image in gallery["images"]]
    assert len(set(labels)) == 6
    source = task.data.train
    first = int(np.flatnonzero(source.labels == source.classes.index(labels[0]))[0])
    assert (pixels(gallery["images"][0]["image"]) == source.image(first)[..., 0]).all()


def test_without_an_adversary_the_twin_is_the_image() -> None:
    for image in make_gallery(task_of(), values(0.0))["images"]:
        assert image["twin"] == image["image"]
        assert set(pixels(image["perturbation"]).ravel()) == {128}
        assert image["answer"] == image["twin_answer"]


def test_answers_are_those_of_evaluation() -> None:
    """A network that says 3 to everything in evaluation, whatever BatchNorm makes of the chunk."""
    task = task_of()
    with torch.no_grad():
        *_, last = (layer for layer in task.model.modules() if isinstance(layer, torch.nn.Linear))
        last.weight.zero_()
        last.bias.copy_(torch.eye(10)[3])
    gallery = make_gallery(task, values(8 / 255))
    assert {image["answer"] for image in gallery["images"]} == {task.data.train.classes[3]}


def test_the_model_is_left_as_it_was() -> None:
    task = task_of()
    before = {name: tensor.clone() for name, tensor in task.model.state_dict().items()}
    mode = task.model.training
    make_gallery(task, values(8 / 255))
    assert task.model.training == mode
    assert all(torch.equal(tensor, before[name]) for name, tensor in task.model.state_dict().items())


def test_colours_and_large_images_are_shown_small() -> None:
    task = task_of(data__name="synthetic", data__image_size=200, data__train_size=20, batch_size=20, chunk_size=20)
    gallery = make_gallery(task, values(4 / 255, 20, **{"attack.direction": "noise"}))
    assert pixels(gallery["images"][0]["image"]).shape == (96, 96, 3)


def test_images_of_two_channels_cannot_be_shown() -> None:
    overrides = {"data__name": "synthetic", "data__channels": 2, "data__train_size": 20, "batch_size": 20}
    with pytest.raises(ValueError, match="2 channels"):
        make_gallery(task_of(**overrides, chunk_size=20), values(4 / 255, 20))


@pytest.mark.parametrize(("method", "branch", "start"), [("conadv", "adv", 1.0), ("recycled", "main", 0.0)])
def test_twins_are_those_of_the_method(method: str, branch: str, start: float) -> None:
    """Recycled goes through the main branch and starts at the image, whatever its attack says."""
    task = task_of()
    with torch.no_grad():  # so that the branches differ
        for name, parameter in task.model.named_parameters():
            if "adv" in name:
                parameter.add_(torch.rand_like(parameter))
    images, labels = torch.rand(20, 1, 8, 8), torch.arange(20) % 10
    settings = values(8 / 255, method=method, **{"attack.random_start": 1.0})
    twins = generate_twins(task, settings, images, labels)
    expected = PGD(8 / 255, random_start=start, branch=branch)(task.model, task.loss, images, labels)
    torch.testing.assert_close(twins, expected)
    other = PGD(8 / 255, random_start=start, branch={"adv": "main", "main": "adv"}[branch])
    assert not torch.equal(twins, other(task.model, task.loss, images, labels))


def test_what_prevents_one_gallery_is_told_and_prevents_no_other(tmp_path: Path) -> None:
    folder = make_study(tmp_path, '[grid]\nmethod = ["conadv", "recycled"]\n')
    results = read_results(folder)
    told: list[str] = []

    def load(run: Path) -> Task:
        raise ValueError(f"the data of {run.name} is gone")

    add_galleries(folder, results, load, told.append)
    assert len(told) == 2
    assert all("no pictures of" in line and "is gone" in line for line in told)
    assert not any(folder.glob("runs/*/gallery.json"))


@pytest.mark.parametrize(
    "damage",
    ["", "[", "[]", "3", "{}", "NaN", "[" * 100_000, '{"epsilon": 0.1, "magnified": "x", "images": []}',
     '{"epsilon": 0.1, "magnified": 2, "images": [{"label": 1}]}', '{"epsilon": 0.1, "magnified": 2, "images": [3]}',
     '{"epsilon": 0.1, "magnified": 2, "images": [{"label": "a", "answer": "a", "twin_answer": "a", "image": "AAAA", '
     '"twin": "AAAA", "perturbation": "AAAA"}]}'],
)  # fmt: skip
def test_a_damaged_gallery_is_left_out_of_the_report_which_says_so(tmp_path: Path, damage: str) -> None:
    folder = make_study(tmp_path, "[grid]\nseed = [0]\n")
    (result,) = read_results(folder)
    (folder / "runs" / result.cell / "gallery.json").write_text(damage, encoding="utf-8")
    write_report(folder)
    text = (folder / "report.html").read_text(encoding="utf-8")
    assert Page(text).tags.count("image") == 0
    assert "gallery.json is damaged" in text


@pytest.mark.slow
def test_from_the_report_alone_a_cell_can_be_repeated_and_gives_its_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A study from its file to its page, as a reader has it; its pictures are made on the way."""
    monkeypatch.chdir(tmp_path)
    study = tmp_path / "tiny.toml"
    study.write_text('[base]\nmax_steps = 20\n[[arm]]\nname = "twins"\nmethod = "recycled"\n', encoding="utf-8")
    assert cli.main(["sweep", "tiny.toml", "--quiet"]) == 0
    assert cli.main(["report", "runs/tiny"]) == 0
    page = Page((tmp_path / "runs/tiny/report.html").read_text(encoding="utf-8"))
    assert "Images and their twins" in page.titles
    row = page.table("the command that repeats it").row("twins")
    capsys.readouterr()
    program, *words = row["command"].split()
    assert program == "conadv"
    assert cli.main([*words, "--quiet", "--json"]) == 0
    assert f"{json.loads(capsys.readouterr().out)['test_top1']:.2f}" == row["test accuracy, %"]
