"""What a recipe leaves to the size of the images, and a stranger's folder of photographs from end to end."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from conadv import cli
from conadv.config import Data, Recipe, load_recipe, recipe_of_run
from conadv.core.branches import split_layers
from conadv.core.splitbn import plain_state_dict
from conadv.roles import Role
from conadv.task.data import open_data
from conadv.trainer import build
from conadv.trainer.build import build_task, check_fit, method_of, resolved, with_sizes
from support import tiny
from task.data.samples import jpeg_set, write_folder


def photographs(folder: Path, size: tuple[int, int], count: int = 4) -> Path:
    """An image folder of two classes; width and height in pixels."""
    samples = jpeg_set(2 * count, width=size[0], height=size[1])
    return write_folder(folder, samples, samples)


@pytest.mark.parametrize(
    ("size", "image_size", "model", "augment"),
    [
        ((100, 80), None, "resnet50", "resized-crop"),
        ((65, 65), None, "resnet50", "resized-crop"),
        ((100, 64), None, "resnet20", "crop-flip"),
        ((100, 80), 32, "resnet20", "crop-flip"),
        ((32, 32), 96, "resnet50", "resized-crop"),
    ],
)
def test_network_and_augmentation_follow_the_size_of_the_images(size, image_size, model, augment, tmp_path):
    path = str(photographs(tmp_path / "photos", size, count=1))
    recipe = Recipe(data=Data(path=path, image_size=image_size))
    chosen = resolved(recipe, open_data(None, path))
    assert (chosen.model, chosen.data.augment) == (model, augment)
    changes = {"data.image_size": image_size, "model": model, "data.augment": augment}
    assert chosen == load_recipe(None, {"data.path": path, **changes})


@pytest.mark.parametrize(
    ("size", "workers", "ranks", "expected"),
    [
        ((65, 65), None, 1, 6),
        ((65, 65), None, 4, 1),
        ((64, 64), None, 1, 0),
        ((65, 65), 3, 4, 3),
    ],
)
def test_workers_follow_the_cores_for_photographs(size, workers, ranks, expected, tmp_path, monkeypatch):
    monkeypatch.setattr(build, "usable_cores", lambda: list(range(6)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    path = str(photographs(tmp_path / "photos", size))
    recipe = Recipe(model="resnet8", data=Data(path=path, workers=workers))
    assert build_task(recipe, torch.device("cpu")).workers == expected


def test_what_a_recipe_says_stays(tmp_path):
    path = str(photographs(tmp_path / "photos", (100, 80), count=1))
    recipe = Recipe(model="resnet18", data=Data(path=path, augment="none"))
    assert resolved(recipe, open_data(None, path)) == recipe
    digits = load_recipe("digits")
    assert resolved(digits, open_data("digits", train_size=100)) == digits


@pytest.mark.parametrize(("kind", "channels"), [("digits", 4), ("colour", 1), ("colour", 4)])
def test_channels_that_arrays_do_not_have_are_refused(kind: str, channels: int, tmp_path: Path) -> None:
    path, own = tmp_path / "colour.npz", {"digits": 1, "colour": 3}[kind]
    np.savez(path, train_images=np.zeros((60, 8, 8, 3), np.uint8), train_labels=np.arange(60) % 10)
    recipe = tiny.recipe(**{"data__path": str(path), "data__train_size": 40} if kind == "colour" else {})
    for same in (3, own):  # 3 is the default
        build_task(replace(recipe, data=replace(recipe.data, channels=same)), torch.device("cpu"))
    with pytest.raises(ValueError, match=f"^data.channels {channels}: these images have {own}, and keep them: drop it"):
        build_task(replace(recipe, data=replace(recipe.data, channels=channels)), torch.device("cpu"))


def test_a_folder_of_photographs_of_any_shape_trains_without_a_recipe(tmp_path, capsys):
    path = photographs(tmp_path / "photos", (90, 70))
    Image.new("RGB", (64, 120)).save(path / "train" / "class0" / "tall.png")
    small = "--batch-size 8 --chunk-size 4 --epochs 1 --width 4 --data.image-size 65 --threads 1 --quiet"
    assert cli.main(["train", "--data.path", str(path), "--run", str(tmp_path / "run"), *small.split()]) == 0
    printed = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert (printed["model"], printed["epsilon"], printed["steps"]) == ("resnet50", "4/255", "1")
    assert cli.main(["eval", str(tmp_path / "run")]) == 0


ROBUST = {"adv_weight": "1", "twin_branch": "main", "batch_size": "96", "chunk_size": "48"}


def test_without_a_clean_pass_no_rank_is_only_clean() -> None:
    with pytest.raises(ValueError, match=r"clean ranks of layout 'clean \| adv\+attack' would do nothing.*'clean\+adv"):
        check_fit(load_recipe("digits", {**ROBUST, "layout": "clean | adv+attack"}), 2)
    assert (
        str(check_fit(load_recipe("digits", {**ROBUST, "layout": "auto", "chunk_size": "96"}), 2))
        == "clean+adv | attack"
    )


def test_the_cost_of_a_duty_counts_the_steps_of_the_attack() -> None:
    two_steps = {"attack.steps": "2"}
    assert method_of(load_recipe("digits", two_steps)).passes == {Role.CLEAN: 3, Role.ADV: 3, Role.ATTACK: 4}
    assert method_of(load_recipe("digits", {**ROBUST, **two_steps})).work == 3 + 4
    assert method_of(load_recipe("digits", {**two_steps, "method": "vanilla"})).work == 3


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"twin_branch": "adv"}, "add --twin-branch main"),
        ({"twin_share": "1/2"}, "drop --twin-share"),
    ],
)
def test_twins_only_is_refused_where_the_evaluated_branch_would_stay_untrained(changes, problem) -> None:
    with pytest.raises(ValueError, match=f"adv_weight 1.*{problem}"):
        load_recipe("digits", {**ROBUST, **changes})


@pytest.mark.parametrize(("views", "branches"), [("one", ("main", "adv")), ("three", ("main", "aug", "adv"))])
def test_only_a_third_view_has_a_branch_of_its_own(views: str, branches: tuple[str, ...]) -> None:
    recipe = tiny.recipe(method="conadv", data__views=views, data__augment="autoaugment-cifar10")
    layer, *_ = split_layers(build_task(recipe, torch.device("cpu")).model)
    assert layer.branches == branches


@pytest.mark.parametrize(
    ("batch", "ranks", "changes", "expected"),
    [
        (32, 1, {}, 32),
        (90, 1, {}, 45),
        (13, 1, {}, 13),
        (14, 2, {}, 7),
        (128, 1, {}, 64),
        (1000, 1, {}, 50),
        (90, 2, {}, 45),
        (64, 5, {"layout": "2 clean | 2 adv | attack"}, 32),
        (64, 3, {"layout": "auto"}, 64),
        (64, 1, {"twin_share": "1/4"}, 16),
        (64, 1, {"data.copies": 2}, 32),
    ],
)
def test_the_chunk_size_is_the_largest_that_batch_and_layout_can_share(batch, ranks, changes, expected):
    recipe = load_recipe("digits", {"batch_size": batch, "chunk_size": 0, "data.train_size": 1000, **changes})
    chosen = with_sizes(recipe, ranks)
    assert chosen == replace(recipe, chunk_size=expected)
    check_fit(chosen, ranks)


@pytest.mark.parametrize(
    ("changes", "ranks", "problem"),
    [
        ({"batch_size": 50}, 4, "layout .* on 4 ranks needs a multiple of 4 chunks"),
        ({"layout": "foo"}, 1, "layout 'foo': 'foo' is not a role"),
        ({"optimizer.gsnr": "1/10"}, 2, "optimizer.gsnr compares the chunks of one process"),
        ({"batch_size": 127}, 1, "batch_size 127 can only be cut into chunks of 1, .* choose --batch-size 128, or"),
        ({"batch_size": 256}, 64, "batch_size 256 .* chunks of 4, .* choose --batch-size 512, or"),
        ({"batch_size": 20, "twin_share": "1/4"}, 1, "batch_size 20 .* chunks of 5, .* choose --batch-size 32, or"),
    ],
)
def test_sizes_that_cannot_be_say_what_to_change(changes, ranks, problem):
    with pytest.raises(ValueError, match=f"^{problem}"):
        with_sizes(load_recipe("digits", {"batch_size": 256, "chunk_size": 0, **changes}), ranks)


@pytest.mark.parametrize(
    ("images", "copies", "batch", "chunk"),
    [
        (1_270, 1, 64, 64),
        (1_279, 1, 64, 64),
        (1_280, 1, 128, 64),
        (630, 1, 48, 48),
        (159, 1, 8, 8),
        (79, 1, 7, 7),
        (5, 1, 1, 1),
        (10**6, 1, 256, 64),
        (1_270, 3, 192, 64),
        (10**6, 5, 240, 48),
    ],
)
def test_a_batch_that_the_images_decide_is_cut_into_chunks_of_several_images(images, copies, batch, chunk):
    chosen = with_sizes(Recipe(data=Data(path="photos", copies=copies)), 1, images)
    assert (chosen.batch_size, chosen.chunk_size) == (batch, chunk)


def test_a_run_shows_the_chunk_size_and_keeps_it_when_resumed(tmp_path, capsys):
    run = str(tmp_path / "run")
    words = ["train", "--batch-size", "90", "--width", "4", "--threads", "1", "--max-steps", "1", "--run-dir", run]
    assert cli.main(words) == 0
    assert "90 images on 1 rank" in (told := capsys.readouterr().err) and "chunks of 45\n" in told
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["chunk_size"] == 45
    assert recipe_of_run(run).chunk_size == 45
    assert cli.main(["train", "--resume", run, "--max-steps", "2", "--quiet", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["chunk_size"] == 45


def test_a_run_starts_from_the_weights_of_a_file_and_an_evaluation_does_not_look_for_them(tmp_path):
    torch.manual_seed(3)
    trained = {name: torch.randn_like(one) for name, one in tiny.net(10, 1).state_dict().items() if one.dim()}
    trained |= {name: one for name, one in tiny.net(10, 1).state_dict().items() if not one.dim()}
    save_file(trained, tmp_path / "trained.safetensors")
    recipe = tiny.recipe(pretrained=str(tmp_path / "trained.safetensors"))
    task = build_task(recipe, torch.device("cpu"), trains=True)
    found = plain_state_dict(task.model)
    assert all(torch.equal(found[name], one.to(found[name].dtype)) for name, one in trained.items())
    assert any("trained.safetensors" in note for note in task.data.notes)
    (tmp_path / "trained.safetensors").unlink()
    build_task(recipe, torch.device("cpu"))
    with pytest.raises(ValueError, match=r"trained\.safetensors"):
        build_task(recipe, torch.device("cpu"), trains=True)
    with pytest.raises(ValueError, match="no pretrained weights"):
        build_task(tiny.recipe(pretrained=True), torch.device("cpu"), trains=True)
