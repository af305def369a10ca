"""The section with images, their twins, and the difference made visible."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from .blocks import Figure, Section
from .conditions import show
from .drawing import drawn, words
from .evidence import Evidence

_ROWS = (("image", "image"), ("twin", "twin"), ("perturbation", "difference"))
_LEFT, _SIDE, _STEP = 78.0, 60.0, 66.0
_MOST = 6


def picture_section(evidence: Evidence) -> Section | None:
    """None where no gallery was made."""
    galleries: dict[str, dict[str, Any]] = {}
    for result in evidence.results:
        if result.arm not in galleries and (gallery := evidence.gallery(result)):
            galleries[result.arm] = gallery
    figures = [_figure(f"gallery-{number}", *one) for number, one in enumerate(galleries.items(), 1)]
    return Section("gallery", "Images and their twins", figures) if figures else None


def _figure(slug: str, arm: str, gallery: Mapping[str, Any]) -> Figure:
    epsilon = show("attack.epsilon", gallery["epsilon"])
    caption = (
        f"{arm}: training images, the twins that the trained network's attack makes of them (ε = {epsilon}), and the "
        f"difference, magnified {gallery['magnified']:.3g} times around grey. Below an image and below its twin: what "
        "the network takes it for, as in evaluation; a dot marks a wrong answer."
    )
    return Figure(f"figure-{slug}", caption, [_drawing(slug, arm, gallery["images"][:_MOST])])


def _drawing(slug: str, arm: str, images: Sequence[Mapping[str, str]]) -> str:
    body, top = [], 4.0
    for kind, name in _ROWS:
        body.append(words(0, top + _SIDE / 2 + 4, name))
        for number, image in enumerate(images):
            body.append(_image(_LEFT + _STEP * number, top, image[kind], f"{name} of class {image['label']}"))
            if kind != "perturbation":
                answer = image["answer" if kind == "image" else "twin_answer"]
                told = answer if answer == image["label"] else f"• {answer}"
                body.append(words(_LEFT + _STEP * number + _SIDE / 2, top + _SIDE + 14, _fit(told), "middle", "quiet"))
        top += _SIDE + (20 if kind != "perturbation" else 4)
    return drawn(slug, f"Images, twins and differences of {arm}", top, body)


def _image(x: float, y: float, data: str, text: str) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" width="{_SIDE:g}" height="{_SIDE:g}"'
    return f'<image {place} href="data:image/png;base64,{escape(data)}"><title>{escape(text)}</title></image>'


def _fit(text: str) -> str:
    return text if len(text) <= 10 else text[:9] + "…"
