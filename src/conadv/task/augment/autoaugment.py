"""AutoAugment: one of 25 pairs of operations per image, each applied with its own probability.

As in the usual libraries, levels 0 to 9 divide the published ranges evenly, from weak to strong, and operations with
two directions take a random one. (The authors' code divides by 10, and differs in Posterize, Solarize and the
enhancements, and between its two versions.)
"""

from __future__ import annotations

from dataclasses import dataclass

from PIL import Image

from conadv.task.augment.operations import on_planes, operate, own_copy
from conadv.task.augment.policies import SubPolicy
from conadv.task.data.draws import Seeds, uniforms
from conadv.task.data.source import Planes


@dataclass(frozen=True)
class AutoAugment:
    """A policy, and the grey level of areas that a rotation or translation uncovers."""

    policy: tuple[SubPolicy, ...]
    fill: int

    def __call__(self, images: Planes, seeds: Seeds) -> Planes:
        """Augment images of shape (N, C, H, W), with 1 or 3 channels."""
        augmented = own_copy(images, "AutoAugment")
        # Columns: the sub-policy, then for each of its two operations whether to apply it, and the direction.
        for place, (which, *draws) in enumerate(uniforms(seeds, 5).tolist()):
            pair = self.policy[int(which * len(self.policy))]
            chances, signs = draws[0::2], [1 if draw < 0.5 else -1 for draw in draws[1::2]]
            wanted = [
                (name, level, sign)
                for (name, probability, level), chance, sign in zip(pair, chances, signs, strict=True)
                if chance < probability
            ]
            if wanted:
                augmented[place] = self._apply(augmented[place], wanted)
        return augmented

    def _apply(self, planes: Planes, wanted: list[tuple[str, int, int]]) -> Planes:
        def change(image: Image.Image) -> Image.Image:
            for name, level, sign in wanted:
                image = operate(image, name, level / 9, sign, self.fill)
            return image

        return on_planes(planes, change)
