"""Promise: a twin lies in the ball around its image and in the pixel range; epsilon 0 gives the image itself."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from conadv import PGD

CLASSES = 3
CHANNELS = 2


def model_for(images: Tensor) -> nn.Module:
    generator = torch.Generator().manual_seed(3)
    linear = nn.Linear(images[0].numel(), CLASSES)
    with torch.no_grad():
        linear.weight.copy_(torch.randn(linear.weight.shape, generator=generator))
    return nn.Sequential(nn.Flatten(), linear).to(images.dtype)


def attacks(normalized: bool) -> st.SearchStrategy[PGD]:
    return st.builds(
        PGD,
        epsilon=st.sampled_from([0.0, 1e-6, 4 / 255, 0.3, 1.0]),
        step_size=st.sampled_from([None, 0.0, 1 / 255, 0.5, 1e6]),
        steps=st.integers(1, 4),
        norm=st.sampled_from(["linf", "l2"]),
        direction=st.sampled_from([None, "sign", "unit", "raw", "noise"]),
        random_start=st.sampled_from([0.0, 0.5, 1.0]),
        targeted=st.booleans(),
        mean=st.just((0.485, 0.406) if normalized else None),
        std=st.just((0.229, 0.5) if normalized else None),
    )


@st.composite
def pixels(draw: st.DrawFn) -> Tensor:
    """Images in [0, 1] with many pixels at the edges of the range."""
    seed, count = draw(st.integers(0, 2**32)), draw(st.integers(1, 4))
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(count, CHANNELS, 3, 3, generator=generator, dtype=dtype) * 1.6 - 0.3).clamp(0, 1)


@settings(max_examples=150, deadline=None)
@given(data=st.data(), images=pixels())
def test_always_inside(data: st.DataObject, images: Tensor) -> None:
    attack = data.draw(st.booleans().flatmap(attacks))
    labels = torch.arange(len(images)) % CLASSES
    mean = images.new_tensor(attack.mean or (0.0,) * CHANNELS).view(-1, 1, 1)
    std = images.new_tensor(attack.std or (1.0,) * CHANNELS).view(-1, 1, 1)
    inputs = (images - mean) / std
    twins = attack(model_for(images), F.cross_entropy, inputs, labels)

    rounding = 8 * torch.finfo(images.dtype).eps * (float((1 / std).max()) + float(inputs.abs().max()))
    delta = ((twins - inputs) * std).flatten(1)
    length = delta.abs().amax(1) if attack.norm == "linf" else delta.norm(dim=1)
    assert twins.shape == images.shape and twins.dtype == images.dtype
    assert bool(twins.isfinite().all())
    assert float(length.max()) <= attack.epsilon + rounding
    seen = twins * std + mean
    assert float(seen.min()) >= -rounding and float(seen.max()) <= 1 + rounding
    if attack.mean is None:  # without normalization the range is exact
        assert float(twins.min()) >= 0 and float(twins.max()) <= 1
    if attack.epsilon == 0:
        assert torch.equal(twins, inputs)


def test_an_image_that_was_rounded_over_the_edge_stays_itself() -> None:
    """Normalizing black and white in another order than ours may leave the range by a last digit."""
    attack = PGD(0.0, mean=(0.485, 0.406), std=(0.229, 0.225), direction="noise")
    edges = torch.tensor([0.0, 1.0]).view(2, 1, 1, 1).expand(2, CHANNELS, 3, 3)
    mean, std = torch.tensor(attack.mean).view(-1, 1, 1), torch.tensor(attack.std).view(-1, 1, 1)
    images = torch.nextafter((edges - mean) / std, (edges - 0.5) * torch.inf)
    assert torch.equal(attack(nn.Identity(), F.cross_entropy, images, torch.zeros(2)), images)
