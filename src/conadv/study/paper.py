"""The numbers published in the paper: ResNet-50 on ImageNet, 90 epochs, LARS.

Source: Liu, Chen, Cheng, Hsieh, You: Concurrent Adversarial Learning for Large-Batch Training, ICLR 2022.
Batches are in thousands of images; accuracies and gaps in percent and points; epsilon in 255ths of the pixel range.
"""

from __future__ import annotations

SOURCE = (
    "Liu, Chen, Cheng, Hsieh, You: Concurrent Adversarial Learning for Large-Batch Training, ICLR 2022 "
    "(ResNet-50 on ImageNet, 90 epochs; a single figure each, no spread given)"
)

VANILLA, AUTOAUGMENT = "vanilla", "vanilla + AutoAugment"
DISADV, CONADV, CONADV_AUTOAUGMENT = "DisAdv", "ConAdv", "ConAdv + AutoAugment"

# Tables 1 and 2: top-1 accuracy by batch.
BATCHES = (1, 4, 8, 16, 32, 64, 96)
TOP1: dict[str, tuple[float, ...]] = {
    VANILLA: (76.9, 76.9, 76.6, 76.6, 76.6, 75.3, 74.3),
    AUTOAUGMENT: (77.5, 77.5, 77.4, 77.1, 76.9, 75.6, 74.3),
    DISADV: (77.4, 77.4, 77.4, 77.4, 77.3, 76.2, 75.3),
    CONADV: (77.4, 77.4, 77.4, 77.4, 77.3, 76.2, 75.3),
    CONADV_AUTOAUGMENT: (78.5, 78.5, 78.5, 78.5, 78.3, 77.3, 76.2),
}

# Table 3: seconds of the whole training; None: not given.
TIME_BATCHES = (16, 32, 64)
SECONDS: dict[str, tuple[int | None, ...]] = {
    VANILLA: (1194, 622, None),
    DISADV: (1657, 1191, 592),
    CONADV: (1277, 677, 227),
}

# Figure 4b: images/ms at a batch of 2k on as many processors as it can use.
LIMIT_THROUGHPUT = {VANILLA: 75.7, DISADV: 36.1, CONADV: 71.3}

# Section 4.2: images/ms of DisAdv by batch, in thousands, on batch/64 processors.
DISADV_THROUGHPUT = {4: 10.3, 32: 81.7}

# Table 4: training minus test accuracy.
GAP_BATCHES = (16, 32, 64, 96)
GAP: dict[str, tuple[float, ...]] = {
    VANILLA: (4.8, 5.9, 4.3, 4.6),
    CONADV: (2.9, 3.5, 2.0, 2.7),
    CONADV_AUTOAUGMENT: (3.1, 3.4, 2.3, 2.2),
}

# Table 5: top-1 accuracy by epsilon, for a method and a batch.
EPSILONS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12)
TOP1_BY_EPSILON: dict[tuple[str, int], tuple[float, ...]] = {
    (CONADV, 32): (76.8, 77.2, 77.3, 77.4, 77.3, 77.3, 77.3, 77.3, 77.3, 77.3, 77.2, 77.2),
    (CONADV_AUTOAUGMENT, 32): (77.8, 78.0, 78.1, 78.1, 78.0, 78.3, 78.2, 78.2, 78.2, 78.2, 78.2, 78.1),
    (CONADV, 64): (75.7, 76.2, 76.3, 76.3, 76.4, 76.7, 76.4, 76.4, 76.4, 76.4, 76.4, 76.3),
    (CONADV_AUTOAUGMENT, 64): (76.8, 77.0, 76.8, 77.0, 77.1, 77.1, 77.2, 77.4, 77.2, 77.1, 77.1, 77.1),
    (CONADV, 96): (74.6, 75.1, 75.1, 75.1, 75.3, 75.1, 75.1, 75.1, 75.3, 75.2, 75.1, 75.1),
    (CONADV_AUTOAUGMENT, 96): (75.8, 75.9, 75.8, 76.0, 76.0, 76.0, 76.0, 76.1, 76.2, 76.2, 76.0, 76.0),
}
