"""The same images give bitwise the same training, in whatever form they lie on the disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from conadv.trainer.train import train_recipe
from support import tiny
from task.data.samples import jpeg_set
from task.data.test_open import WRITERS

TRAIN, TEST = jpeg_set(12, height=20, width=24), jpeg_set(4, height=20, width=24)
FIELDS = {
    "model": "support.tiny:pooled",
    "precision": "float32",
    "batch_size": 8,
    "data__train_size": None,
    "data__image_size": 16,
}


@pytest.mark.parametrize("augment", ["crop-flip", "autoaugment-cifar10"])
@pytest.mark.parametrize("method", ["vanilla", "conadv"])
def test_every_form_of_the_same_images_gives_bitwise_the_same_training(
    tmp_path: Path, method: str, augment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CONADV_CACHE", str(tmp_path / "cache"))
    states, summaries = {}, {}
    for workers, (kind, write) in enumerate(WRITERS.items()):
        path, run = write(tmp_path / kind, TRAIN, TEST), tmp_path / f"{kind} run"
        changes = {"method": method, "data__path": str(path), "data__augment": augment, "data__workers": workers}
        summaries[kind] = train_recipe(tiny.recipe(**FIELDS, **changes), run, None, quiet=True)
        states[kind] = tiny.state(run)
    first, *others = WRITERS
    for kind in others:
        assert tiny.equal(states[kind], states[first]), kind
        assert summaries[kind]["test_loss"] == summaries[first]["test_loss"], kind
