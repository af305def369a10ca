"""Models of other libraries. They are no dependencies: a test is skipped where its library is missing."""

from __future__ import annotations

import sys
import warnings

import torch

# torchvision built for another torch cannot load its compiled operators, and then fails on import where it describes
# two of them (timm imports it too). No model here uses them: it is enough that they are declared before the import.
_LIBRARY = None
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    try:
        import torchvision
    except ImportError:
        pass
    except RuntimeError:
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        _LIBRARY = torch.library.Library("torchvision", "DEF")
        for operator in ("nms", "qnms"):
            _LIBRARY.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        import torchvision  # noqa: F401
