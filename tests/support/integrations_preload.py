"""What rank processes of the tests in tests/integrations are forked with: importing it takes each of them half a minute
on a busy machine, and it is imported once here."""

import importlib
import warnings
from contextlib import suppress

from support import torchvision_ops

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torchvision_ops.declare()
    for name in ("accelerate", "lightning", "timm", "transformers.trainer", "torch.distributed.fsdp", "torch._dynamo"):
        with suppress(ImportError):
            importlib.import_module(name)
