"""The corpus of a run: its tokenizer, its training samples in order, and its validation samples."""

from __future__ import annotations

import hashlib
import json
import lzma
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from meshwright.data.chat_source import ChatSource, with_chats
from meshwright.data.document_index import TokenSource
from meshwright.data.judged import JudgedDocuments, JudgedSource, warn_of_one_label
from meshwright.data.manifest import VERSION, digest_of, shards_of
from meshwright.data.mixture import Mixture
from meshwright.data.packing import SplitSide, Windows
from meshwright.data.publish import build_once, write_atomically
from meshwright.data.readers import SYNTHETIC, TextSource
from meshwright.data.shards import TokenShards, tokenizer_of
from meshwright.data.sources import open_source
from meshwright.data.split_samples import Split
from meshwright.data.synthetic import SyntheticTokens, synthetic_chats, synthetic_pairs, synthetic_tokens
from meshwright.data.text_processes import TextProcesses
from meshwright.data.tokenize import (
    bpe_size,
    build_tokenizer,
    check_tokenizer,
    tell_remarks,
    warn_of_literals,
    write_shards,
)
from meshwright.data.tokenizer import ByteTokenizer, Tokenizer, number_tokenizer
from meshwright.data.verification import Check
from meshwright.data.verified import cache_folder
from meshwright.data.vocabulary import check_end, check_vocabulary
from meshwright.data.whole_documents import MarkedSource, WholeDocuments
from meshwright.spec import RunSpec, UserError
from meshwright.spec.files import user_path
from meshwright.spec.sections import DataSpec
from meshwright.spec.weights import own_tokenizer
from meshwright.storage.remote import is_url
from meshwright.units import counted

READER = 4
"""Version of what is read of files as documents: 2 reads JSON, CSV and TSV as rows, 3 Arrow, and caches of
the hub, 4 gzip and zstd."""
XZ_BYTES = 8 * 10**6
"""Most bytes of held-out text that are compressed: `xz -9e` takes about a second for 1.4 MB."""


class Corpus:
    """Result of `open_corpus`: the training samples and the held-out ones.

    `names` are those of the sources, `marked` says which have chats, `pairs` which have pairs of
    answers, `judged` which have answers with a label.
    `has_text` is False for synthetic tokens, which spell nothing. `digest` is the SHA-256 of everything but
    the seed that decides samples: a resume with another is refused.
    """

    def __init__(
        self, spec: RunSpec, sources: Sequence[TokenSource], weights: Sequence[float], tokenizer: Tokenizer
    ) -> None:
        data = spec.data
        self.tokenizer, self.names = tokenizer, _names(spec)
        self.has_text = not any(isinstance(source, SyntheticTokens) for source in sources)
        kinds = ("marked", "pairs", "judged")
        self.marked, self.pairs, self.judged = ([getattr(each, kind) for each in sources] for kind in kinds)
        judged = spec.preference is not None and spec.preference.judged
        if any(self.marked) and data.pack and not data.document_mask:
            raise UserError(
                "data.document_mask: false lets chats that share a sample see each other; leave it out, or "
                "set data.pack = false"
            )
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
        self.train, self.validation = (
            Split([_side(source, tokenizer, data, held, judged) for source in sources])
            for held in (False, True)
        )

    @property
    def first_token_remark(self) -> str:
        """The end of a sentence about a checkpoint of other data, as documents began with END before."""
        begin, end = self.tokenizer.begin_id, self.tokenizer.end_id
        if begin == end:
            return ""
        first, last = (self.tokenizer.decode([number]) for number in (begin, end))
        return (
            f" (documents now begin with {first}, as the tokenizer's post-processor says; if it was trained "
            f"with {last} there, give the folder of its tokens in data.cache as data.corpus)"
        )

    def order(self, seed: int) -> Mixture:
        """Return the order of the training samples: global sample index -> (source, sample within it)."""
        return Mixture(self.train.sizes, self.weights, seed)

    def validation_text(self, max_tokens: int | None = None, max_bytes: int = XZ_BYTES) -> bytes:
        """Return the UTF-8 text of the first held-out documents within `max_tokens` targets and `max_bytes`.

        Empty where the tokenizer loses text, since the counts of bytes are those of the text that was read.
        """
        return self.validation.sample_text(max_tokens, max_bytes)

    def compressed(self, max_tokens: int | None = None) -> dict[str, float]:
        """Return `xz_bits_per_byte` of that text and its length `xz_bytes`; nothing where it is empty.

        It takes seconds on one core, so ranks must not wait for it in a collective.
        """
        text = self.validation_text(max_tokens)
        return {"xz_bits_per_byte": xz_bits_per_byte(text), "xz_bytes": len(text)} if text else {}


