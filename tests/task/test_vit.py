"""The vision transformer, against PyTorch's own encoder layer and what the attention of one patch is."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import tiny
from conadv import cli
from conadv.task.models import build_model
from conadv.task.vit import SIZES, Block, places


def encoder_layer(block: Block) -> nn.TransformerEncoderLayer:
    """PyTorch's layer with the weights of a block."""
    width = block.proj.in_features
    layer = nn.TransformerEncoderLayer(
        width, block.heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
    ).double()
    pairs = {
        "self_attn.in_proj_": block.qkv, "self_attn.out_proj.": block.proj, "norm1.": block.norm1,
        "norm2.": block.norm2, "linear1.": block.mlp[0], "linear2.": block.mlp[2],
    }  # fmt: skip
    layer.load_state_dict(
        {f"{mine}{kind}": getattr(own, kind) for mine, own in pairs.items() for kind in ("weight", "bias")}
    )
    return layer


@pytest.mark.parametrize(("width", "heads"), [(8, 1), (128, 2)])
def test_a_block_is_the_encoder_layer_of_pytorch(width: int, heads: int) -> None:
    block = Block(width, heads).double()
    x = torch.randn(2, 5, width, dtype=torch.float64)
    torch.testing.assert_close(block(x), encoder_layer(block)(x), rtol=0, atol=1e-12)


def test_places_are_sines_and_cosines_of_row_and_column() -> None:
    found = places(torch.zeros(1, 8, 2, 3, dtype=torch.float64))
    for row in range(2):
        for column in range(3):
            waves = [(wave, 10_000.0**-exponent) for wave in (row, column) for exponent in (0, 1)]
            angles = [place * frequency for place, frequency in waves]
            expected = [f(a) for part in (angles[:2], angles[2:]) for f in (math.sin, math.cos) for a in part]
            assert found[3 * row + column].tolist() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("name", SIZES)
def test_parameters_follow_from_the_size(name: str) -> None:
    size, classes, channels = SIZES[name], 7, 3
    w = size.width
    block = (3 * w * w + 3 * w) + (w * w + w) + 2 * 2 * w + (4 * w * w + 4 * w) + (4 * w * w + w)
    expected = channels * size.patch**2 * w + w + size.depth * block + 2 * w + w * classes + classes
    with torch.device("meta"):
        model = build_model(name, classes, channels)
    assert sum(parameter.numel() for parameter in model.parameters()) == expected


@pytest.mark.parametrize("shape", [(2, 1, 8, 8), (3, 1, 12, 16)])
def test_images_of_any_whole_number_of_patches(shape: tuple[int, ...]) -> None:
    model = build_model("vit4", 5, 1, width=8)
    nn.init.normal_(model.head.weight)  # type: ignore[union-attr, arg-type]
    images = torch.rand(shape)
    outputs: Tensor = model(images)
    assert outputs.shape == (shape[0], 5)
    turned: Tensor = model(images.flip(3))
    assert not torch.allclose(outputs, turned)  # it knows where a patch is


def test_bad_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="images of 8 × 9 pixels cannot be cut into patches of 4"):
        build_model("vit4", 5, 1, width=8)(torch.rand(1, 1, 8, 9))
    for width in (6, 130):
        with pytest.raises(ValueError, match=f"width {width}: a vision transformer needs"):
            build_model("vit4", 5, 1, width=width)


def test_a_run_trains_it(tmp_path: Path) -> None:
    words = tiny.words(model="vit4", width=8, max_steps=2, precision="float32")
    assert cli.main(["train", *words, "--run-dir", str(tmp_path / "run"), "--quiet"]) == 0
