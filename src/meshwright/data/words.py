"""Texts split into words by the rule of a byte-level tokenizer: what one process knows of them.

Words repeat, so a text is kept as their numbers, and a word is a row of ids. The library encodes each new
word, and so ids are the library's by construction. Imports little, as processes start with it.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Container, Sequence
from itertools import chain
from typing import Any, Literal

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import pre_tokenizers

from meshwright.data.literals import Literals
from meshwright.data.word_rule import WordRule
from meshwright.data.word_table import MOST_KNOWN, CompiledWordTable, WordTable, library_path


class Words:
    """The words of pieces of text by one rule, each numbered, and their ids once there is a tokenizer.

    Pieces that were counted are kept as the numbers of their words, about a byte for a character.
    """

    def __init__(
        self,
        rule: WordRule,
        tokenizer_json: str = "",
        dtype: str = "<u4",
        reads_special: bool = False,
        library: str | None = None,
    ) -> None:
        library = library_path() if library is None else library
        self._given = rule, tokenizer_json, dtype, reads_special, library
        self._dtype = dtype  # of ids
        self._kept: list[list[NDArray[np.uint32]]] = []
        self._parts: list[list[list[NDArray[np.uint32]] | None]] = []
        self._forget()
        if tokenizer_json:
            self.load(tokenizer_json, dtype, reads_special)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy begins without any words, and with the library that was found here."""
        return Words, self._given

    def _forget(self) -> None:
        rule, *_, library = self._given
        self._table = CompiledWordTable(rule, library) if library else WordTable(rule)
        self._table.forget_ids(self._dtype)
        self._encoded = 0

    def keep(self, pieces: Sequence[tuple[str, Sequence[str] | None]]) -> int:
        """Keep pieces; the words of the second part of each will be counted, or its own for None.

        Returns the number by which `kept` knows them.
        """
        self._kept.append(self._table.numbers([piece for piece, _ in pieces]))
        self._parts.append([None if parts is None else self._table.numbers(parts) for _, parts in pieces])
        return len(self._kept) - 1

    def drop(self) -> None:
        """Keep nothing any more."""
        self._kept.clear()
        self._parts.clear()

    def word_counts(self, left_out: Container[tuple[int, int]] = ()) -> dict[str, int]:
        """Return how often each word is in what was kept; bytes are spelled as GPT-2 spells them.

        `left_out` has (number, place in it) of pieces that do not count.
        """
        words = self._table.words()
        totals = np.zeros(len(words), np.int64)
        for number, pieces in enumerate(zip(self._kept, self._parts, strict=True)):
            for place, (own, parts) in enumerate(zip(*pieces, strict=True)):
                for numbers in () if (number, place) in left_out else [own] if parts is None else parts:
                    np.add.at(totals, numbers, 1)
        spell, split = (
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=rule).pre_tokenize_str
            for rule in (False, True)
        )
        letters = {byte: spell(chr(byte))[0][0] for byte in range(128)}
        found: dict[str, int] = {}
        for word, total in zip(words, totals.tolist(), strict=True):
            if total:
                for part in (
                    [word.translate(letters)] if word.isascii() else [part for part, _ in split(word)]
                ):
                    found[part] = found.get(part, 0) + total
        return found

    def load(self, tokenizer_json: str, dtype: str, reads_special: bool = False) -> None:
        """Take a tokenizer of this rule, whose ids are of this type."""
        tree = json.loads(tokenizer_json)
        added = tree["added_tokens"]
        self._added = Literals([token["content"] for token in added if reads_special or not token["special"]])
        self._form: Literal["NFC"] | None = "NFC" if tree["normalizer"] else None
        self._library = tokenizers.Tokenizer.from_str(tokenizer_json)
        self._library.encode_special_tokens = not reads_special
        vocab = self._library.get_vocab(with_added_tokens=True)
        self._bytes = np.zeros(1 + max(vocab.values(), default=-1), np.int64)
        self._bytes[list(vocab.values())] = [*map(len, vocab)]
        self._dtype = dtype
        self._table.forget_ids(dtype)
        self._encoded = 0

    def kept(self, number: int) -> list[bytes]:
        """Return the ids of pieces that were counted."""
        return self._ids(self._kept[number])

    def encode(self, pieces: Sequence[str]) -> list[bytes]:
        """Return the ids of pieces."""
        if any(map(self._added.found, pieces)):
            found = self._library.encode_batch_fast(pieces, add_special_tokens=False)
            return [np.array(encoding.ids, self._dtype).tobytes() for encoding in found]
        if self._table.known_bytes > MOST_KNOWN and not self._kept:
            self._forget()
        return self._ids(self._table.numbers(pieces))

    def _ids(self, pieces: Sequence[NDArray[np.uint32]]) -> list[bytes]:
        words = self._table.words(self._encoded)
        if words:
            self._table.add_ids(*self._encode_words(words))
            self._encoded += len(words)
        return [self._table.ids(numbers) for numbers in pieces]

    def _encode_words(self, words: list[str]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return how many ids each word has, and all of them.

        The library takes half as long for many words as for each by itself. Where one ends is told by the
        bytes that ids spell, which are all bytes of a text but for vocabularies that lack some.
        """
        joined = self._library.encode_batch_fast([words], is_pretokenized=True, add_special_tokens=False)
        ids = np.array(joined[0].ids, np.int64)
        texts = [unicodedata.normalize(self._form, word) for word in words] if self._form else words
        ends = np.cumsum([len(text.encode()) for text in texts])
        spelled = np.cumsum(self._bytes[ids])
        places = np.searchsorted(spelled, ends)
        if len(ids) and spelled[-1] == ends[-1] and np.array_equal(spelled[places], ends):
            return np.diff(places + 1, prepend=0), ids
        found = [each.ids for each in self._library.encode_batch_fast(words, add_special_tokens=False)]
        return np.array([*map(len, found)], np.int64), np.fromiter(chain.from_iterable(found), np.int64)