def _side(source: TokenSource, tokenizer: Tokenizer, data: DataSpec, held: bool, judged: bool) -> SplitSide:
    """Return the samples of one side of a source's split."""
    if judged and (source.pairs or source.judged):
        return JudgedDocuments(cast(JudgedSource, source), tokenizer, data, held)
    if source.marked:
        return WholeDocuments(cast(MarkedSource, source), tokenizer, data, held)
    index = source.index(data.val_fraction, 0 if data.pack else data.seq_len)
    return Windows(source, index, tokenizer, data, held)


def open_corpus(spec: RunSpec, check: Check = "files") -> Corpus:
    """Open the corpora of a run, as `open_sources` does, which must have a sample to train on each."""
    corpus = open_sources(spec, check)
    _check_pairs(corpus, spec)
    sources = zip(corpus.names, corpus.train.tokens_by_source, corpus.marked, strict=True)
    for name, count, marked in sources:
        if spec.data.pack and count < spec.data.seq_len and not marked:
            raise UserError(
                f"data.seq_len: {spec.data.seq_len} tokens of one sample are more than the {count} training "
                f"tokens of {name}; give at most {count}, or more text, or data.pack = false"
            )
    if check != "lazy" and corpus.has_text:
        _warn_of_cuts(corpus, spec.data.seq_len)
        warn_of_one_label(corpus.train.sides, corpus.names)
    return corpus


def _check_pairs(corpus: Corpus, spec: RunSpec) -> None:
    """Raise `UserError` unless pairs of answers meet a loss of pairs, judged ones that of them, and neither
    meets anything else."""
    judges = spec.preference is not None and spec.preference.judged
    for name, pairs, judged in zip(corpus.names, corpus.pairs, corpus.judged, strict=True):
        if judged and not judges:
            raise UserError(
                f"data.corpus: {name} has answers with a label, which are judged one by one; give "
                f"--preference.loss kto, or data.format = 'prompt' to learn from all of them"
            )
        if judged:
            continue
        if not pairs and judges:
            raise UserError(
                f"preference.loss: 'kto' learns from judged answers, and {name} has none; give rows with "
                f"prompt, completion and label (data.format = 'judged'), or with chosen and rejected"
            )
        if pairs and spec.preference is None:
            raise UserError(
                f"data.corpus: {name} has pairs of chosen and rejected answers, which need a loss of pairs; "
                f"give --preference.loss dpo, or rows with messages alone"
            )
        if not pairs and spec.preference is not None:
            raise UserError(
                f"preference.loss: {spec.preference.loss!r} compares two answers, and {name} has no pairs; "
                f"give rows with chosen and rejected (data.format = 'preference'), or --preference none"
            )
    if any(corpus.marked) and not corpus.train.samples:
        what = f"{'example' if judges else 'chat' if spec.preference is None else 'pair'} of"
        which = "" if spec.preference is None or judges else "of both answers "
        raise UserError(
            f"data.seq_len: no {what} {', '.join(corpus.names)} has tokens to train on {which}"
            f"within {spec.data.seq_len} tokens; give a larger data.seq_len"
        )


