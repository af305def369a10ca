"""Other libraries. They are no dependencies: a test is skipped where its library is missing."""

import torchvision_ops

torchvision_ops.declare()
