"""Text that shows which of its tokens are trained on."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from meshwright.spec.load import one_line

if TYPE_CHECKING:
    from meshwright.data.tokenizer import IDs, Tokenizer

COLOUR = ("\x1b[1;32m", "\x1b[0m")
"""Around trained text on a terminal: bold green."""
BRACKETS = ("\u27e6", "\u27e7")
"""Around trained text elsewhere."""


def colour_of_tokens(tokenizer: Tokenizer, ids: IDs, trained: NDArray[np.bool_], terminal: bool) -> str:
    """Return the text of tokens (n,), with what is trained on (n,) in colour, or in brackets for no terminal.

    Control characters but line ends and tabs are escaped, since a terminal would obey them. Bytes of a
    character that is divided between trained and other tokens become U+FFFD.
    """
    before, after = COLOUR if terminal else BRACKETS
    shown, start, told = [], 0, 0
    for learned, group in groupby(map(bool, trained)):
        end = start + sum(1 for _ in group)
        piece = _piece(tokenizer, ids, start, end, told)
        told += len(piece)
        text = "".join(char if char in "\n\t" else one_line(char) for char in piece)
        shown.append(f"{before}{text}{after}" if learned else text)
        start = end
    return "".join(shown)


def _piece(tokenizer: Tokenizer, ids: IDs, start: int, end: int, told: int) -> str:
    """Return the text of ids from `start` to `end`, in front of which are `told` characters."""
    if tokenizer.is_byte_level:
        return tokenizer.decode([int(token) for token in ids[start:end]])
    return tokenizer.decode([int(token) for token in ids[:end]])[told:]  # a first word loses its space
