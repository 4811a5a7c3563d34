"""Batches as a caller has them: a dict of tensors with the names of transformers, made into a `Batch`.

`input_ids`       (n, T)   tokens of this data rank's samples, of which there may be none: (0, T).
`labels`          (n, T)   the token to predict at each place, by the tokens before it; -100 is not trained.
                           They stand where the tokens do, and are shifted here. By default `input_ids`.
`attention_mask`  (n, T)   1 for tokens, 0 for padding on the left or on the right.
`position_ids`    (n, T)   positions of tokens; a document begins where they do not go on by 1.
`seq_lens`        (n, S)   lengths of a row's documents in order, with zeros behind them, or (S,) of one row.

Without any of the last three a row is one document. A document's first token is predicted by none. Whatever
else a batch holds is for the caller's loss, tensors of n rows by microbatch.

Shapes: n samples, T tokens, S documents.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any
from zlib import crc32

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.data.loader import NO_SAMPLE, Batch
from meshwright.model.chunked_cross_entropy import IGNORE
from meshwright.parallel.loss_normalization import count_targets
from meshwright.spec import Layout, ModelSpec, UserError

READ = ("input_ids", "labels", "attention_mask", "position_ids", "seq_lens")
"""Keys of a batch that are read here."""


@dataclass(frozen=True)
class GivenBatch:
    """A batch of this data rank: `batch` for the step, whose rows may be padded, and all that was `given`."""

    batch: Batch
    given: Mapping[str, Any]
    samples: int
    length: int
    """Tokens of a row as it was given."""

    @property
    def targets(self) -> int:
        """Tokens that are trained."""
        return count_targets(self.batch.targets)

    @property
    def checksum(self) -> int:
        """A number that another batch hardly has."""
        parts = (self.batch.tokens, self.batch.targets, self.batch.positions, self.batch.documents)
        return crc32(b"".join(part.contiguous().numpy().tobytes() for part in parts))

    def with_rows(self, rows: int) -> GivenBatch:
        """The batch with rows of padding behind its samples, which train nothing, to `rows` in all."""
        more, batch = rows - len(self.batch.tokens), self.batch
        if not more:
            return self
        empty = torch.zeros(more, batch.tokens.shape[1], dtype=torch.int64)
        positions, none = torch.arange(empty.shape[1]).expand_as(empty), torch.full((more,), NO_SAMPLE)
        added = (empty, torch.full_like(empty, IGNORE), positions, empty, none, none)
        own = (batch.tokens, batch.targets, batch.positions, batch.documents, batch.ids, batch.slots)
        return replace(self, batch=Batch(*map(torch.cat, zip(own, added, strict=True))))


KEYS = ("input_ids", "labels", "attention_mask", "position_ids", "seq_lens")
"""Keys of a batch that are read; others are for the loss."""


def read_batch(given: Mapping[str, Any], model: ModelSpec, layout: Layout) -> GivenBatch:
    """Return the batch, each row padded on the right to what the context and tensor ranks of `layout` share.

    Raises `UserError` for a tensor that is missing, misshapen or out of range.
    """
    for name in given if isinstance(given, Mapping) else ():
        near = difflib.get_close_matches(str(name), KEYS, 1, 0.8)
        if near and name not in KEYS and near[0] not in given:
            raise UserError(f"batch.{name}: is not read; did you mean {near[0]}?")
    if not isinstance(given, Mapping):
        raise UserError(f"batch: is {type(given).__name__}; give a dictionary with input_ids")
    tokens = _integers(given, "input_ids")
    if tokens is None:
        raise UserError("batch: has no input_ids; give the tokens of this rank's samples, (n, T)")
    if tokens.ndim != 2 or not tokens.shape[1]:
        raise UserError(
            f"batch.input_ids: has shape {list(tokens.shape)}; give samples of equally many tokens, (n, T)"
        )
    _check_range("input_ids", tokens, model.vocab_size)
    mask = _mask(given, tokens)
    documents, positions = _documents(given, tokens, mask)
    targets = _targets(given, tokens, mask, documents, model)
    pieces = pieces_of(layout)
    (samples, length), padded = tokens.shape, -(-tokens.shape[1] // pieces) * pieces
    most = int(positions.max()) if samples else 0
    if model.position == "learned" and most >= model.max_seq_len:
        raise UserError(
            f"batch.input_ids: has position {most}, and the model has {model.max_seq_len} "
            "learned positions; give shorter samples"
        )
    more = padded - length
    if more:
        tokens, targets = F.pad(tokens, (0, more)), F.pad(targets, (0, more), value=IGNORE)
        behind = documents[:, -1:] + 1
        documents = torch.cat([documents, behind.expand(-1, more)], 1)
        positions = torch.cat([positions, torch.arange(more).expand(samples, -1)], 1)
    numbers = torch.arange(samples)
    batch = Batch(tokens, targets, positions, documents, numbers, numbers)
    return GivenBatch(batch, given, samples, length)


def pieces_of(layout: Layout) -> int:
    """The number whose multiples are lengths of rows that context and tensor ranks share equally."""
    return math.lcm(2 * layout.cp if layout.cp > 1 else 1, layout.cp * layout.tp)


def _integers(given: Mapping[str, Any], name: str) -> Tensor | None:
    """A tensor of whole numbers on the CPU, in int64; None if the batch lacks it."""
    value = given.get(name)
    if value is None:
        return None
    if not isinstance(value, Tensor) or value.is_floating_point() or value.is_complex():
        kind = str(value.dtype) if isinstance(value, Tensor) else type(value).__name__
        raise UserError(f"batch.{name}: is {kind}; give a tensor of whole numbers")
    return value.detach().to("cpu", torch.int64)


def _like(given: Mapping[str, Any], name: str, tokens: Tensor) -> Tensor | None:
    value = _integers(given, name)
    if value is not None and value.shape != tokens.shape:
        raise UserError(
            f"batch.{name}: has shape {list(value.shape)}, and input_ids has {list(tokens.shape)}; give one "
            "number for each token"
        )
    return value


def _check_range(name: str, values: Tensor, vocabulary: int) -> None:
    for value in (int(values.min()), int(values.max())) if values.numel() else ():
        if not 0 <= value < vocabulary:
            raise UserError(
                f"batch.{name}: has token {value}, which is outside of the model's vocabulary of "
                f"{vocabulary}; give ids below that"
            )


def _mask(given: Mapping[str, Any], tokens: Tensor) -> Tensor:
    """True for tokens (n, T), False for padding at either end of a row."""
    mask = _like(given, "attention_mask", tokens)
    if mask is None:
        return torch.ones_like(tokens, dtype=torch.bool)
    present = mask != 0
    changes = (present[:, 1:] != present[:, :-1]).sum(1) + present[:, 0].long() + present[:, -1].long()
    if bool((changes > 2).any()):
        row = int((changes > 2).nonzero()[0])
        raise UserError(
            f"batch.attention_mask: row {row} has padding between tokens; give rows with padding at their "
            "ends only"
        )
    return present


def _documents(given: Mapping[str, Any], tokens: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """The document of each token (n, T), counted from 0 in each row, and its position; padding is apart."""
    given_positions = _like(given, "position_ids", tokens)
    starts = torch.zeros_like(mask)
    starts[:, 0] = True
    starts[:, 1:] = mask[:, 1:] != mask[:, :-1]
    if given_positions is not None:
        if bool((given_positions < 0).any()):
            raise UserError("batch.position_ids: has negative positions; give 0 or more")
        starts[:, 1:] |= mask[:, 1:] & (given_positions[:, 1:] != given_positions[:, :-1] + 1)
    lengths = _integers(given, "seq_lens")
    if lengths is not None:
        starts |= _starts_of(lengths, tokens)
    places = torch.arange(tokens.shape[1]).expand_as(tokens)
    positions = places - places.where(starts, 0).cummax(1).values
    if given_positions is not None:
        positions = given_positions.where(mask, positions)
    return starts.long().cumsum(1) - 1, positions


def _starts_of(lengths: Tensor, tokens: Tensor) -> Tensor:
    """True where a document of `seq_lens` begins, and where padding behind the last one does."""
    rows, length = tokens.shape
    lengths = lengths.unsqueeze(0) if lengths.ndim == 1 else lengths
    if lengths.ndim != 2 or len(lengths) != rows or not lengths.shape[1] or bool((lengths < 0).any()):
        raise UserError(
            f"batch.seq_lens: has shape {list(lengths.shape)} for {rows} rows; give the lengths of each "
            "row's documents, (n, S), with zeros behind them"
        )
    ends = lengths.cumsum(1)
    if bool((ends > length).any()):
        raise UserError(
            f"batch.seq_lens: adds up to {int(ends.max())}, and a row has {length} tokens; give lengths that "
            "fit"
        )
    if bool((ends[:, -1] < length).any()):
        row = int((ends[:, -1] < length).nonzero()[0])
        raise UserError(
            f"batch.seq_lens: adds up to {int(ends[row, -1])} in row {row}, which has {length} tokens; give "
            "the lengths of all of a row, or mark its padding in attention_mask and give its length, too"
        )
    starts = torch.zeros(rows, length + 1, dtype=torch.bool)
    return starts.scatter_(1, ends, True)[:, :length]


def _targets(
    given: Mapping[str, Any], tokens: Tensor, mask: Tensor, documents: Tensor, model: ModelSpec
) -> Tensor:
    """The token that each place predicts (n, T); -100 at the end of a document and where no label is."""
    labels = _like(given, "labels", tokens)
    if labels is not None:
        _check_range("labels", labels[labels != IGNORE], model.vocab_size)
    labels = (tokens if labels is None else labels).masked_fill(~mask, IGNORE)
    within = labels[:, 1:].masked_fill(documents[:, 1:] != documents[:, :-1], IGNORE)
    return torch.cat([within, torch.full_like(tokens[:, :1], IGNORE)], 1)
