"""Rules by which byte-level tokenizers split a text into words, each of which is encoded by itself.

A text is searched for *units* first: one word or several, that end where the rule always ends one. A unit of
ASCII is split by the rule itself, in which `\\p{L}` and the like are the same for Python and for the library;
with any other character it counts as one word, so no table of Unicode is needed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

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
    most_digits: int
    """Digits of a word, at most; 0 for any number."""

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
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    joins_lines=False,
    most_digits=0,
)
_LATER = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3 = WordRule(_LATER % r"\p{N}{1,3}", joins_lines=True, most_digits=3)
QWEN2 = WordRule(_LATER % r"\p{N}", joins_lines=True, most_digits=1)


def word_rule(tree: dict[str, Any], reads_special: bool = False) -> WordRule | None:
    """Return the rule of a tokenizer.json, given its tree; None where words cannot be told by themselves.

    Added tokens are found in a text before it is split, so those that are read (special ones if asked for)
    must be free of spaces, and must take none from beside them: then a piece of text without them has the ids
    of its words.
    """
    plain = [token for token in tree["added_tokens"] if reads_special or not token["special"]]
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
