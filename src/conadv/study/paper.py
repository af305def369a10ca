"""The numbers published in the paper: ResNet-50 on ImageNet, 90 epochs, LARS. A report shows them on request."""

from __future__ import annotations

import pandas as pd

SOURCE = (
    "Liu, Chen, Cheng, Hsieh, You: Concurrent Adversarial Learning for Large-Batch Training, ICLR 2022 "
    "(ResNet-50 on ImageNet, 90 epochs; a single number each, no spread given)"
)

# Tables 1 and 2: top-1 accuracy, percent, by batch in thousands of images.
BATCHES = (1, 4, 8, 16, 32, 64, 96)
TOP1: dict[str, tuple[float, ...]] = {
    "vanilla": (76.9, 76.9, 76.6, 76.6, 76.6, 75.3, 74.3),
    "vanilla + AutoAugment": (77.5, 77.5, 77.4, 77.1, 76.9, 75.6, 74.3),
    "DisAdv": (77.4, 77.4, 77.4, 77.4, 77.3, 76.2, 75.3),
    "ConAdv": (77.4, 77.4, 77.4, 77.4, 77.3, 76.2, 75.3),
    "ConAdv + AutoAugment": (78.5, 78.5, 78.5, 78.5, 78.3, 77.3, 76.2),
}

# Table 5: top-1 accuracy of ConAdv by batch and epsilon, in 255ths of the pixel range.
EPSILONS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12)
TOP1_BY_EPSILON: dict[int, tuple[float, ...]] = {
    32: (76.8, 77.2, 77.3, 77.4, 77.3, 77.3, 77.3, 77.3, 77.3, 77.3, 77.2, 77.2),
    64: (75.7, 76.2, 76.3, 76.3, 76.4, 76.7, 76.4, 76.4, 76.4, 76.4, 76.4, 76.3),
    96: (74.6, 75.1, 75.1, 75.1, 75.3, 75.1, 75.1, 75.1, 75.3, 75.2, 75.1, 75.1),
}


def tables() -> dict[str, pd.DataFrame]:
    """The paper's tables, by caption."""
    by_epsilon = {f"batch {batch}k": values for batch, values in TOP1_BY_EPSILON.items()}
    return {
        "Top-1 accuracy by batch size, percent (tables 1 and 2)": _table(TOP1, [f"{batch}k" for batch in BATCHES]),
        "Top-1 accuracy of ConAdv by ε, percent (table 5)": _table(by_epsilon, [f"{e}/255" for e in EPSILONS]),
    }


def _table(rows: dict[str, tuple[float, ...]], columns: list[str]) -> pd.DataFrame:
    return pd.DataFrame.from_dict(rows, orient="index", columns=columns).reset_index(names="method")
