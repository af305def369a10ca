"""Which parameters are adapted and decayed."""

from __future__ import annotations

import pytest
from torch import nn

from conadv.optim.base import parameter_groups


class Branched(nn.BatchNorm2d):
    """A layer whose other branch lives below it, as a split BatchNorm's does."""

    def __init__(self, features: int) -> None:
        super().__init__(features)
        self.adv = nn.BatchNorm2d(features)


def test_groups_leave_out_biases_and_normalization() -> None:
    model = nn.ModuleDict(
        {
            "conv": nn.Conv2d(3, 4, 3),
            "bn": Branched(4),
            "group": nn.GroupNorm(2, 4),
            "layer": nn.LayerNorm([4, 6, 6]),
            "rms": nn.RMSNorm([4, 6]),
            "instance": nn.InstanceNorm2d(4, affine=True),
            "rnn": nn.LSTM(4, 4),
            "attention": nn.MultiheadAttention(4, 2, add_bias_kv=True),
            "fc": nn.Linear(4, 2),
        }
    )
    names = {parameter: name for name, parameter in model.named_parameters()}
    adapted, plain = parameter_groups(model, 0.25)
    assert {names[parameter] for parameter in adapted["params"]} == {
        "conv.weight",
        "rnn.weight_ih_l0",
        "rnn.weight_hh_l0",
        "attention.in_proj_weight",
        "attention.out_proj.weight",
        "fc.weight",
    }
    assert {"bn.adv.weight", "bn.adv.bias", "bn.weight"} < {names[parameter] for parameter in plain["params"]}
    assert len(adapted["params"]) + len(plain["params"]) == len(names)
    assert (adapted["weight_decay"], adapted["adapt"]) == (0.25, True)
    assert (plain["weight_decay"], plain["adapt"]) == (0.0, False)


def test_groups_hold_a_shared_parameter_once_and_a_frozen_one_not() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    model[2].weight.requires_grad_(False)
    model[2].bias = model[0].bias
    adapted, plain = parameter_groups(model, 0.1)
    assert [id(p) for p in adapted["params"]] == [id(model[0].weight)]
    assert [id(p) for p in plain["params"]] == [id(model[0].bias), id(model[1].bias)]
    with pytest.raises(ValueError, match="no parameter to train"):
        parameter_groups(model.requires_grad_(False), 0.1)
