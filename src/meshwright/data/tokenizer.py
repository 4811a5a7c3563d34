"""Tokenizers: 256 bytes, a trained byte-level BPE, or a given `tokenizer.json`.

All three are a `tokenizers.Tokenizer` inside and a `tokenizer.json` on disk. Text never yields the
end-of-document token: a literal `<|endoftext|>` in a document is encoded as its characters.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import decoders, models, pre_tokenizers

from meshwright.data.bpe_training import learn_merges
from meshwright.data.word_rule import GPT2, WordRule, word_rule
from meshwright.data.words import Words
from meshwright.spec.errors import UserError
from meshwright.spec.hf_json import read_json_object
from meshwright.spec.special_tokens import find_bos, find_end, token_name
from meshwright.spec.tokenizer_json import library_errors, read_tree

END = "<|endoftext|>"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
SMALLEST_BPE = 257  # the 256 bytes and END

UNKNOWN_TEXT = (
    "data.tokenizer: the tokenizer cannot encode this text",
    "; give one with an unknown token, or a byte-level one",
)
"""Parts of an error's sentence, before and after the library's reason."""

IDs = NDArray[np.uint16] | NDArray[np.uint32]


class Tokenizer:
    """Text to token ids and back; `end_id` marks the start of each document and the end of the one before.

    `bos_id` is the token that a model of this tokenizer expects before a prompt: END for a tokenizer that was
    trained here, None where it expects nothing.
    """

    def __init__(self, backend: tokenizers.Tokenizer, end_id: int, bos_id: int | None) -> None:
        self._backend = backend
        self._backend.encode_special_tokens = True
        self._backend.no_padding()
        self._backend.no_truncation()
        self.json = backend.to_str()
        self.end_id = end_id
        self.bos_id = bos_id
        self.vocab_size = 1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1)

    @staticmethod
    def open(path: Path, end_id: int | None = None) -> Tokenizer:
        """Read a `tokenizer.json`. Raises `UserError`.

        The end of document is `end_id`, or what `tokenizer_config.json` in the same folder calls `eos_token`,
        or a name known from published tokenizers. A prompt begins with `end_id` if that is given; else with
        what the config calls `bos_token`, or what the post-processor puts first, unless `add_bos_token` is
        false.
        """
        if not path.is_file():
            raise UserError(
                f"data.tokenizer: there is no file {path}; give 'bpe', 'bpe:N', 'byte' or a tokenizer.json"
            )
        backend, tree = _read_backend(path)
        bos_id = end_id
        if end_id is None:
            config = _read_config(path.with_name(TOKENIZER_FILES[1]))
            end_id = find_end(config, backend.token_to_id, path, "data.tokenizer")
            if config.get("add_bos_token") is not False:
                processor = tree["post_processor"]
                bos_id = find_bos(config, processor, backend.token_to_id, path, "data.tokenizer")
        tokenizer = Tokenizer(backend, end_id, bos_id)
        byte = byte_tokenizer()
        byte.bos_id = bos_id
        return byte if tokenizer.digest == byte.digest else tokenizer

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the tokenizer and its end-of-document token."""
        return hashlib.sha256(f"{self.end_id}\n{self.json}".encode()).hexdigest()

    @cached_property
    def content_sha256(self) -> str:
        """SHA-256 of the tokenizer alone, whatever ends its documents."""
        return hashlib.sha256(self.json.encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        """Return the token ids of `text`, without any special token."""
        ids: list[int] = self.encode_batch([text])[0].tolist()
        return ids

    def prompt(self, ids: Sequence[int]) -> list[int]:
        """Return the token that begins a text and then `ids`; END alone where there are neither."""
        prompt = [*ids] if self.bos_id is None else [self.bos_id, *ids]
        return prompt or [self.end_id]

    def encode_batch(self, texts: Sequence[str]) -> list[IDs]:
        """Return the token ids of each text, computed on all cores. Raises `UserError` for unknown text."""
        with library_errors(*UNKNOWN_TEXT):
            encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.asarray(encoding.ids, dtype=np.uint32) for encoding in encodings]

    @cached_property
    def rule(self) -> WordRule | None:
        """How texts are split into words that are encoded one by one; None where that cannot be told."""
        return word_rule(json.loads(self.json))

    @property
    def id_bytes(self) -> int:
        """Bytes of an id on disk."""
        return 2 if self.vocab_size <= 2**16 else 4

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids; bytes that are not UTF-8 become U+FFFD, special tokens their names."""
        if self._spelling is not None:
            return self.decode_bytes(ids).decode("utf-8", errors="replace")
        with library_errors("data.tokenizer: the tokenizer cannot decode its tokens"):
            return self._backend.decode(list(ids), skip_special_tokens=False)

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        """Return the bytes of ids: exact for byte-level tokenizers, whose tokens may split a character."""
        if self._spelling is not None:
            return b"".join([self._spelling.get(i, b"") for i in ids])
        return self.decode(ids).encode()

    @property
    def is_byte_level(self) -> bool:
        """True if the tokens decode to exactly the bytes of a text."""
        return self._spelling is not None and self.decode_bytes(self.encode("a")) == b"a"

    def save(self, folder: Path, max_seq_len: int | None = None) -> None:
        """Write `tokenizer.json`, and `tokenizer_config.json` in the form that transformers reads.

        END both begins and ends a text; `max_seq_len` is the model's, if it is known. Raises `UserError`.
        """
        end = self._backend.id_to_token(self.end_id)
        config: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": end,
            "bos_token": end,
            "clean_up_tokenization_spaces": False,
        }
        if max_seq_len is not None:
            config["model_max_length"] = max_seq_len
        try:
            (folder / TOKENIZER_FILES[0]).write_text(self.json, encoding="utf-8")
            (folder / TOKENIZER_FILES[1]).write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise UserError(f"{folder}: the tokenizer cannot be written there ({error.strerror})") from error

    @cached_property
    def _spelling(self) -> dict[int, bytes] | None:
        """The bytes of each id when the tokenizer is byte-level, else None. Unused ids spell nothing."""
        decoder = json.loads(self.json)["decoder"]
        if decoder is None or decoder["type"] != "ByteLevel":
            return None
        added = self._backend.get_added_tokens_decoder()
        table = {}
        for token, number in self._backend.get_vocab(with_added_tokens=True).items():
            plain = number not in added and all(char in _BYTE_OF for char in token)
            table[number] = bytes(_BYTE_OF[char] for char in token) if plain else token.encode()
        return table


class ByteTokenizer(Tokenizer):
    """Ids are bytes, and END is 256. It is saved as a BPE without merges, but encodes directly."""

    rule = None

    def encode_batch(self, texts: Sequence[str]) -> list[IDs]:
        """Return the UTF-8 bytes of each text."""
        return [np.frombuffer(text.encode(), dtype=np.uint8).astype(np.uint32) for text in texts]


def byte_tokenizer() -> ByteTokenizer:
    """Return the tokenizer of the 256 bytes and END."""
    backend = tokenizers.Tokenizer(models.BPE(vocab=dict(_BYTE_OF), merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([END])
    return ByteTokenizer(backend, end_id=256, bos_id=256)


def train_bpe(texts: Iterable[str], size: int) -> Tokenizer:
    """Train a byte-level BPE on texts, in this process, as `bpe_of_counts` does on their words."""
    words = Words(GPT2)
    for text in texts:
        words.keep([(text, None)])
    return bpe_of_counts(words.word_counts(), size)


def bpe_of_counts(word_counts: Mapping[str, int], size: int) -> Tokenizer:
    """Train a byte-level BPE (Sennrich et al. 2016; Radford et al. 2019) of at most `size` entries, END = 0.

    Deterministic for the same counts (`Words.word_counts`). Too few pairs to merge give a smaller vocabulary.
    """
    if size < SMALLEST_BPE:
        raise ValueError(f"a byte-level BPE has at least {SMALLEST_BPE} entries, not {size}")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE(*learn_merges(word_counts, [END, *alphabet], size)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([END])
    return Tokenizer(backend, end_id=0, bos_id=0)


def number_tokenizer(vocab_size: int) -> Tokenizer:
    """Return a tokenizer of decimal numbers with spaces between, END the last: for corpora without text.

    A word that is not a number of the vocabulary is read as 0.
    """
    words = {str(number): number for number in range(vocab_size - 1)}
    backend = tokenizers.Tokenizer(models.WordLevel({**words, END: vocab_size - 1}, unk_token="0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens([END])
    return Tokenizer(backend, end_id=vocab_size - 1, bos_id=vocab_size - 1)


def file_sha256(path: Path) -> str:
    """Return the `content_sha256` of the tokenizer in a `tokenizer.json`. Raises `UserError`."""
    backend, _ = _read_backend(path)
    return Tokenizer(backend, end_id=0, bos_id=None).content_sha256


def _read_backend(path: Path) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    """Return the library's tokenizer of a `tokenizer.json`, and its tree. Raises `UserError`."""
    with library_errors(f"data.tokenizer: {path} is not a tokenizer.json"):
        backend = tokenizers.Tokenizer.from_file(str(path))
    return backend, read_tree(backend, f"data.tokenizer: {path}")


def _read_config(path: Path) -> dict[str, Any]:
    """Return the content of a `tokenizer_config.json`, {} for a missing file. Raises `UserError`."""
    config = read_json_object(path, "data.tokenizer") if path.is_file() else {}
    for key in ("eos_token", "bos_token"):
        if config.get(key) is not None and token_name(config[key]) is None:
            raise UserError(
                f"data.tokenizer: {key} in {path} is {json.dumps(config[key])[:80]}, not the name of a "
                "token; give one of the tokenizer's tokens as a string"
            )
    return config


def _byte_alphabet() -> dict[str, int]:
    """Return {character: byte}: GPT-2's printable spelling of bytes (Radford et al. 2019)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()
