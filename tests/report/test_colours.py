"""Colours of the pages: told apart with any common colour vision, and visible on what they lie on."""

from __future__ import annotations

import re
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

import meshwright.report

STYLES = Path(meshwright.report.__file__).parent / "templates"
# Machado, Oliveira & Fernandes 2009: what people with each deficiency see, for linear RGB.
VISIONS = {
    "all cones": np.eye(3),
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "tritanopia": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]
    ),
}
# Ottosson 2020, Oklab.
_LMS = np.array(
    [
        [0.4122214708, 0.5363325363, 0.0514459929],
        [0.2119034982, 0.6806995451, 0.1073969566],
        [0.0883024619, 0.2817188376, 0.6299787005],
    ]
)
_LAB = np.array(
    [
        [0.2104542553, 0.7936177850, -0.0040720468],
        [1.9779984951, -2.4285922050, 0.4505937099],
        [0.0259040371, 0.7827717662, -0.8086757660],
    ]
)


def linear(colour: str) -> np.ndarray:
    values = np.array([int(colour[place : place + 2], 16) for place in (1, 3, 5)]) / 255
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def oklab(rgb: np.ndarray) -> np.ndarray:
    return _LAB @ np.cbrt(_LMS @ np.clip(rgb, 0, 1))


def contrast(one: str, other: str) -> float:
    low, high = sorted(float(linear(colour) @ [0.2126, 0.7152, 0.0722]) for colour in (one, other))
    return (high + 0.05) / (low + 0.05)


def colours(text: str, names: str) -> dict[str, str]:
    return dict(re.findall(rf"--({names}): (#[0-9a-f]{{6}});", text))


def themes() -> dict[str, dict[str, str]]:
    text = (STYLES / "page.css").read_text()
    light, dark = text.split("@media (prefers-color-scheme: dark)")
    return {
        name: colours(part.split("* {")[0], r"[a-z]+\d?(?:-ink)?")
        for name, part in (("light", light), ("dark", dark))
    }


def nearest(palette: dict[str, str], vision: str) -> tuple[float, str]:
    """The least distance of two colours in Oklab, times 100, as a vision sees them; 2 is just noticeable."""
    seen = {name: oklab(VISIONS[vision] @ linear(colour)) for name, colour in palette.items()}
    return min(
        (100 * float(np.linalg.norm(seen[one] - seen[other])), f"{one} and {other}")
        for one, other in combinations(seen, 2)
    )


@pytest.mark.parametrize("vision", VISIONS)
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_colours_are_told_apart_with_any_colour_vision(theme: str, vision: str) -> None:
    palette = {name: colour for name, colour in themes()[theme].items() if re.fullmatch(r"c\d", name)}
    assert len(palette) == 8
    distance, pair = nearest(palette, vision)
    assert distance > 7, pair


@pytest.mark.parametrize("vision", VISIONS)
def test_kinds_of_actions_are_told_apart_with_any_colour_vision(vision: str) -> None:
    kinds = colours((STYLES / "timeline.css").read_text(), r"k-[a-z]+")
    assert len(kinds) == 5
    distance, pair = nearest(kinds, vision)
    assert distance > 7, pair


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_bars_stand_out_from_the_card_and_text_is_legible(theme: str) -> None:
    found = themes()[theme]
    for name, colour in found.items():
        if re.fullmatch(r"c\d", name):
            assert contrast(colour, found["card"]) >= 2.9, name
    for text, ground in (
        ("ink", "card"),
        ("ink", "page"),
        ("soft", "card"),
        ("soft", "page"),
        ("note-ink", "note"),
    ):
        assert contrast(found[text], found[ground]) >= 4.5, (text, ground)
    assert contrast(found["focus"], found["card"]) >= 3