def _warn_of_cuts(corpus: Corpus, seq_len: int) -> None:
    """Warn of chats that lose their ends, since a sample is shorter."""
    for name, side in zip(corpus.names, corpus.train.sides, strict=True):
        kind = side.what if isinstance(side, WholeDocuments) else ""
        if isinstance(side, WholeDocuments) and side.left_out:
            count = counted(side.left_out // 2 if side.pairs else side.left_out, kind)
            room = "for both answers" if side.pairs else "for a word to train on"
            warnings.warn(
                f"data.seq_len: left out {count} of {name}, as no room {room} is left behind the prompt in "
                f"{seq_len:,} tokens; give a larger data.seq_len if they matter",
                stacklevel=3,
            )
        what = "answers in a pair of" if side.pairs else f"{kind} of"
        if isinstance(side, WholeDocuments) and side.cut_documents:
            warnings.warn(
                f"data.seq_len: a limit of {seq_len:,} tokens cuts {side.cut_documents:,} of "
                f"{side.documents:,} {what} {name}; lost at the end: {counted(side.cut_tokens, 'tokens')} "
                f"({side.cut_trained:,} to be trained on); give a larger data.seq_len if they matter",
                stacklevel=3,
            )


def _names(spec: RunSpec) -> tuple[str, ...]:
    return tuple(spec.data.mixture or (spec.data.corpus,))


def open_sources(spec: RunSpec, check: Check = "files") -> Corpus:
    """Open the corpora of `data.corpus` or `data.mixture`; text is first tokenized into `data.cache`.

    Any number of processes may call it at once: one tokenizes, hashes files that were not verified yet, and
    indexes documents, and the others wait. `check` says which files are compared with the record of a
    verification: "lazy" is for ranks of a host on which another process has just opened the corpus. Raises
    `UserError`.
    """
    names, weights = list(_names(spec)), list(spec.data.mixture.values()) or [1.0]
    if SYNTHETIC not in names:
        shards = _open_shards(spec, names, check)
        _check_tokenizers(spec, names, shards)
        for name, shard in zip(names, shards, strict=True):
            check_vocabulary(shard, name, spec.model.vocab_size, check)
        return Corpus(spec, shards, weights, shards[0].tokenizer)
    if len(names) > 1:
        raise UserError(
            f"data.mixture: '{SYNTHETIC}' has no text and no tokenizer, and cannot be mixed; remove it"
        )
    seed, vocab_size = spec.train.seed, spec.model.vocab_size
    if spec.preference is not None:
        tokens: SyntheticTokens = synthetic_pairs(seed, vocab_size, spec.data.seq_len)
    elif spec.data.has_chats:
        tokens = synthetic_chats(seed, vocab_size, spec.data.seq_len)
    else:
        tokens = synthetic_tokens(seed, vocab_size)
    return Corpus(spec, [tokens], weights, number_tokenizer(vocab_size))


def xz_bits_per_byte(data: bytes) -> float:
    """Return the bits per byte that `xz -9e` needs for `data`, as one stream: a model has to beat them."""
    if not data:
        raise ValueError("there is nothing to compress")
    return 8 * len(lzma.compress(data, preset=9 | lzma.PRESET_EXTREME)) / len(data)


def _open_shards(spec: RunSpec, names: Sequence[str], check: Check) -> list[TokenShards]:
    cache = cache_folder(spec.data.cache)
    ready = {
        name: TokenShards(folder, cache=cache, check=check)
        for name in names
        if (folder := shards_of(name)) is not None
    }
    texts = [name for name in names if name not in ready]
    if texts:
        given = _tokenizer_for(spec, next(iter(ready.values()))) if ready else None
        note = _note(spec, texts, given)
        cached = _noted(note) if check == "lazy" else None
        if cached is None:
            opened = [with_chats(open_source(name, spec.data.text_key), spec.data) for name in texts]
            cached = _cached(spec, opened, given)
            write_atomically(note, cached.name)
        remedy = f"delete {cached} and it will be made again"
        for number, name in enumerate(texts):
            ready[name] = TokenShards(_part(cached, number), remedy, cache=cache, check=check)
    if check != "lazy":
        for name in names:
            warn_of_literals(name, ready[name].folder)
    return [ready[name] for name in names]


def _tokenizer_for(spec: RunSpec, shards: TokenShards) -> Tokenizer:
    """Return the tokenizer of a folder of tokens for the texts beside it."""
    reads = "read" if spec.data.special_tokens == "read" else None
    return tokenizer_of(shards.folder, shards.manifest.model_copy(update={"special_tokens": reads}))


def _note(spec: RunSpec, texts: Sequence[str], given: Tokenizer | None) -> Path:
    """Return the file with the name of the cache's folder that the last opening of these texts chose.

    Other ranks of the host read it and so need not hash the text, which that folder's name depends on.
    """
    data = spec.data
    paths = [name if is_url(name) else str(user_path(name, "data.corpus").absolute()) for name in texts]
    asked = [VERSION, texts, paths, data.text_key, data.tokenizer, data.val_fraction, spec.model.vocab_size]
    asked += [data.special_tokens] if data.special_tokens == "read" else []
    asked += [data.format, data.chat_template] if data.has_chats or data.chat_template else []
    asked += [data.columns] if data.columns else []
    key = hashlib.sha256(json.dumps([*asked, given.digest if given else None]).encode()).hexdigest()[:16]
    return cache_folder(data.cache) / f".opened-{key}"


def _noted(note: Path) -> Path | None:
    """Return the folder that a note names; None where there is no note, or no such folder."""
    if not note.is_file():
        return None
    folder = note.with_name(Path(note.read_text(encoding="utf-8")).name)
    return folder if folder.is_dir() else None


def _cached(spec: RunSpec, sources: Sequence[TextSource], given: Tokenizer | None) -> Path:
    """Return the folder that holds the tokens of `sources`, made if it is missing.

    Its name carries a hash of everything that decides the tokens: the sources' content and how it is
    tokenized.
    """
    data, vocab_size = spec.data, spec.model.vocab_size
    size, reads = bpe_size(data.tokenizer, vocab_size), data.special_tokens == "read"
    known = given
    if given is None:
        check_tokenizer(data.tokenizer, vocab_size)
        known = build_tokenizer(data.tokenizer, vocab_size, [], 0.0, None, reads) if size is None else None
    if known is not None:
        tell_remarks(known)
        check_end(known, sources[0].name, vocab_size)
    else:
        for source in sources:
            source.check_text()
    chats = [source.recipe() if isinstance(source, ChatSource) else None for source in sources]
    recipe = {
        "version": VERSION,
        "reader": READER,
        "sources": [source.fingerprint() for source in sources],
        "text_key": data.text_key,
        "tokenizer": known.digest if known else ["bpe", size, data.val_fraction],
        **({"special_tokens": "read"} if reads else {}),
        **({"chats": chats} if any(chats) else {}),
    }
    key = hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:16]
    stem = re.sub(r"[^A-Za-z0-9]+", "-", Path(sources[0].name).name).strip("-")[:40] or "corpus"
    target = cache_folder(data.cache) / f"{stem}-{key}"

    def build(folder: Path) -> None:
        with TextProcesses() as processes:
            tokenizer = known or build_tokenizer(
                data.tokenizer, vocab_size, sources, data.val_fraction, processes, reads
            )
            for number, source in enumerate(sources):
                own = tokenizer.reading_special() if isinstance(source, ChatSource) else tokenizer
                write_shards(source, own, _part(folder, number), processes)

    build_once(target, "data.cache", build)
    return target


