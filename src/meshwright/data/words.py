"""Texts split into words by the rule of a byte-level tokenizer: what one process knows of them.

A byte-level tokenizer splits a text by a regular expression first, and encodes every word by itself. Words
repeat, so a text is numbers: it is searched for *units*, several words that end where the rule always ends
one, each of which is numbered; a unit is a row of numbered words, and a word a row of ids. A unit of ASCII is
split by the rule itself, in which `\\p{L}` and the like are the same for Python and for the library; with any
other character it counts as one word, so no table of Unicode is needed. The library encodes each new word,
and so ids are the library's by construction. Imports little, as processes start with it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import pre_tokenizers

MOST_KNOWN = 2**26
"""Bytes of units that are remembered, about; if there are more they are forgotten and learnt anew."""

CUTS = "\n \t"
"""Characters before which a text is cut, the best first."""
_SPACE = r"\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
"""Unicode's White_Space, which `\\s` is for the library; for Python it has four control characters more."""
_ASCII = {r"\p{L}": "a-zA-Z", r"\p{N}": "0-9", r"\s": r"\t-\r ", r"\S": r"\x00-\x08\x0e-\x1f!-\x7f"}


@dataclass(frozen=True)
class WordRule:
    """How a tokenizer splits texts. With `joins_lines` a word may hold a newline after a visible character.

    A unit ends after a visible character and before a space. With `joins_lines` that is not so before a
    newline, unless a letter or a digit of ASCII stands before it: no word goes on after those.
    """

    pattern: str
    joins_lines: bool

    def units(self) -> Callable[[str], list[str]]:
        """Return the function that cuts a text into units."""
        on = rf"(?:(?<![a-zA-Z0-9])[\r\n][{_SPACE}]*+[^{_SPACE}]*+)*+" if self.joins_lines else ""
        return re.compile(rf"[{_SPACE}]*+[^{_SPACE}]++{on}|[{_SPACE}]+").findall

    def ascii_words(self) -> Callable[[str], list[str]]:
        """Return the function that splits a unit of ASCII into words."""
        pattern = re.sub(r"\[.*?\]", lambda found: _replaced(found[0], "{}"), self.pattern)
        return re.compile(_replaced(pattern, "[{}]")).findall

    def may_cut(self, before: str, after: str) -> bool:
        """Return True if a word ends between two characters, whatever else the text is.

        Only places before one of CUTS are looked at.
        """
        if self.joins_lines and after == "\n":
            return before.isascii() and before.isalnum()
        return after in CUTS and not before.isspace()


def _replaced(pattern: str, form: str) -> str:
    for name, characters in _ASCII.items():
        pattern = pattern.replace(name, form.format(characters))
    return pattern


GPT2 = WordRule(
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+", joins_lines=False
)
_LATER = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3, QWEN2 = (WordRule(_LATER % numbers, joins_lines=True) for numbers in (r"\p{N}{1,3}", r"\p{N}"))


def word_rule(tree: dict[str, Any]) -> WordRule | None:
    """Return the rule of a tokenizer.json, given its tree; None where words cannot be told by themselves.

    Added tokens are found in a text before it is split, so those that are not special must be free of spaces,
    and must take none from beside them: then a piece of text without them has the ids of its words.
    """
    plain = [token for token in tree["added_tokens"] if not token["special"]]
    odd = ("single_word", "lstrip", "rstrip", *(["normalized"] if tree["normalizer"] else []))
    if any(token[key] for token in plain for key in odd) or re.search(r"\s", _contents(plain)):
        return None
    if tree["normalizer"] not in (None, {"type": "NFC"}) or tree["model"].get("dropout"):
        return None
    return _rule_of(tree["pre_tokenizer"])


def _contents(tokens: Sequence[dict[str, Any]]) -> str:
    return "".join(token["content"] for token in tokens)


def _rule_of(step: dict[str, Any] | None) -> WordRule | None:
    """Return the rule of a pre-tokenizer, given its tree."""
    parts = step["pretokenizers"] if step and step["type"] == "Sequence" else [step]
    found = [{key: value for key, value in (part or {}).items() if key != "trim_offsets"} for part in parts]
    spelling = {"type": "ByteLevel", "add_prefix_space": False}
    if found == [{**spelling, "use_regex": True}]:
        return GPT2
    split = {"type": "Split", "behavior": "Isolated", "invert": False}
    for rule in (GPT2, LLAMA3, QWEN2):
        if found == [{**split, "pattern": {"Regex": rule.pattern}}, {**spelling, "use_regex": False}]:
            return rule
    return None


class _Numbers(dict[str, int]):
    """Numbers of texts, in the order in which they came up; `fresh` are those since `fresh` was emptied.

    `size` is about their bytes.
    """

    def __init__(self) -> None:
        self.fresh: list[str] = []
        self.size = self._next = 0

    def __missing__(self, text: str) -> int:
        self.fresh.append(text)
        self.size += 64 + len(text)
        number = self[text] = self._next
        self._next += 1
        return number

    def clear(self) -> None:
        """Forget the texts, but not which numbers were given."""
        super().clear()
        self.size = 0


