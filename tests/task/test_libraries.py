"""Models of other libraries by name, as far as that needs none of them; the rest is in tests/integrations."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from conadv import cli
from conadv.config import load_recipe
from conadv.task.models import build_model


@pytest.mark.parametrize("library", ["timm", "torchvision"])
def test_a_library_that_is_not_installed(
    library: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    message = f"{library} is not installed: pip install {library}"
    with pytest.raises(ValueError, match=f"^{message}$"):
        build_model(f"{library}:resnet18", 7, 3)
    assert cli.main(["train", "digits", "--model", f"{library}:resnet18", "--run-dir", str(tmp_path / "run")]) == 2
    assert capsys.readouterr().err.strip().endswith(message)
    assert not (tmp_path / "run").exists()


def test_a_file_may_name_a_library_but_no_code_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text('model = "timm:resnet18"\n')
    assert load_recipe(str(path)).model == "timm:resnet18"
    for field, flag in (('model = "{}"', "--model"), ('data.path = "{}"', "--data.path")):
        path.write_text(field.format("package.module:callable"))
        with pytest.raises(ValueError, match=f"names code to import, which a file may not: .* pass {flag} "):
            load_recipe(str(path))
    path.write_text('data.path = "hf:mnist"')
    assert load_recipe(str(path), {"model": "resnet8"}).data.path == "hf:mnist"