def _part(folder: Path, number: int) -> Path:
    return folder / f"{number:02d}"


def _check_tokenizers(spec: RunSpec, names: Sequence[str], shards: Sequence[TokenShards]) -> None:
    """Raise `UserError` unless all sources have one tokenizer, as was asked for."""
    first = shards[0].tokenizer
    for name, shard in zip(names, shards, strict=True):
        if shard.tokenizer.digest != first.digest:
            raise UserError(
                f"data.mixture: {name} and {names[0]} were made with different tokenizers; "
                f"tokenize one of them again with the other's tokenizer.json"
            )
        if spec.data.special_tokens == "read" and shard.manifest.special_tokens != "read":
            raise UserError(
                f"data.special_tokens: 'read' has no effect on {name}, which was tokenized with 'text'; "
                "tokenize the corpus again with 'read', or leave it out"
            )
    setting, vocab_size = spec.data.tokenizer, spec.model.vocab_size
    size = bpe_size(setting, vocab_size)
    if size is not None:
        # A BPE may have fewer entries than asked for, where its text had no more pairs to merge.
        other = setting != "bpe" and (first.vocab_size > size or isinstance(first, ByteTokenizer))
    else:
        wanted = build_tokenizer(setting, vocab_size, [], 0)  # a folder says itself how documents begin
        other = (wanted.content_sha256, wanted.end_id) != (first.content_sha256, first.end_id)
    if other:
        of_weights = setting == str(own_tokenizer(spec.model.weights))
        remedy = (
            "tokenize the corpus again with that of the weights"
            if of_weights
            else ("leave data.tokenizer out, or tokenize the corpus again")
        )
        raise UserError(
            f"data.tokenizer: {names[0]} was tokenized with another tokenizer than {setting!r}; {remedy}"
        )
