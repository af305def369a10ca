"""Let torchvision be imported beside a build of PyTorch that its compiled operators were not made for.

It fails on import where it describes two of them (timm and Lightning import it too). No model here uses them: it is
enough that they are declared before the import. As a script, it runs another one like that.
"""

from __future__ import annotations

import runpy
import sys
import warnings
from pathlib import Path

import torch

_LIBRARY: list[torch.library.Library] = []  # its declarations end with it


def declare() -> None:
    """Import torchvision, with declarations of its own operators if it needs them; do nothing if it is missing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            import torchvision
        except ImportError:
            pass
        except RuntimeError:
            for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
                del sys.modules[name]
            _LIBRARY.append(torch.library.Library("torchvision", "DEF"))
            for operator in ("nms", "qnms"):
                _LIBRARY[0].define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            import torchvision  # noqa: F401


if __name__ == "__main__":
    declare()
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
