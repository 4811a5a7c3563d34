"""Presets near a name that no model has: of its family, of about its size, and of its generation.

A name such as Qwen3-9B has a family (qwen), a generation (3), a size (9 billion) and maybe further words.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from math import log

from meshwright.spec.presets import PRESETS

_SHOWN, _LISTED = 3, 9
"""Presets that are named at most where the name has a size, and where it has none."""
_NEAR = log(2)
"""Logarithm of the factor within which sizes are about the same."""
_CUTOFF = 0.75
"""Similarity (`difflib`) from which a word may be meant for another."""
_SIZE = re.compile(r"(?:(\d+)x)?(\d+(?:\.\d+)?)([bm])|(\d+)x(\d+)")
_NUMBER = re.compile(r"v?(\d+(?:\.\d+)?)")


@dataclass(frozen=True)
class _Name:
    """The parts of a model's name."""

    generation: tuple[int, ...]
    """(3, 1) of Llama 3.1; empty if the name has none."""
    size: float | None
    """Millions of parameters, if the name has them."""
    words: frozenset[str]
    """Further words, such as coder."""


def near_presets(words: Sequence[str]) -> list[str]:
    """The presets that a name of these words, in lower case, may be meant for, the likeliest first."""
    if misspelt := _misspelt("-".join(words)):
        return [misspelt]
    if (named := _place_of_family(words)) is None:
        return []
    place, family = named
    name, found = _read(words, place), list(_families()[family])
    shared = {each: len(_preset(each).words & name.words) for each in found}
    found = [each for each in found if shared[each] == max(shared.values())]
    if name.size is None:
        return _of_each_size(_of_generation(name, found))
    distance = {each: abs(log((_preset(each).size or 1e-9) / name.size)) for each in found}
    found = [each for each in found if distance[each] < _NEAR] or found
    found = _of_generation(name, found)
    return sorted(found, key=lambda each: (distance[each], _age(each)))[:_SHOWN]


def did_you_mean_preset(words: Sequence[str]) -> str:
    """``; did you mean 'x' or 'y'?`` for the presets near a name of these words, or an empty text."""
    names = [f"'{name}'" for name in near_presets(words)]
    listed = " or ".join([*([", ".join(names[:-1])] if names[1:] else []), *names[-1:]])
    return f"; did you mean {listed}?" if names else ""


def _misspelt(name: str) -> str | None:
    """The preset that a name differs from in a few letters, and in no digit."""
    alike = [each for each in PRESETS if _digits(each) == _digits(name)]
    return next(iter(get_close_matches(name, alike, n=1, cutoff=0.85)), None)


def _digits(name: str) -> str:
    return re.sub(r"[^0-9.]", "", name)


@cache
def _families() -> dict[str, list[str]]:
    """Presets by the letters that their names begin with."""
    found: dict[str, list[str]] = {}
    for preset in PRESETS:
        found.setdefault(_letters(preset), []).append(preset)
    return found


def _letters(word: str) -> str:
    """The letters that a word begins with."""
    return word[: len(word) - len(word.lstrip("abcdefghijklmnopqrstuvwxyz"))]


def _place_of_family(words: Sequence[str]) -> tuple[int, str] | None:
    """The first word that is a family's name, ends with one, or is like one, and the family."""
    families, letters = _families(), [_letters(word) for word in words]
    for is_meant in (
        lambda word: [word] if word in families else [],
        lambda word: [each for each in families if len(each) > 3 and word.endswith(each)],
        lambda word: get_close_matches(word, families, n=1, cutoff=_CUTOFF),
    ):
        for place, word in enumerate(letters):
            if meant := is_meant(word):
                return place, meant[0]
    return None


@cache
def _preset(name: str) -> _Name:
    return _read(name.split("-"), 0)


def _read(words: Sequence[str], place: int) -> _Name:
    """The parts of a name whose family is the word at a place, and its generation that word's end or the
    next word."""
    rest = list(words)
    number = rest[place][len(_letters(rest[place])) :]
    further, size = [number, *rest[place + 1 :]] if number else rest[place + 1 :], None
    generation: tuple[int, ...] = ()
    if further and (found := _NUMBER.fullmatch(further[0])):
        generation = tuple(map(int, found[1].split(".")))
        further = further[1:]
    sizes = [found for word in further if (found := _SIZE.fullmatch(word))]
    for found in sizes:
        times, each, unit = found[1] or found[4], found[2] or found[5], found[3] or "b"
        size = size or int(times or 1) * float(each) * (1e3 if unit == "b" else 1.0)
    return _Name(generation, size, frozenset(further) - {found[0] for found in sizes})


def _of_generation(name: _Name, presets: list[str]) -> list[str]:
    """Those of a name's generation, or else of its first number, or else all."""
    for length in (2, 1) if name.generation else ():
        wanted = name.generation[:length]
        if found := [each for each in presets if _preset(each).generation[:length] == wanted]:
            return found
    return presets


def _of_each_size(presets: Iterable[str]) -> list[str]:
    """The newest of each size, by size; where these are many, those of the newest generation."""
    found: dict[float | str, str] = {}
    for preset in sorted(presets, key=lambda each: (_age(each), len(each))):
        found.setdefault(_preset(preset).size or preset, preset)
    newest = max(_preset(each).generation[:1] for each in found.values())
    if len(found) > _LISTED:
        found = {size: each for size, each in found.items() if _preset(each).generation[:1] == newest}
    return sorted(found.values(), key=lambda each: _preset(each).size or 0.0)[:_LISTED]


def _age(preset: str) -> tuple[int, int]:
    """A key by which newer generations come first."""
    major, minor, *_ = (*_preset(preset).generation, 0, 0)
    return -major, -minor
