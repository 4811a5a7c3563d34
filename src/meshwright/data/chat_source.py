"""Chats in a corpus: which corpora have them, what template renders them, and their tokens in order."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.data.chat_formats import (
    KEYS,
    Conversation,
    DataFormat,
    conversation_of,
    conversations_of,
    format_of,
)
from meshwright.data.chat_template import ChatTemplate, special_tokens
from meshwright.data.chat_tokens import ChatEncoder, ChatTokens
from meshwright.data.hub_source import HUB
from meshwright.data.manifest import UNWANTED, WANTED, Targets, shards_of
from meshwright.data.near_formats import renamed
from meshwright.data.readers import SYNTHETIC, TextSource
from meshwright.data.row_files import Rows
from meshwright.data.shard_writer import Marks
from meshwright.data.shards import read_manifest
from meshwright.data.sources import open_source
from meshwright.data.split import content_hash
from meshwright.data.tokenizer import IDs, Tokenizer
from meshwright.data.whole_documents import trained_bytes
from meshwright.spec.errors import UserError, did_you_mean
from meshwright.spec.files import MAX_JSON, read_text, user_path
from meshwright.spec.hf.chat_template_files import chat_template_files
from meshwright.spec.sections import DataSpec
from meshwright.storage.remote import is_url
from meshwright.units import counted

NOTHING_TRAINED = "chats without a token to train on"
"""Name by which chats are counted in which the assistant says nothing, or nothing but the first token."""
NOTHING_TO_COMPARE = "pairs with an answer without a token to train on"
"""Name by which pairs of answers are counted of which one is empty."""
EQUAL_ANSWERS = "pairs with equal answers"
"""Name by which pairs are counted whose answers have the same tokens, so that neither can be preferred."""


class EncodedChat(NamedTuple):
    """The tokens (n,) of a chat, whether each is trained on (n,), or of a judged completion its mark, the
    UTF-8 bytes that those spell, and a hash of its content that does not depend on the tokenizer."""

    ids: IDs
    trained: Marks
    utf8_bytes: int
    content_hash: int


class ChatSource(TextSource):
    """The rows of another source as chats in the order of its rows.

    `columns` are what the rows call the keys of their format, by these. `template` may be None where all rows
    are prompts and completions that are texts.
    """

    is_text = False

    @property
    def pairs(self) -> bool:
        """True for rows with a chosen and a rejected answer, which are two chats that follow each other."""
        return self.format == "preference"

    @property
    def targets(self) -> Targets:
        """The meaning of the marks of the rows' tokens (`TokenManifest.targets`)."""
        kinds: dict[DataFormat, Targets] = {"preference": "pairs", "judged": "judged"}
        return kinds.get(self.format, "marked")

    def __init__(
        self,
        source: TextSource,
        format: DataFormat,
        template: ChatTemplate | None,
        columns: Mapping[str, str],
    ) -> None:
        super().__init__(source.name, text_key="")
        self._source, self.format, self._template, self._columns = source, format, template, columns
        self.changed_prompts = self.unended = 0
        self.remarks: Counter[str] = Counter()

    def fingerprint(self) -> str:
        """Return the SHA-256 of the rows."""
        return self._source.fingerprint_of_rows()

    def recipe(self) -> dict[str, Any]:
        """Return what decides the chats' tokens beside the rows and the tokenizer."""
        found = [] if self._template is None else [self._template, self._template.of([])]
        said = json.dumps([[each.source, sorted(each.variables.items())] for each in found])
        columns = {"columns": dict(self._columns)} if self._columns else {}
        left_out = {"left_out": "equal answers"} if self.pairs else {}  # earlier versions kept them
        digest = hashlib.sha256(said.encode()).hexdigest()
        return {"format": self.format, "template": digest, **columns, **left_out}

    def rows(self) -> Rows:
        """Yield the rows, whose keys have the names of their format."""
        for place, row in self._source.rows():
            yield place, renamed(row, self._columns)

    def documents(self) -> Iterator[str]:
        """Raise `UserError`: chats are not text."""
        self.check_text()
        yield from ()

    def check_text(self) -> None:
        """Raise `UserError`: a tokenizer is not trained on chats."""
        raise UserError(
            f"data.tokenizer: {self.name} holds chats, which need the tokenizer of the model that is tuned; "
            "give that model with --from FOLDER, or its folder as data.tokenizer"
        )

    def chats(self, tokenizer: Tokenizer) -> Iterator[EncodedChat]:
        """Yield each chat, but for those with no token to train on, and pairs of equal answers, which are
        counted. Raises `UserError`.

        Of a pair the chosen answer comes first. The two have one hash, so they are held out together.
        """
        encoder = ChatEncoder(tokenizer, self._template)
        self.skipped.clear()
        for conversation in conversations_of(self.rows(), self.format, self.skipped):
            found = encoder.encode_pair(conversation) if self.pairs else (encoder.encode(conversation),)
            for _, trained in found:
                trained[:1] = False  # nothing is in front of the first token to predict it from
            if reason := _reason_to_leave_out(found):
                self.skipped[reason] += 1
                continue
            hashed = _content_hash(conversation)
            for ids, trained in found:
                spelt = trained_bytes(tokenizer, ids[trained].astype(np.int64))
                yield EncodedChat(ids, _marks(trained, conversation.label), spelt, hashed)
        self.skipped.update(self._source.skipped)
        self.changed_prompts, self.unended = encoder.changed_prompts, encoder.unended
        self.remarks = encoder.remarks

    def tell(self, documents: int) -> None:
        """Warn of rows that were left out, and of prompts that have other tokens alone."""
        reasons = ", ".join(counted(count, reason) for reason, count in sorted(self.skipped.items()))
        left = counted(documents // 2, "pairs") if self.pairs else counted(documents, "chats")
        if reasons:
            warnings.warn(f"data.corpus: {self.name}: left out {reasons}; it has {left} left", stacklevel=3)
        for remark, count in sorted(self.remarks.items()):
            warnings.warn(
                f"data.corpus: {self.name}: in {count:,} of {documents:,} chats {remark}; `meshwright data "
                "show` prints what is trained on",
                stacklevel=3,
            )
        if self.unended:
            warnings.warn(
                f"data.corpus: {self.name}: in {self.unended:,} of {documents:,} chats no token ends the "
                "last turn, so a model does not learn to stop; give a template that puts one there",
                stacklevel=3,
            )
        if self.changed_prompts:
            warnings.warn(
                f"data.corpus: {self.name}: a prompt has other tokens alone than in front of its completion "
                f"in {self.changed_prompts:,} of {documents:,} chats; what is trained on begins where they "
                "differ",
                stacklevel=3,
            )

    def check_first(self, tokenizer: Tokenizer) -> None:
        """Raise the `UserError` of the first row."""
        row = self._source.first_row()
        if row is not None:
            given = renamed(row, self._columns)
            conversation = conversation_of(given, self.format, f"the first row of {self.name}")
            encoder = ChatEncoder(tokenizer, self._template)
            if self.pairs:
                encoder.encode_pair(conversation)
            else:
                encoder.encode(conversation)


def _reason_to_leave_out(answers: Sequence[ChatTokens]) -> str | None:
    """Return the name by which a chat, or a pair of answers, is counted that teaches nothing; None of
    others."""
    if len(answers) == 2 and np.array_equal(answers[0].ids, answers[1].ids):
        return EQUAL_ANSWERS
    if all(trained.any() for _, trained in answers):
        return None
    return NOTHING_TO_COMPARE if len(answers) == 2 else NOTHING_TRAINED


def _marks(trained: NDArray[np.bool_], label: bool | None) -> Marks:
    """The marks of tokens of a conversation, whose completion may have a label."""
    return trained if label is None else trained * np.uint8(WANTED if label else UNWANTED)


def with_chats(source: TextSource, data: DataSpec) -> TextSource:
    """Return the chats of a source, or the source itself if its documents are text. Raises `UserError`.

    Where `data.format` does not say what it has, the keys of the first row do: chats have those of one
    format, and not the one of a text.
    """
    format = data.format
    if format == "auto":
        first = source.first_row()
        row = renamed(first, data.columns)
        if not isinstance(row, Mapping) or data.text_key in row:
            return source
        is_chat = any(set(keys) <= row.keys() for keys in KEYS.values())
        if not is_chat and (data.mixture or not data.columns):
            return source
        if not is_chat:
            _check_columns(first, source.name, data.columns)
        format = format_of(row)
    return source if format == "text" else ChatSource(source, format, template_of(data), data.columns)


def _check_columns(row: Mapping[str, Any], name: str, columns: Mapping[str, str]) -> None:
    """Raise `UserError` if a corpus's first row lacks a key that `columns` name."""
    for key, column in columns.items():
        if column not in row:
            keys = [*map(str, row)]
            hint = did_you_mean(column, keys) or f"; its keys are {', '.join(keys) or 'none'}"
            raise UserError(f"data.columns.{key}: the first row of {name} has no key {column!r}{hint}")


def has_chats(data: DataSpec) -> bool:
    """Return True if a corpus of a run has chats; False for one that is not there yet, or that a hub or
    server has, which are not asked."""
    if data.format != "auto":
        return data.has_chats
    for name in data.mixture or [data.corpus]:
        if name in (SYNTHETIC, "stdlib") or name.startswith(HUB) or is_url(name):
            continue
        try:
            folder = shards_of(name)
            if folder is not None:
                found = read_manifest(folder, "tokenize the corpus again").targets is not None
            else:
                found = isinstance(with_chats(open_source(name, data.text_key), data), ChatSource)
        except UserError:  # a start tells it; here it decides nothing
            continue
        if found:
            return True
    return False


def template_of(data: DataSpec) -> ChatTemplate | None:
    """Return the template of `data.chat_template`, or that beside `data.tokenizer`; None where none is.

    Raises `UserError`.
    """
    path = user_path(data.tokenizer, "data.tokenizer")
    folder = path if path.is_dir() else path.parent if path.is_file() else None
    if data.chat_template is None:
        has_one = folder is not None and chat_template_files(folder, "data.tokenizer")
        return ChatTemplate.open(folder, "data.tokenizer") if folder is not None and has_one else None
    given = user_path(data.chat_template, "data.chat_template")
    if given.is_dir():
        return ChatTemplate.open(given, "data.chat_template")
    variables = special_tokens(folder, "data.tokenizer") if folder is not None else {}
    return ChatTemplate(_read(given), f"data.chat_template: {given}", variables)


def _read(path: Path) -> str:
    try:
        return read_text(path, MAX_JSON)
    except (OSError, ValueError) as error:
        raise UserError(
            f"data.chat_template: {path} cannot be read ({error}); give a template in UTF-8"
        ) from error


def _content_hash(conversation: Conversation) -> int:
    said = [conversation.messages, conversation.tools, conversation.prompt, conversation.completion]
    said += [] if conversation.rejected is None else [conversation.rejected]
    return int(content_hash(json.dumps(said, sort_keys=True).encode())[0])
