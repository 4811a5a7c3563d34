"""The corpus of a run: its tokenizer, its training samples in order, and its validation samples."""

from __future__ import annotations

import hashlib
import json
import lzma
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from meshwright.data.files import build_once
from meshwright.data.ingest import SYNTHETIC, TextSource, open_source
from meshwright.data.mixture import Mixture
from meshwright.data.order import I64
from meshwright.data.packing import Samples, Windows
from meshwright.data.shards import VERSION, TokenShards, TokenSource, digest_of, is_shards
from meshwright.data.split import held_out
from meshwright.data.synthetic import SyntheticTokens
from meshwright.data.tokenize import bpe_size, build_tokenizer, check_tokenizer, write_shards
from meshwright.data.tokenizer import ByteTokenizer, Tokenizer, number_tokenizer
from meshwright.spec import RunSpec, UserError


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

    def targets_before(self, id_N: I64) -> I64:
        """Targets in all samples before each of these, in [0, samples]."""
        total_N = np.zeros_like(id_N)
        for part, bound in zip(self._windows, self._bounds.tolist(), strict=False):
            if part.count:
                total_N += part.targets_before(np.clip(id_N - bound, 0, part.count))
        return total_N

    def bytes_for(self, max_tokens: int | None = None) -> int:
        """UTF-8 bytes that the first `max_tokens` targets (default all) spell; END spells nothing."""
        return sum(part.byte_count(targets) for part, targets in self._first(max_tokens))

    def text_bytes(self, max_tokens: int | None = None) -> bytes:
        """That text itself, decoded from the tokens."""
        return b"".join(part.text_bytes(targets) for part, targets in self._first(max_tokens))

    def _first(self, max_tokens: int | None) -> list[tuple[Windows, int]]:
        left = self.target_tokens if max_tokens is None else max_tokens
        shares = []
        for part in self._windows:
            targets = min(left, part.target_tokens)
            left -= targets
            if targets:
                shares.append((part, targets))
        return shares


class Corpus:
    """What `open_corpus` gives.

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
        masks = [held_out(source.hashes, data.val_fraction) for source in sources]

        def split(held: bool) -> Split:
            return Split(
                [
                    Windows(
                        source,
                        np.flatnonzero(mask == held),
                        tokenizer,
                        seq_len=data.seq_len,
                        pack=data.pack,
                        document_mask=data.document_mask,
                    )
                    for source, mask in zip(sources, masks, strict=True)
                ]
            )

        self.train = split(held=False)
        self.validation = split(held=True)

    def order(self, seed: int) -> Mixture:
        """The order of the training samples: global sample index -> (source, sample within it)."""
        return Mixture(self.train.sizes, self.weights, seed)

    def validation_text_bytes(self, max_tokens: int | None = None) -> bytes:
        """UTF-8 of the held-out documents, one after the other, as far as `max_tokens` targets go.

        Empty where the tokenizer loses text: what its tokens spell is then not what was counted as read, and
        must not be compared with it.
        """
        text = self.validation.text_bytes(max_tokens)
        return text if len(text) == self.validation.bytes_for(max_tokens) else b""


def open_corpus(spec: RunSpec) -> Corpus:
    """Open what `data.corpus` or `data.mixture` names; text that is not tokenized yet is, into `data.cache`.

    Any number of processes may call it at once: one tokenizes and the others wait. The hash of every file is
    checked. Raises `UserError`.
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
        shards = _open_shards(spec, names)
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


def _open_shards(spec: RunSpec, names: Sequence[str]) -> list[TokenShards]:
    folders = {name: Path(name).expanduser() for name in names}
    ready = {name: TokenShards(path) for name, path in folders.items() if name and is_shards(path)}
    texts = {name: open_source(name, spec.data.text_key) for name in names if name not in ready}
    if texts:
        given = next(iter(ready.values())).tokenizer if ready else None
        cached = _cached(spec, list(texts.values()), given)
        remedy = f"delete {cached} and it will be made again"
        ready |= {name: TokenShards(_part(cached, i), remedy) for i, name in enumerate(texts)}
    return [ready[name] for name in names]


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
    root = Path(data.cache).expanduser() if data.cache else Path.home() / ".cache" / "meshwright"
    target = root / f"{stem}-{key}"

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
