"""Tokenizers: 256 bytes, a trained byte-level BPE, or a given `tokenizer.json`.

All three are a `tokenizers.Tokenizer` inside and a `tokenizer.json` on disk. By default text never yields a
special token: a literal `<|endoftext|>` in a document is encoded as its characters.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import decoders, models, pre_tokenizers

from meshwright.data.bpe_training import learn_merges
from meshwright.data.literals import Literals
from meshwright.data.word_rule import GPT2, WordRule, word_rule
from meshwright.data.words import Words
from meshwright.spec.errors import UserError
from meshwright.spec.hf.special_tokens import side_files
from meshwright.spec.hf.text_tokens import (
    PublishedTokenizer,
    TextTokens,
    open_published,
    read_backend,
    written_config,
)
from meshwright.spec.hf.tokenizer_json import library_errors

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
    """Text to token ids and back; `end_id` ends each document, and `begin_id` is read in front of it.

    `tokens` says what stands around texts; by default `bos_id` is put before a prompt, and nothing for None.
    With `reads_special` a special token that a text spells is read as that token, else as its characters.
    `published` is what the tokenizer was read from, with the files beside it.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        end_id: int,
        bos_id: int | None,
        tokens: TextTokens | None = None,
        reads_special: bool = False,
        published: PublishedTokenizer | None = None,
    ) -> None:
        self._backend = backend
        self._backend.encode_special_tokens = not reads_special
        self._backend.no_padding()
        self._backend.no_truncation()
        self.json = backend.to_str()
        own = () if bos_id is None else (bos_id,)
        self.tokens = tokens or TextTokens(end_id, before=own, bos=bos_id)
        self.end_id = self.tokens.end
        self.reads_special, self.published = reads_special, published
        self.vocab_size = 1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1)

    @staticmethod
    def open(path: Path, tokens: TextTokens | None = None, reads_special: bool = False) -> Tokenizer:
        """Read a `tokenizer.json`, or the one of a folder. Raises `UserError`.

        What begins and ends texts is what the files beside it say (`spec/hf/text_tokens.py`), or if `tokens`
        are given these, and the file alone is read.
        """
        path = tokenizer_file(path)
        published = None
        if tokens is None:
            published = open_published(path, "data.tokenizer")
            published.check_names()
            backend, tokens = published.backend, published.tokens
            reads_special = reads_special and not published.splits_special
        else:
            backend, _ = read_backend(path, "data.tokenizer")
        tokenizer = Tokenizer(backend, tokens.end, None, tokens, reads_special, published)
        if tokens.end != ByteTokenizer.END_ID or tokenizer.json != byte_tokenizer().json:
            return tokenizer
        return ByteTokenizer(backend, tokens.end, None, tokens, reads_special, published)

    def reading_special(self) -> Tokenizer:
        """Return this tokenizer reading special tokens that a text spells, unless its files forbid that."""
        if self.reads_special or self.never_reads_special:
            return self
        backend = tokenizers.Tokenizer.from_str(self.json)
        return type(self)(backend, self.end_id, None, self.tokens, True, self.published)

    @staticmethod
    def content(path: Path) -> Tokenizer:
        """Read a `tokenizer.json` as `open` does, whatever stands around texts. Raises `UserError`."""
        return Tokenizer(open_published(path, "data.tokenizer").backend, 0, None)

    @property
    def vocabulary(self) -> dict[str, int]:
        """The id of each token."""
        return self._backend.get_vocab(with_added_tokens=True)

    @property
    def begin_id(self) -> int:
        """The token that is read in front of a document: the one put before texts, else `end_id`.

        Raises `UserError` where several are put there.
        """
        before = self.tokens.before
        if len(before) > 1:
            names = ", ".join(str(self._backend.id_to_token(number)) for number in before)
            raise UserError(
                f"data.tokenizer: its post-processor puts {len(before)} tokens before a text ({names}), and "
                "documents begin with one; give a tokenizer.json that puts one or none there"
            )
        return before[0] if before else self.end_id

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the tokenizer, and of the tokens that begin and end its documents."""
        around = f"{self.end_id}" if self.begin_id == self.end_id else f"{self.end_id} {self.begin_id}"
        return hashlib.sha256(f"{around}\n{self.json}".encode()).hexdigest()

    @cached_property
    def content_sha256(self) -> str:
        """SHA-256 of the tokenizer alone, whatever ends its documents."""
        return hashlib.sha256(self.json.encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        """Return the token ids of `text`, with nothing put around it."""
        ids: list[int] = self.encode_batch([text])[0].tolist()
        return ids

    def prompt(self, ids: Sequence[int]) -> list[int]:
        """Return `ids` with what is put around a text; END alone where there is nothing."""
        return self.around(ids) or [self.end_id]

    def around(self, ids: Sequence[int]) -> list[int]:
        """Return `ids` with what is put before and after a text."""
        return [*self.tokens.before, *ids, *self.tokens.after]

    def encode_batch(self, texts: Sequence[str]) -> list[IDs]:
        """Return the token ids of each text, computed on all cores. Raises `UserError` for unknown text."""
        with library_errors(*UNKNOWN_TEXT):
            encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.asarray(encoding.ids, dtype=np.uint32) for encoding in encodings]

    def encode_with_offsets(self, text: str) -> tuple[IDs, NDArray[np.int64]]:
        """Return the token ids of `text` (n,), and the first character of each and the one after its last
        (n, 2). Raises `UserError` for unknown text."""
        with library_errors(*UNKNOWN_TEXT):
            encoding = self._backend.encode(text, add_special_tokens=False)
        offsets = np.asarray(encoding.offsets, dtype=np.int64).reshape(-1, 2)
        return np.asarray(encoding.ids, dtype=np.uint32), offsets

    @property
    def never_reads_special(self) -> bool:
        """True if its files say that special tokens which a text spells are never read."""
        return self.published is not None and self.published.splits_special

    @cached_property
    def added_tokens(self) -> dict[int, str]:
        """The texts by id of tokens that are found in a text before it is divided, special or not."""
        return {number: token.content for number, token in self._backend.get_added_tokens_decoder().items()}

    @cached_property
    def rule(self) -> WordRule | None:
        """How texts are split into words that are encoded one by one; None where that cannot be told."""
        return word_rule(json.loads(self.json), self.reads_special)

    @cached_property
    def literals(self) -> Literals:
        """The texts of the special tokens."""
        added = self._backend.get_added_tokens_decoder().values()
        return Literals([token.content for token in added if token.special])

    @cached_property
    def special(self) -> frozenset[int]:
        """The ids of the special tokens."""
        added = self._backend.get_added_tokens_decoder()
        return frozenset(number for number, token in added.items() if token.special)

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

        It names what begins and ends documents; `max_seq_len` is the model's, if it is known. Raises
        `UserError`.
        """
        config = written_config(*map(self._backend.id_to_token, (self.begin_id, self.end_id)))
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
        for token, number in self.vocabulary.items():
            plain = number not in added and all(char in _BYTE_OF for char in token)
            table[number] = bytes(_BYTE_OF[char] for char in token) if plain else token.encode()
        return table


