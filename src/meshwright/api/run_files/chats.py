"""How long chats are in tokens, and how many samples they fill, from as many of them as take a moment."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import islice

import numpy as np

from meshwright.data.best_fit import best_fit
from meshwright.data.chat_formats import conversations_of
from meshwright.data.chat_source import ChatSource, template_of, with_chats
from meshwright.data.chat_tokens import ChatEncoder
from meshwright.data.permutation import I64
from meshwright.data.sources import open_source
from meshwright.data.tokenize import bpe_size, build_tokenizer
from meshwright.spec import RunSpec, UserError

LOOKED_AT = 5000
"""Chats at most that are encoded, from all over the file."""
COVERED = 0.99
"""Share of the chats that are to fit into a sample."""
STEP = 64
"""Samples' lengths are multiples of so many tokens."""


@dataclass(frozen=True)
class ChatLengths:
    """Rows in all, those that were looked at, and the tokens of those with some to train on (n,).

    Rows with `pairs` of answers have the tokens of both.
    """

    rows: int
    looked_at: int
    tokens: I64
    pairs: bool = False

    @property
    def chats(self) -> int:
        """Chats that are trained on in all, about."""
        return max(1, round(self.rows * len(self.tokens) / self.looked_at))

    def seq_len(self, most: int) -> int:
        """Return the length of a sample that takes `COVERED` of the chats, at most `most`."""
        wanted = int(np.quantile(self.tokens, COVERED, method="higher"))
        return min(most, -(-wanted // STEP) * STEP)

    def within(self, seq_len: int) -> float:
        """Return the share of chats of at most so many tokens."""
        return float((self.tokens <= seq_len).mean())

    def samples(self, seq_len: int, packed: bool) -> int:
        """Return how many samples the chats fill, about."""
        if not packed:
            return self.chats
        _, first = best_fit(np.minimum(self.tokens, seq_len), seq_len)
        return max(1, round((len(first) - 1) * self.chats / len(self.tokens)))


def chat_lengths(spec: RunSpec) -> ChatLengths:
    """Return the lengths of the chats of `data.corpus` as the run's tokenizer and template have them.

    Raises `UserError`, also where no chat has a token to train on.
    """
    data = spec.data
    chats = with_chats(open_source(data.corpus, data.text_key), data)
    if not isinstance(chats, ChatSource):
        raise ValueError(f"{data.corpus} holds text, not chats")
    if bpe_size(data.tokenizer, spec.model.vocab_size) is not None:
        chats.check_text()
    tokenizer = build_tokenizer(data.tokenizer, spec.model.vocab_size, [], 0.0).reading_special()
    encoder = ChatEncoder(tokenizer, template_of(data))
    rows = sum(1 for _ in chats.rows())
    every = islice(chats.rows(), 0, None, max(1, -(-rows // LOOKED_AT)))
    read = conversations_of(every, chats.format, Counter())
    encoded = [encoder.encode_pair(each) if chats.pairs else (encoder.encode(each),) for each in read]
    tokens = [
        sum(len(ids) for ids, _ in answers)
        for answers in encoded
        if all(trained[1:].any() for _, trained in answers)
    ]
    if not tokens:
        raise UserError(
            f"--have: {data.corpus} has no chat with an answer to train on; give chats in which the "
            "assistant speaks"
        )
    return ChatLengths(rows, len(encoded), np.array(tokens), chats.pairs)
