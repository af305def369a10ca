"""Promise: a trained checkpoint is an ordinary checkpoint."""

from __future__ import annotations

import io

import torch

from conadv import plain_state_dict, split_batchnorm
from support.settings import Setting, every_method, small_batches, small_cnn, train


@every_method
def test_it_loads_strictly_into_the_model_as_it_was(setting: Setting) -> None:
    model = split_batchnorm(small_cnn())
    train(setting.make(model, chunk_size=4), model, small_batches(4))
    file = io.BytesIO()
    torch.save(plain_state_dict(model), file)
    file.seek(0)
    plain = small_cnn(seed=1)
    plain.load_state_dict(torch.load(file), strict=True)
    images = small_batches(1, seed=8)[0][0]
    torch.testing.assert_close(plain.eval()(images), model.eval()(images), rtol=0, atol=1e-12)
    # And back: training goes on from it as from any pretrained model.
    again = split_batchnorm(small_cnn(seed=2))
    again.load_state_dict(plain.state_dict(), strict=True)
    assert torch.equal(again.eval()(images), model(images))
