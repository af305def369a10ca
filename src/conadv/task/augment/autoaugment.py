"""AutoAugment: one of 25 pairs of operations an image, each applied with its own probability.

Levels 0 to 9 divide the published ranges evenly, a higher level being the stronger change, and the direction is drawn
where there are two: the reading of the usual libraries. (The authors' own code divides by 10 and differs in Posterize,
Solarize and the enhancements, and between its two versions.)
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
    """A policy, and the grey level of the area that a turned or moved image uncovers."""

    policy: tuple[SubPolicy, ...]
    fill: int

    def __call__(self, images: Planes, seeds: Seeds) -> Planes:
        """(N, C, H, W) to the same shape, C being 1 or 3."""
        augmented = own_copy(images, "AutoAugment")
        # A column each: the sub-policy; then for both operations whether, and in which direction.
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
