"""Checks of a tokenizer.json before its use, and the errors of the library that uses it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from typing import Any

from meshwright.spec.errors import UserError
from meshwright.spec.files import shortened
from meshwright.spec.records import show

MAX_ID = 2**24
"""Largest identifier of a token; published vocabularies have up to 2^20 entries."""
MAX_GROWTH = 64
"""Most times that a tokenizer may lengthen a text; published ones stay below 20."""
_FACTORS = {"ByteLevel": 2.0, "Precompiled": 4.0}
"""Most bytes that a step writes for each that it reads, by the step's type."""


@contextmanager
def library_errors(before: str, after: str = "") -> Iterator[None]:
    """Raise `UserError` for any error of the tokenizers library: `before`, the reason and `after`.

    The library raises bare `Exception`, and where its Rust code panics, as in a pattern that takes
    exponential time, a `PanicException`, which is a `BaseException` without a name to catch it by.
    """
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = shortened(" ".join(str(error).split()))
        raise UserError(f"{before} ({reason}){after}") from error


def read_tree(backend: Any, where: str) -> dict[str, Any]:
    """Return the tree of the tokenizer.json of a `tokenizers.Tokenizer`, checked before its use.

    Raises `UserError`, which starts with `where`, for an identifier that is too large (the library lists the
    free ones below it), and for a tokenizer that lengthens texts without bound: replacements of a letter
    by 32, one after another, would take all memory for a short text.
    """
    token, number = max(backend.get_vocab(True).items(), key=lambda entry: entry[1], default=("", 0))
    if number > MAX_ID:
        raise UserError(
            f"{where}: the token {show(token)} has the id {number}, and ids up to {MAX_ID} are taken; give "
            "another tokenizer"
        )
    tree: dict[str, Any] = json.loads(backend.to_str())
    for parts in (("normalizer", "pre_tokenizer"), ("decoder",)):
        times = prod(_growth(tree[part]) for part in parts)
        if times > MAX_GROWTH:
            raise UserError(
                f"{where}: its {' and '.join(parts)} may make a text {times:.3g} times as long, and at most "
                f"{MAX_GROWTH} are taken; give another tokenizer"
            )
    return tree


def _growth(step: Any) -> float:
    """Return the most bytes that a step, or a sequence of steps, writes for each byte that it reads."""
    if isinstance(step, list):
        return prod(map(_growth, step))
    if not isinstance(step, dict):
        return 1.0
    if step.get("type") == "Replace":
        written, replaced = len(step["content"].encode()), step["pattern"].get("String")
        # A regular expression may match nothing, and so between any two bytes.
        return max(1.0, written / len(replaced.encode())) if replaced else 1.0 + written
    return _FACTORS.get(step.get("type", ""), 1.0) * prod(map(_growth, step.values()))
