"""The names of special tokens in texts. Imports little, as processes start with it."""

from __future__ import annotations

import re
from collections.abc import Sequence


class Literals:
    """The texts of special tokens, looked for in other texts.

    They are few, and mostly begin with the same two characters, so that most texts are passed in one fast
    search for these.
    """

    def __init__(self, tokens: Sequence[str]) -> None:
        longest_first = sorted(filter(None, tokens), key=len, reverse=True)
        self._begins = sorted({token[:2] for token in longest_first})
        self._any = re.compile("|".join(map(re.escape, longest_first)))

    def found(self, text: str) -> bool:
        """Return True if a text spells one of the tokens."""
        return self._may_hold(text) and self._any.search(text) is not None

    def of(self, text: str) -> list[str]:
        """Return the tokens that a text spells, in order."""
        return self._any.findall(text) if self._may_hold(text) else []

    def _may_hold(self, text: str) -> bool:
        return any(begin in text for begin in self._begins)
