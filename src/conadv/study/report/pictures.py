"""The section with images, their twins, and the difference made visible."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from .blocks import Figure, Section
from .conditions import show
from .drawing import drawn, words
from .evidence import Evidence

_ROWS = (("image", "image"), ("twin", "twin"), ("perturbation", "difference"))
_LEFT, _SIDE, _STEP = 78.0, 60.0, 66.0
_MOST = 6
_LETTERS = 10
# What the network takes a picture for.
_ANSWERS = {"image": "answer", "twin": "twin_answer"}


def picture_section(evidence: Evidence) -> Section | None:
    """None where no gallery was made."""
    galleries: dict[str, dict[str, Any]] = {}
    for result in evidence.results:
        if result.arm not in galleries and (gallery := evidence.gallery(result)):
            galleries[result.arm] = gallery
    if not galleries:
        return None
    drawings = [_drawing(f"gallery-{number}", *one) for number, one in enumerate(galleries.items(), 1)]
    caption = (
        "Training images, the twins that the trained network's attack makes of them, and the difference, magnified "
        "around grey. Below an image and below its twin: what the network takes it for, as in evaluation; a dot marks "
        "a wrong answer."
    )
    return Section("gallery", "Images and their twins", [Figure("figure-gallery", caption, drawings)])


def _drawing(slug: str, arm: str, gallery: Mapping[str, Any]) -> str:
    epsilon = show("attack.epsilon", gallery["epsilon"])
    body = [words(0, 13, f"{arm}: ε = {epsilon}, difference × {gallery['magnified']:.3g}", kind="name")]
    top = 24.0
    for kind, name in _ROWS:
        body.append(words(0, top + _SIDE / 2 + 4, name))
        for number, image in enumerate(gallery["images"][:_MOST]):
            left = _LEFT + _STEP * number
            body.append(_image(left, top, image[kind], f"{name} of class {image['label']}"))
            if kind in _ANSWERS:
                body.append(words(left + _SIDE / 2, top + _SIDE + 12, _told(image, _ANSWERS[kind]), "middle", "small"))
        top += _SIDE + (18 if kind in _ANSWERS else 4)
    return drawn(slug, f"Images, twins and differences of {arm}", top, body)


def _told(image: Mapping[str, str], kind: str) -> str:
    """The network's answer, cut to the width of a picture."""
    answer = image[kind] if image[kind] == image["label"] else f"• {image[kind]}"
    return answer if len(answer) <= _LETTERS else answer[: _LETTERS - 1] + "…"


def _image(x: float, y: float, data: str, text: str) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" width="{_SIDE:g}" height="{_SIDE:g}"'
    frame = f'<rect class="frame" {place}/>'
    return f'<image {place} href="data:image/png;base64,{escape(data)}"><title>{escape(text)}</title></image>{frame}'
