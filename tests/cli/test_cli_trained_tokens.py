"""Texts that show which of their tokens are trained on."""

from __future__ import annotations

import numpy as np
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from meshwright.cli.trained_tokens import colour_of_tokens
from meshwright.data.tokenizer import Tokenizer, byte_tokenizer


def shown(text: str, trained: str, terminal: bool = False) -> str:
    """The text by bytes, of which those under an x are trained on."""
    tokenizer = byte_tokenizer()
    ids = np.array(tokenizer.encode(text), dtype=np.uint16)
    mask = np.array([char == "x" for char in trained.ljust(len(ids))])
    return colour_of_tokens(tokenizer, ids, mask, terminal)


def test_trained_text_is_in_brackets_or_in_colour() -> None:
    assert shown("Hi! Yo! So?", "    xxx xxx") == "Hi! \u27e6Yo!\u27e7 \u27e6So?\u27e7"
    assert shown("Hi! Yo! So?", "    xxx xxx", True) == "Hi! \x1b[1;32mYo!\x1b[0m \x1b[1;32mSo?\x1b[0m"
    assert shown("Hi", "") == "Hi"
    assert shown("", "") == ""


def test_letters_of_several_tokens_stay_whole() -> None:
    assert shown("é☃.", "xx   x") == "\u27e6é\u27e7☃\u27e6.\u27e7"
    assert shown("☃", "x") == "\u27e6\ufffd\u27e7\ufffd\ufffd"  # divided: a part of a letter is none


def test_what_a_terminal_would_obey_is_escaped() -> None:
    assert shown("a\x1b[31mb\n\tc\r", "xxxxxxxxxx", True) == "\x1b[1;32ma\\x1b[31mb\n\tc\x1b[0m\\r"


def test_words_keep_the_spaces_that_a_decoder_drops_in_front() -> None:
    backend = Backend(models.WordLevel({"\u2581a": 0, "\u2581b": 1, "</s>": 2}, unk_token="</s>"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    tokenizer = Tokenizer(backend, 2, None)
    ids = np.array(tokenizer.encode("a b a"), dtype=np.uint32)
    assert len(ids) == 3
    assert colour_of_tokens(tokenizer, ids, np.array([False, True, True]), False) == "a\u27e6 b a\u27e7"
