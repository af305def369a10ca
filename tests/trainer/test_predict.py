"""`conadv predict`: against the exported weights in a network that the test builds itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import safetensors
import safetensors.torch
import torch
from PIL import Image

from conadv import cli, trained
from conadv.task.data.arrays import digits
from conadv.trainer.train import train_recipe as train
from support import tiny

MODEL = ["--model", "support.tiny:net"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, next to its export and some of the digits as image files, one of them in a subfolder."""
    folder = tmp_path_factory.mktemp("predict")
    train(tiny.recipe(), folder / "run", None, quiet=True)
    assert cli.main(["export", str(folder / "run"), str(folder / "model.safetensors")]) == 0
    (folder / "images" / "more").mkdir(parents=True)
    for name, pixels in zip(("0.png", "1.PNG", "more/2.png"), map(digits().test.image, range(3)), strict=True):
        Image.fromarray(pixels[..., 0]).save(folder / "images" / name)
    (folder / "images" / "notes.txt").write_text("not an image")
    return folder / "run"


def expected(run: Path, image: Path) -> torch.Tensor:
    """The probabilities of the ten digits, by the exported weights."""
    model = tiny.net(10, 1).double().eval()
    model.load_state_dict(safetensors.torch.load_file(run.parent / "model.safetensors"))
    pixels = torch.from_numpy(np.asarray(Image.open(image)) / 255.0)
    with torch.no_grad():
        return model(pixels[None, None]).softmax(1)[0]


def predicted(capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, list[dict[str, object]]]:
    capsys.readouterr()
    assert cli.main(["predict", *map(str, words), *MODEL, "--json"]) == 0
    found: dict[str, list[dict[str, object]]] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize("source", ["run", "model.safetensors"])
def test_a_run_and_its_export_predict_a_folder_as_the_weights_say(source, run, capsys):
    images = run.parent / "images"
    found = predicted(capsys, run.parent / source, images, "--top", 10)
    assert list(found) == [str(images / name) for name in ("0.png", "1.PNG", "more/2.png")]
    for path, classes in found.items():
        wanted = expected(run, Path(path))
        order = wanted.argsort(descending=True).tolist()
        assert [one["class"] for one in classes] == [str(number) for number in order]
        assert [one["probability"] for one in classes] == pytest.approx(wanted[order].tolist(), abs=1e-12)


def test_an_image_of_another_size_and_mode_is_read_as_evaluation_does(run, capsys, tmp_path):
    large = Image.open(run.parent / "images" / "0.png").resize((40, 32), Image.Resampling.BICUBIC)
    large.convert("RGB").save(tmp_path / "large.png")
    large.crop((4, 0, 36, 32)).resize((8, 8), Image.Resampling.BILINEAR).save(tmp_path / "small.png")
    (classes,) = predicted(capsys, run, tmp_path / "large.png", "--top", 10).values()
    wanted = expected(run, tmp_path / "small.png")  # Pillow and PyTorch agree to one grey level
    for one in classes:
        assert one["probability"] == pytest.approx(float(wanted[int(str(one["class"]))]), abs=0.01)


def test_one_line_per_image_with_the_likeliest_classes(run, capsys):
    image = run.parent / "images" / "0.png"
    assert cli.main(["predict", str(run), str(image), *MODEL, "--top", "2"]) == 0
    likeliest = expected(run, image).topk(2)
    shares = [
        f"{number} {100 * value:.1f} %" for value, number in zip(*map(torch.Tensor.tolist, likeliest), strict=True)
    ]
    assert capsys.readouterr().out == f"{image}  {', '.join(shares)}\n"


def facts_of(export: Path) -> dict[str, Any]:
    with safetensors.safe_open(export, "pt") as file:
        return json.loads(file.metadata()["network"])


