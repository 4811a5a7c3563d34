"""The corpus of a run: its tokenizer, its training samples in order, and its validation samples."""

from __future__ import annotations

import hashlib
import json
import lzma
import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

from meshwright.data.manifest import VERSION, digest_of, is_shards
from meshwright.data.mixture import Mixture
from meshwright.data.packing import Samples, Windows
from meshwright.data.permutation import I64
from meshwright.data.publish import build_once, write_atomically
from meshwright.data.readers import SYNTHETIC, TextSource, open_source
from meshwright.data.shards import TokenShards, TokenSource
from meshwright.data.synthetic import SyntheticTokens
from meshwright.data.tokenize import bpe_size, build_tokenizer, check_tokenizer, write_shards
from meshwright.data.tokenizer import ByteTokenizer, Tokenizer, number_tokenizer
from meshwright.data.verification import Check
from meshwright.data.verified import cache_folder
from meshwright.spec import RunSpec, UserError

XZ_BYTES = 8 * 10**6
"""Most bytes of held-out text that are compressed: `xz -9e` takes about a second for 1.4 MB."""


class Split:
    """The samples of all sources, numbered one source after the other."""

    def __init__(self, windows: Sequence[Windows]) -> None:
        self._windows = tuple(windows)
        self._bounds: I64 = np.cumsum([0, *(part.count for part in windows)])
        self.samples = int(self._bounds[-1])
        self.documents = sum(part.documents for part in windows)
        self.target_tokens = sum(part.target_tokens for part in windows)

    @property
    def sizes(self) -> list[int]:
        """Samples of each source."""
        return [part.count for part in self._windows]

    @property
    def tokens_by_source(self) -> list[int]:
        """Target tokens of each source."""
        return [part.target_tokens for part in self._windows]

    def ids(self, source_N: I64, index_N: I64) -> I64:
        """Numbers in the split of samples that are given by source and number within it."""
        return self._bounds[source_N] + index_N

    def gather(self, id_N: I64) -> Samples:
        """The samples with these numbers, in [0, samples)."""
        source_N = np.searchsorted(self._bounds, id_N, side="right") - 1
        index_N = id_N - self._bounds[source_N]
        if (source_N == source_N[0]).all():
            return self._windows[int(source_N[0])].gather(index_N)
        parts = [(source_N == number).nonzero()[0] for number in range(len(self._windows))]
        found = [w.gather(index_N[rows]) for w, rows in zip(self._windows, parts, strict=True) if rows.size]
        back = np.argsort(np.concatenate(parts))
        return Samples(*(np.concatenate(column)[back] for column in zip(*found, strict=True)))

    def shares(self, max_tokens: int | None = None) -> list[int]:
        """Targets of each source among `max_tokens` (default all) of the split, in proportion to what they
        have.

        They are the first targets of each source.
        """
        if max_tokens is None or max_tokens >= self.target_tokens:
            return self.tokens_by_source
        behind = np.cumsum([0, *self.tokens_by_source]).tolist()
        cuts = [max_tokens * stop // self.target_tokens for stop in behind]
        return [stop - start for start, stop in pairwise(cuts)]

    def bytes_for(self, max_tokens: int | None = None) -> int:
        """UTF-8 bytes that the first `max_tokens` targets (default all) spell; END spells nothing."""
        return sum(part.byte_count(targets) for part, targets in self._first(max_tokens))

    def text_bytes(self, max_tokens: int | None = None) -> bytes:
        """That text itself, decoded from the tokens."""
        return b"".join(part.text_bytes(targets) for part, targets in self._first(max_tokens))

    def _first(self, max_tokens: int | None) -> list[tuple[Windows, int]]:
        shares = zip(self._windows, self.shares(max_tokens), strict=True)
        return [(part, targets) for part, targets in shares if targets]

    def head(self, max_tokens: int | None = None) -> Head:
        """The samples that hold the first `max_tokens` targets (default all)."""
        return Head(self._windows, self._bounds, self.shares(max_tokens))

    def sample_text(self, max_tokens: int | None, max_bytes: int) -> bytes:
        """Whole documents of that text, of each source its first ones, at most `max_bytes` together.

        Decoded no further than that. Empty where the tokenizer loses text: the tokens then spell another
        number of bytes than were read. A source whose first document is larger than its share gives its
        beginning if the tokenizer is byte-level, and else nothing.
        """
        found = []
        first = self._first(max_tokens)
        size = sum(part.byte_count(targets) for part, targets in first)
        for part, targets in first:
            own = max_bytes * part.byte_count(targets) // max(size, 1) if size > max_bytes else max_bytes
            text = part.sample_text(targets, own)
            if text is None:
                return b""
            found.append(text)
        return b"".join(found)


class Head:
    """The first samples of each source of a split, numbered one source after the other.

    `samples` is their number. Only the first `shares[i]` targets of source i count.
    """

    def __init__(self, windows: Sequence[Windows], bounds: I64, shares: Sequence[int]) -> None:
        self._windows, self._in_split, self._shares = windows, bounds, np.array(shares, dtype=np.int64)
        counts = [part.samples_for(share) for part, share in zip(windows, shares, strict=True)]
        self._bounds: I64 = np.cumsum([0, *counts])
        self.samples = int(self._bounds[-1])

    def at(self, number_N: I64) -> tuple[I64, I64]:
        """(number in the split, targets that count) of each sample with a number in [0, samples)."""
        source_N = np.searchsorted(self._bounds, number_N, side="right") - 1
        index_N = number_N - self._bounds[source_N]
        before_N = np.zeros_like(index_N)
        for source in np.unique(source_N).tolist():
            here = source_N == source
            before_N[here] = self._windows[source].targets_before(index_N[here])
        return self._in_split[source_N] + index_N, self._shares[source_N] - before_N


class Corpus:
    """Result of `open_corpus`.

    `has_text` is False for synthetic tokens, which spell nothing.
    `digest` is the SHA-256 of everything but the seed that decides samples: a resume with another is refused.
    """

    def __init__(
        self, spec: RunSpec, sources: Sequence[TokenSource], weights: Sequence[float], tokenizer: Tokenizer
    ) -> None:
        data = spec.data
        self.tokenizer = tokenizer
        self.has_text = not any(isinstance(source, SyntheticTokens) for source in sources)
        self.weights = tuple(weights)
        self.digest = digest_of(
            [source.digest for source in sources],
            seq_len=data.seq_len,
            pack=data.pack,
            document_mask=data.document_mask,
            val_fraction=data.val_fraction,
            weights=list(weights),
            tokenizer=tokenizer.digest,
        )
        window = 0 if data.pack else data.seq_len
        indices = [source.index(data.val_fraction, window) for source in sources]

        def split(held: bool) -> Split:
            return Split(
                [
                    Windows(
                        source,
                        index,
                        tokenizer,
                        held=held,
                        seq_len=data.seq_len,
                        pack=data.pack,
                        document_mask=data.document_mask,
                    )
                    for source, index in zip(sources, indices, strict=True)
                ]
            )

        self.train = split(held=False)
        self.validation = split(held=True)

    def order(self, seed: int) -> Mixture:
        """The order of the training samples: global sample index -> (source, sample within it)."""
        return Mixture(self.train.sizes, self.weights, seed)

    def validation_text(self, max_tokens: int | None = None, max_bytes: int = XZ_BYTES) -> bytes:
        """UTF-8 of the first held-out documents: of those that `max_tokens` targets hold, `max_bytes` at
        most.

        Empty where the tokenizer loses text, since the text must not be compared with what was counted as
        read.
        """
        return self.validation.sample_text(max_tokens, max_bytes)


def open_corpus(spec: RunSpec, check: Check = "files") -> Corpus:
    """Open what `data.corpus` or `data.mixture` names; text that is not tokenized yet is, into `data.cache`.

    Any number of processes may call it at once: one tokenizes, hashes files that nobody has verified, and
    indexes documents, and the others wait. `check` says what is compared with the record of a verification:
    "lazy" is for ranks of a host on which another process has just opened the corpus. Raises `UserError`.
    """
    mixture = spec.data.mixture or {spec.data.corpus: 1.0}
    names, weights = list(mixture), list(mixture.values())
    sources: list[TokenSource]
    if SYNTHETIC in names:
        if len(names) > 1:
            raise UserError(
                f"data.mixture: '{SYNTHETIC}' has no text and no tokenizer, and cannot be mixed; remove it"
            )
        sources = [SyntheticTokens(spec.train.seed, spec.model.vocab_size)]
        tokenizer = number_tokenizer(spec.model.vocab_size)
    else:
        shards = _open_shards(spec, names, check)
        _check_tokenizers(spec, names, shards)
        tokenizer = shards[0].tokenizer
        sources = list(shards)
    corpus = Corpus(spec, sources, weights, tokenizer)
    _check_length(spec, names, corpus.train)
    return corpus


def xz_bits_per_byte(data: bytes) -> float:
    """Bits per byte that `xz -9e` needs for `data`, as one stream: what a language model has to beat."""
    if not data:
        raise ValueError("there is nothing to compress")
    return 8 * len(lzma.compress(data, preset=9 | lzma.PRESET_EXTREME)) / len(data)


def _open_shards(spec: RunSpec, names: Sequence[str], check: Check) -> list[TokenShards]:
    folders = {name: Path(name).expanduser() for name in names}
    cache = cache_folder(spec.data.cache)
    ready = {
        name: TokenShards(path, cache=cache, check=check)
        for name, path in folders.items()
        if name and is_shards(path)
    }
    texts = [name for name in names if name not in ready]
    if texts:
        given = next(iter(ready.values())).tokenizer if ready else None
        note = _note(spec, texts, given)
        cached = _noted(note) if check == "lazy" else None
        if cached is None:
            cached = _cached(spec, [open_source(name, spec.data.text_key) for name in texts], given)
            write_atomically(note, cached.name)
        remedy = f"delete {cached} and it will be made again"
        ready |= {
            name: TokenShards(_part(cached, i), remedy, cache=cache, check=check)
            for i, name in enumerate(texts)
        }
    return [ready[name] for name in names]


def _note(spec: RunSpec, texts: Sequence[str], given: Tokenizer | None) -> Path:
    """The file that says which folder of the cache the last opening of these texts chose.

    Other ranks of the host read it and so need not hash the text, which that folder's name depends on.
    """
    data = spec.data
    paths = [str(Path(name).expanduser().absolute()) for name in texts]
    asked = [VERSION, texts, paths, data.text_key, data.tokenizer, data.val_fraction, spec.model.vocab_size]
    key = hashlib.sha256(json.dumps([*asked, given.digest if given else None]).encode()).hexdigest()[:16]
    return cache_folder(data.cache) / f".opened-{key}"


def _noted(note: Path) -> Path | None:
    """The folder that a note names; None where there is no note, or no such folder."""
    if not note.is_file():
        return None
    folder = note.with_name(Path(note.read_text(encoding="utf-8")).name)
    return folder if folder.is_dir() else None


def _cached(spec: RunSpec, sources: Sequence[TextSource], given: Tokenizer | None) -> Path:
    """The folder that holds the tokens of `sources`, made if it is not there.

    Its name carries a hash of all that decides the tokens: the sources' content and how it is tokenized.
    """
    data, vocab_size = spec.data, spec.model.vocab_size
    size = bpe_size(data.tokenizer, vocab_size)
    known = given
    if given is None:
        check_tokenizer(data.tokenizer, vocab_size)
        known = build_tokenizer(data.tokenizer, vocab_size, [], 0.0) if size is None else None
    if known is not None:
        _check_vocabulary(known, sources[0].name, vocab_size)
    recipe = {
        "version": VERSION,
        "sources": [source.fingerprint() for source in sources],
        "text_key": data.text_key,
        "tokenizer": known.digest if known else ["bpe", size, data.val_fraction],
    }
    key = hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:16]
    stem = re.sub(r"[^A-Za-z0-9]+", "-", Path(sources[0].name).name).strip("-")[:40] or "corpus"
    target = cache_folder(data.cache) / f"{stem}-{key}"

    def build(folder: Path) -> None:
        tokenizer = known or build_tokenizer(data.tokenizer, vocab_size, sources, data.val_fraction)
        for i, source in enumerate(sources):
            write_shards(source, tokenizer, _part(folder, i))

    build_once(target, "data.cache", build)
    return target


