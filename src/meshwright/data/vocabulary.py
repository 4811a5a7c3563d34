"""A look at all tokens of a corpus whose tokenizer has entries beyond the model's vocabulary."""

from __future__ import annotations

import numpy as np

from meshwright.data.publish import write_atomically
from meshwright.data.shards import TokenShards
from meshwright.data.tokenizer import Tokenizer
from meshwright.data.verification import Check
from meshwright.spec.errors import UserError

_CHUNK = 2**20
"""Tokens that are looked at together."""
_BESIDE = 8
"""Tokens on each side of one that are quoted."""


def check_vocabulary(shards: TokenShards, name: str, vocab_size: int, check: Check) -> None:
    """Raise `UserError` for a token of the corpus `name` that a model of so many tokens does not have.

    Tokenizers of published models may have entries beyond the model's vocabulary, such as a [PAD] that no
    text holds. All tokens are read for it, once: a note of it is left beside the tokens, or in the cache.
    With `check` "lazy" another process of this host has just done so.
    """
    if shards.tokenizer.vocab_size <= vocab_size:
        return
    check_end(shards.tokenizer, name, vocab_size)
    note = shards.home / f"within-{vocab_size}-{shards.digest[:16]}"
    if check == "lazy" or note.is_file():
        return
    for start in range(0, shards.tokens, _CHUNK):
        beyond = shards.take(np.arange(start, min(start + _CHUNK, shards.tokens))) >= vocab_size
        if beyond.any():
            raise _unknown(shards, name, vocab_size, start + int(beyond.argmax()))
    write_atomically(note, "")


def check_end(tokenizer: Tokenizer, name: str, vocab_size: int) -> None:
    """Raise `UserError` if the token that ends a document of the corpus `name` is beyond the vocabulary."""
    if tokenizer.end_id >= vocab_size:
        raise UserError(
            f"data.tokenizer: {_larger(tokenizer, name, vocab_size)}, and "
            f"{tokenizer.decode([tokenizer.end_id])!r}, which ends a document, is number {tokenizer.end_id}; "
            f"set model.vocab_size = {tokenizer.vocab_size} or more, or name another eos_token in the "
            "tokenizer_config.json beside it"
        )


def _unknown(shards: TokenShards, name: str, vocab_size: int, place: int) -> UserError:
    """Return the error to raise for the token at this place of the stream."""
    tokenizer = shards.tokenizer
    around = np.arange(max(0, place - _BESIDE), min(place + _BESIDE + 1, shards.tokens))
    ids = shards.take(around).tolist()
    token = ids[place - int(around[0])]
    text = tokenizer.decode([number for number in ids if number != tokenizer.end_id])
    return UserError(
        f"data.tokenizer: {_larger(tokenizer, name, vocab_size)}, and the text has one of those: "
        f"{tokenizer.decode([token])!r}, number {token}, in {text!r}; take it out of the text, or give "
        "a model whose vocabulary has it"
    )


def _larger(tokenizer: Tokenizer, name: str, vocab_size: int) -> str:
    entries = tokenizer.vocab_size
    return f"the tokenizer of {name} has {entries} entries, more than model.vocab_size {vocab_size}"
