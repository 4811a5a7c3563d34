"""Tokens that may follow a text: those after its last tokens, where these stood before.

This is prompt lookup decoding (Saxena 2023). A forward over a token and n guesses takes little longer than
one over the token, where weights are read from memory, and gives a token for each right guess, and one more.
Only guesses that are chosen anyway are kept, so that no token changes.
"""

from __future__ import annotations

from collections.abc import Sequence

_LONGEST, _SHORTEST = 3, 2
"""Lengths of the sequences of tokens that are looked for, the longer ones first."""


class Lookup:
    """The last place of each short sequence of tokens in one growing text."""

    def __init__(self) -> None:
        self._after: dict[tuple[int, ...], int] = {}
        """The place after each sequence, when another token follows it."""
        self._indexed = 0
        """Places before which all sequences are entered."""

    def following(self, prompt: Sequence[int], new: Sequence[int], most: int) -> list[int]:
        """So many tokens, which followed the last ones of `prompt` and `new` before; none if nothing did.

        Where less than `most` follows, the guesses repeat it, as LZ77 does (Ziv and Lempel 1977).
        """
        start = max(0, self._indexed - _LONGEST)
        text = [*prompt[start:], *new[max(0, start - len(prompt)) :]]
        for end in range(max(self._indexed, 1), start + len(text)):
            for length in range(_SHORTEST, _LONGEST + 1):
                if end >= length:
                    self._after[tuple(text[end - length - start : end - start])] = end
        self._indexed = start + len(text)
        for length in range(_LONGEST, _SHORTEST - 1, -1):
            after = self._after.get(tuple(text[-length:]))
            if after is not None:
                seen = [*prompt[after:], *new[max(0, after - len(prompt)) :]][:most]
                return [seen[place % len(seen)] for place in range(most)]
        return []