def _part(folder: Path, number: int) -> Path:
    return folder / f"{number:02d}"


def _check_tokenizers(spec: RunSpec, names: Sequence[str], shards: Sequence[TokenShards]) -> None:
    """One tokenizer for all sources, within the model's vocabulary, and not another than was asked for."""
    first = shards[0].tokenizer
    for name, shard in zip(names, shards, strict=True):
        if shard.tokenizer.digest != first.digest:
            raise UserError(
                f"data.mixture: {name} and {names[0]} were made with different tokenizers; "
                f"tokenize one of them again with the other's tokenizer.json"
            )
    setting, vocab_size = spec.data.tokenizer, spec.model.vocab_size
    size = bpe_size(setting, vocab_size)
    if size is not None:
        # A BPE may have fewer entries than asked for, where its text had no more pairs to merge.
        other = setting != "bpe" and (first.vocab_size > size or isinstance(first, ByteTokenizer))
    else:
        other = build_tokenizer(setting, vocab_size, [], 0).digest != first.digest
    if other:
        raise UserError(
            f"data.tokenizer: {names[0]} was tokenized with another tokenizer than {setting!r}; "
            f"leave data.tokenizer out, or tokenize the corpus again"
        )
    _check_vocabulary(first, names[0], vocab_size)


def _check_vocabulary(tokenizer: Tokenizer, name: str, vocab_size: int) -> None:
    if tokenizer.vocab_size > vocab_size:
        raise UserError(
            f"data.tokenizer: the tokenizer of {name} has {tokenizer.vocab_size} entries, more than "
            f"model.vocab_size {vocab_size}; set model.vocab_size = {tokenizer.vocab_size} or more"
        )


def _check_length(spec: RunSpec, names: Sequence[str], train: Split) -> None:
    """Each source fills one packed sample at least."""
    length = spec.data.seq_len
    for name, tokens in zip(names, train.tokens_by_source, strict=True):
        if spec.data.pack and tokens < length:
            raise UserError(
                f"data.seq_len: {length} tokens of one sample are more than the {tokens} training tokens of "
                f"{name}; give at most {tokens}, or more text, or data.pack = false"
            )