def test_an_export_says_what_its_network_takes(run, tmp_path):
    facts = facts_of(run.parent / "model.safetensors")
    assert facts["classes"] == [str(number) for number in range(10)]
    assert (facts["method"], facts["model"], facts["input"]) == ("conadv", "support.tiny:net", [1, 8, 8])
    words = "train --data.name synthetic --data.image-size 8 --data.train-size 8 --batch-size 8 --epochs 1"
    words += " --model resnet8 --width 4 --quiet --run-dir"
    assert cli.main([*words.split(), str(tmp_path / "run")]) == 0
    assert cli.main(["export", str(tmp_path / "run"), str(tmp_path / "model.safetensors")]) == 0
    facts = facts_of(tmp_path / "model.safetensors")
    assert (facts["mean"], facts["std"]) == ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
    Image.fromarray(np.full((8, 8, 3), 99, np.uint8)).save(tmp_path / "grey.png")
    assert cli.main(["predict", str(tmp_path / "model.safetensors"), str(tmp_path / "grey.png")]) == 0


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("run images/notes.txt --model support.tiny:net", "notes.txt: not an image of a known format"),
        ("run images/none.png --model support.tiny:net", "none.png: No such file or directory"),
        ("run --model support.tiny:net", "no images given"),
        ("run run/checkpoints --model support.tiny:net", "no images in "),
        ("run images", "names code to import, which a file may not: if you trust it, pass --model 'support.tiny:net'"),
        ("run images --model resnet8", "do not fit the model resnet8"),
        ("images images", "not a run folder"),
        ("nowhere images", "neither a run folder nor a safetensors export"),
        ("bare.safetensors images", "does not say how its network was built"),
    ],
)
def test_mistakes_are_one_line(words, problem, run, capsys, monkeypatch):
    monkeypatch.chdir(run.parent)
    safetensors.torch.save_file({"weight": torch.zeros(1)}, "bare.safetensors")
    capsys.readouterr()
    assert cli.main(["predict", *words.split()]) == 2
    told = capsys.readouterr()
    assert told.out == "" and told.err.count("\n") == 1 and problem in told.err


def test_a_damaged_file_is_reported_and_the_others_are_predicted(run, capsys, tmp_path):
    image = (run.parent / "images" / "0.png").read_bytes()
    for name, data in (("a.png", image), ("b.png", image[:40]), ("c.png", image)):
        (tmp_path / name).write_bytes(data)
    for more in ([], ["--json"]):
        assert cli.main(["predict", str(run), str(tmp_path), *MODEL, *more]) == 1
        told = capsys.readouterr()
        assert "a.png" in told.out and "c.png" in told.out and "b.png" not in told.out
        assert told.err.startswith(f"error: {tmp_path / 'b.png'}") and told.err.count("\n") == 1


def test_an_exported_program_needs_no_library_and_takes_any_number_of_images(run, tmp_path, capfd):
    """That of PyTorch in the precision of the run, and ONNX in float32, by another runtime."""
    for name, form in (("model.pt2", "torch-export"), ("model.onnx", "onnx")):
        assert cli.main(["export", str(run), str(tmp_path / name), "--format", form, *MODEL]) == 0
    assert capfd.readouterr().err == ""
    extra = {"network.json": ""}
    program = torch.export.load(tmp_path / "model.pt2", extra_files=extra).module()
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    model = tiny.net(10, 1).double().eval()
    model.load_state_dict(safetensors.torch.load_file(run.parent / "model.safetensors"))
    for count in (1, 2, 7):
        images = torch.rand(count, 1, 8, 8, dtype=torch.float64)
        torch.testing.assert_close(program(images), model(images), rtol=0, atol=1e-12)
        (logits,) = session.run(["logits"], {"images": images.float().numpy()})
        torch.testing.assert_close(torch.from_numpy(logits).double(), model(images), rtol=0, atol=1e-6)
    for facts in (extra["network.json"], session.get_modelmeta().custom_metadata_map["network"]):
        assert json.loads(facts)["classes"][3] == "3"


def test_onnx_without_its_packages_is_one_line_that_names_the_extra(run, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(trained, "find_spec", lambda name: None)
    assert cli.main(["export", str(run), str(tmp_path / "model.onnx"), "--format", "onnx", *MODEL]) == 2
    assert capsys.readouterr().err.endswith("onnxscript: pip install 'conadv[onnx]'\n")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("run model.bin", "'model.bin' is no kind of export: choose a name that ends in .safetensors, .pt2 or .onnx"),
        ("run a.safetensors --format torch-export", "--format torch-export does not write .safetensors files: drop it"),
        ("run a.pt2", "names code to import"),
        ("run run/config.toml/a.pt2 --model support.tiny:net", "cannot write run/config.toml/a.pt2"),
    ],
)
def test_an_export_that_cannot_be_is_one_line(words, problem, run, capsys, monkeypatch):
    monkeypatch.chdir(run.parent)
    capsys.readouterr()
    assert cli.main(["export", *words.split()]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and problem in told