class ByteTokenizer(Tokenizer):
    """Ids are bytes, and END is 256. It is saved as a BPE without merges, but encodes directly."""

    rule = None
    END_ID = 256

    def encode_batch(self, texts: Sequence[str]) -> list[IDs]:
        """Return the UTF-8 bytes of each text."""
        if self.reads_special and any(map(self.literals.found, texts)):
            return super().encode_batch(texts)
        return [np.frombuffer(text.encode(), dtype=np.uint8).astype(np.uint32) for text in texts]


def byte_tokenizer(reads_special: bool = False) -> ByteTokenizer:
    """Return the tokenizer of the 256 bytes and END."""
    backend = tokenizers.Tokenizer(models.BPE(vocab=dict(_BYTE_OF), merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([END])
    end = ByteTokenizer.END_ID
    return ByteTokenizer(backend, end_id=end, bos_id=end, reads_special=reads_special)


def train_bpe(texts: Iterable[str], size: int) -> Tokenizer:
    """Train a byte-level BPE on texts, in this process, as `bpe_of_counts` does on their words."""
    words = Words(GPT2)
    for text in texts:
        words.keep([(text, None)])
    return bpe_of_counts(words.word_counts(), size)


def bpe_of_counts(word_counts: Mapping[str, int], size: int, reads_special: bool = False) -> Tokenizer:
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
    return Tokenizer(backend, end_id=0, bos_id=0, reads_special=reads_special)


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
    return Tokenizer.content(path).content_sha256


def tokenizer_file(path: Path) -> Path:
    """Return the file that `data.tokenizer` names, or that of the folder it names. Raises `UserError`."""
    if not path.is_dir():
        if not path.is_file():
            raise UserError(
                f"data.tokenizer: there is no file {path}; give 'bpe', 'bpe:N', 'byte', a tokenizer.json or "
                "a folder with one"
            )
        if path.name == TOKENIZER_FILES[1]:
            raise UserError(
                f"data.tokenizer: {path} is only a file beside a tokenizer.json; give that, or the folder "
                f"{path.parent}"
            )
        return path
    if not (path / TOKENIZER_FILES[0]).is_file():
        others = [file.name for file in side_files(path, "data.tokenizer") if file.suffix != ".jinja"]
        has = f"has {', '.join(others)} but " if others else "has "
        raise UserError(
            f"data.tokenizer: the folder {path} {has}no tokenizer.json, which is what is read; let "
            "transformers write one (AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER))"
        )
    return path / TOKENIZER_FILES[0]


def _byte_alphabet() -> dict[str, int]:
    """Return {character: byte}: GPT-2's printable spelling of bytes (Radford et al. 2019)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()
