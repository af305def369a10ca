"""How much of a training step is data, with decoded images kept in memory and without, measured alternately.

    python tests/data_share.py --path DATA --size 16

Times are those of the processor, of one thread, so that a busy machine changes them little.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from conadv.task.augment import augmentation
from conadv.task.data import keep, open_data
from conadv.task.models import build_model, fastest_memory
from conadv.task.stream import Stream

BATCH = 250


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", required=True, help="images on disk")
    parser.add_argument("--size", type=int, default=16, help="pixels that images are brought to")
    parser.add_argument("--images", type=int, default=5_000)
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    torch.set_num_threads(1)
    data, augment = open_data("path", options.path, options.images), augmentation("crop-flip", options.size)
    decoding, kept = (
        Stream(keep(data, augment.fit, megabytes).train, BATCH, BATCH, 0, augment) for megabytes in (0, 1024)
    )
    for step in range(kept.steps_per_epoch):
        kept.chunk(step, 0)  # the first epoch decodes in both
    model = fastest_memory(
        build_model("resnet8", classes=len(data.train.classes), in_channels=3, width=16), torch.device("cpu")
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def learn(images: torch.Tensor, labels: torch.Tensor) -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(images.float() / 255), labels).backward()
        optimizer.step()

    seconds: dict[str, list[float]] = {"decoding": [], "kept": [], "step": []}
    for step in range(options.steps):
        seconds["decoding"].append(timed(lambda step=step: decoding.chunk(step, 0)))
        seconds["kept"].append(timed(lambda step=step: kept.chunk(step, 0)))
        chunk = kept.chunk(step, 0)
        seconds["step"].append(timed(lambda chunk=chunk: learn(*chunk)))
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    for name in ("decoding", "kept"):
        share = medians[name] / (medians[name] + medians["step"])
        print(
            f"{name:8}  {1000 * medians[name]:7.2f} ms a batch of {BATCH}, {share:.1%} of a vanilla step with its data"
        )


def timed(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


if __name__ == "__main__":
    main()