class _Table:
    """Rows of numbers, of different lengths."""

    def __init__(self, dtype: str) -> None:
        self.lengths, self._starts = np.zeros(0, np.int64), np.zeros(0, np.int64)
        self.values = np.zeros(0, dtype)

    def add(self, lengths: Iterable[int], values: Iterable[int]) -> None:
        """Add rows of these lengths, whose numbers are `values` one after another."""
        self.lengths = np.append(self.lengths, np.fromiter(lengths, np.int64))
        self._starts = np.cumsum(self.lengths) - self.lengths
        self.values = np.append(self.values, np.fromiter(values, self.values.dtype))

    def rows(self, numbers: NDArray[Any]) -> NDArray[Any]:
        """Return the rows with these numbers, one after another."""
        lengths = self.lengths[numbers]
        before = np.cumsum(lengths) - lengths
        return self.values[np.arange(lengths.sum()) + np.repeat(self._starts[numbers] - before, lengths)]


class Words:
    """The words of pieces of text by one rule, each numbered, and their ids once there is a tokenizer.

    Pieces that were counted are kept as the numbers of their units, about half a byte for a character.
    """

    def __init__(self, rule: WordRule, tokenizer_json: str = "", dtype: str = "<u4") -> None:
        self._given = rule, tokenizer_json, dtype
        self._dtype = dtype  # of ids
        self._units, self._split = rule.units(), rule.ascii_words()
        self._kept: list[list[NDArray[Any]]] = []
        self._parts: list[list[list[NDArray[Any]] | None]] = []
        self._forget()
        if tokenizer_json:
            self.load(tokenizer_json, dtype)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy begins without any words."""
        return Words, self._given

    def _forget(self) -> None:
        self._unit, self._word = _Numbers(), _Numbers()
        self._words_of_unit, self._ids_of_word = _Table("<u4"), _Table(self._dtype)

    def keep(self, pieces: Sequence[tuple[str, Sequence[str] | None]]) -> int:
        """Keep pieces; the words of the second part of each will be counted, or its own for None.

        Returns the number by which `kept` knows them.
        """
        if self._unit.size > MOST_KNOWN:
            self._settle()
            self._unit.clear()
        self._kept.append([self._numbered(piece) for piece, _ in pieces])
        self._parts.append(
            [None if parts is None else [self._numbered(part) for part in parts] for _, parts in pieces]
        )
        return len(self._kept) - 1

    def drop(self) -> None:
        """Keep nothing any more."""
        self._kept.clear()
        self._parts.clear()

    def word_counts(self, left_out: Container[tuple[int, int]] = ()) -> dict[str, int]:
        """Return how often each word is in what was kept; bytes are spelled as GPT-2 spells them.

        `left_out` has (number, place in it) of pieces that do not count.
        """
        self._settle()
        table = self._words_of_unit
        weights = np.zeros(len(table.lengths), np.int64)
        for number, pieces in enumerate(zip(self._kept, self._parts, strict=True)):
            for place, (own, parts) in enumerate(zip(*pieces, strict=True)):
                for units in () if (number, place) in left_out else [own] if parts is None else parts:
                    np.add.at(weights, units, 1)
        totals = np.bincount(table.values, np.repeat(weights, table.lengths), len(self._word))
        spell, split = (
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=rule).pre_tokenize_str
            for rule in (False, True)
        )
        letters = {byte: spell(chr(byte))[0][0] for byte in range(128)}
        found: dict[str, int] = {}
        for word, total in zip(self._word, totals.astype(np.int64).tolist(), strict=True):
            if total:
                for part in (
                    [word.translate(letters)] if word.isascii() else [part for part, _ in split(word)]
                ):
                    found[part] = found.get(part, 0) + total
        return found

    def load(self, tokenizer_json: str, dtype: str) -> None:
        """Take a tokenizer of this rule, whose ids are of this type."""
        tokens = json.loads(tokenizer_json)["added_tokens"]
        self._added = [token["content"] for token in tokens if not token["special"]]
        self._library = tokenizers.Tokenizer.from_str(tokenizer_json)
        self._library.encode_special_tokens = True
        self._dtype, self._ids_of_word = dtype, _Table(dtype)
        self._word.fresh = list(self._word)

    def kept(self, number: int) -> list[bytes]:
        """Return the ids of pieces that were counted."""
        return self._ids(self._kept[number])

    def encode(self, pieces: Sequence[str]) -> list[bytes]:
        """Return the ids of pieces."""
        if any(token in piece for piece in pieces for token in self._added):
            found = self._library.encode_batch_fast(pieces, add_special_tokens=False)
            return [np.array(encoding.ids, self._dtype).tobytes() for encoding in found]
        if self._unit.size > MOST_KNOWN and not self._kept:
            self._forget()
        return self._ids([self._numbered(piece) for piece in pieces])

    def _numbered(self, piece: str) -> NDArray[Any]:
        """Return the numbers of a piece's units."""
        return np.fromiter(map(self._unit.__getitem__, self._units(piece)), np.uint32)

    def _settle(self) -> None:
        """Split the units that are new into words."""
        for start in range(0, len(self._unit.fresh), 2**16):
            units = self._unit.fresh[start : start + 2**16]
            words = [self._split(unit) if unit.isascii() else [unit] for unit in units]
            values = map(self._word.__getitem__, chain.from_iterable(words))
            self._words_of_unit.add(map(len, words), values)
        self._unit.fresh.clear()

    def _ids(self, numbers: Sequence[NDArray[Any]]) -> list[bytes]:
        self._settle()
        found = self._library.encode_batch_fast(self._word.fresh, add_special_tokens=False)
        ids = [encoding.ids for encoding in found]
        self._ids_of_word.add(map(len, ids), chain.from_iterable(ids))
        self._word.fresh.clear()
        return [self._ids_of_word.rows(self._words_of_unit.rows(own)).tobytes() for own in numbers]
