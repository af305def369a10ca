"""What holds a new branch of a layer: copies of the layer's own parameters and buffers."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

_KINDS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, _BatchNorm)


def new_branch(layer: nn.Module, copies: dict[int, Tensor]) -> nn.Module:
    """Make a module that holds a branch: copies of the layer's own tensors, but none of its hooks or children.

    Args:
        layer: The layer before the split.
        copies: The copies that were made for this branch so far, by the id of the tensor, so that a tensor that two
            layers share is shared in the branch too.
    """
    branch = _empty_branch(layer)
    for name, parameter in layer._parameters.items():
        branch.register_parameter(name, None if parameter is None else _copied(parameter, copies))  # type: ignore[arg-type]
    for name, buffer in layer._buffers.items():
        persistent = name not in layer._non_persistent_buffers_set
        branch.register_buffer(name, None if buffer is None else _copied(buffer, copies), persistent)
    tracked = branch._buffers.get("num_batches_tracked")
    if tracked is not None:
        tracked.zero_()
    return branch.train(layer.training)


def _empty_branch(layer: nn.Module) -> nn.Module:
    """For any kind of BatchNorm a plain one, which code that looks for `nn.BatchNorm2d` finds."""
    if not isinstance(layer, _BatchNorm):
        return nn.Module()
    kind = next(kind for kind in _KINDS if isinstance(layer, kind))
    return kind(layer.num_features, layer.eps, layer.momentum, layer.affine, layer.track_running_stats)


def _copied(tensor: Tensor, copies: dict[int, Tensor]) -> Tensor:
    if id(tensor) not in copies:
        copy = tensor.detach().clone()
        copies[id(tensor)] = nn.Parameter(copy, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else copy
        vars(copies[id(tensor)]).update(vars(tensor))  # such as a mark for the optimizer
    return copies[id(tensor)]
