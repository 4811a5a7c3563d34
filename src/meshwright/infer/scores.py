"""Log-likelihoods of given continuations, on the ranks of a layout."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.comm.waiting import while_others_wait
from meshwright.data.loader import Batch
from meshwright.data.packing import IGNORE
from meshwright.infer.forward import no_token_dropped
from meshwright.infer.sharded import MOST_TOKENS, ShardedDecoder
from meshwright.model.decoder import Decoder
from meshwright.model.hooks import Predict
from meshwright.model.soft_targets import SoftTargets

MOST_LOGITS = 2**26
"""Logits that are held at a time."""


class ScoredText(NamedTuple):
    """A text, of which the last `predicted` tokens are to be predicted, each from those before it."""

    tokens: Sequence[int]
    predicted: int


class Score(NamedTuple):
    """The log-likelihood of a row in nats, and whether each of its tokens is the likeliest one."""

    nats: float
    greedy: bool


def scores(model: ShardedDecoder, rows: Sequence[ScoredText]) -> list[Score]:
    """Return the score of each row, on every rank; all ranks of the mesh call this with the same rows.

    Rows of like lengths are computed together, padded at their ends, at most `MOST_TOKENS` tokens at a time
    on a data rank.
    """
    mesh, found = model.mesh, {}
    ranks = model.spec.layout.data_ranks
    order = sorted(range(len(rows)), key=lambda number: -len(rows[number].tokens))

    def compute() -> None:
        for group in _groups(order, rows, ranks):
            own = group[mesh.data_rank :: ranks]
            batch = _batch([rows[number] for number in own], len(rows[group[0]].tokens), len(group), ranks)
            results = model.pipeline.forward([batch.to(mesh.device)])
            if results and mesh.tensor.rank == 0:
                picked_BT2 = results[0].double().cpu()
                nats, greedy = picked_BT2[..., 0].sum(1).tolist(), picked_BT2[..., 1].all(1).tolist()
                found.update({number: (nats[at], greedy[at]) for at, number in enumerate(own)})

    with no_token_dropped(model.decoder), _predicted_tokens(model.decoder):
        if ranks == 1:
            compute()
        else:  # one data rank may be done long before another
            while_others_wait(mesh.control, True, compute)
    for part in mesh.control.gather(list(found.items())):
        found.update(part)
    every = mesh.control.broadcast([found[number] for number in range(len(rows))] if mesh.rank == 0 else None)
    return [Score(*score) for score in every]


def _groups(order: Sequence[int], rows: Sequence[ScoredText], ranks: int) -> Iterator[Sequence[int]]:
    """Yield the numbers of rows that all data ranks compute at a time, longest first."""
    first = 0
    while first < len(order):
        count = ranks * max(1, MOST_TOKENS // len(rows[order[first]].tokens))
        yield order[first : first + count]
        first += count


def _batch(rows: Sequence[ScoredText], length: int, group: int, ranks: int) -> Batch:
    """Return rows as a batch of one length on all data ranks; experts of several take part in each."""
    count = -(-group // ranks)
    tokens, targets = torch.zeros(count, length - 1).long(), torch.full((count, length - 1), IGNORE)
    for at, row in enumerate(rows):
        ids, last = torch.tensor(row.tokens), len(row.tokens) - 1
        tokens[at, :last] = ids[:-1]
        targets[at, last - row.predicted : last] = ids[len(ids) - row.predicted :]
    positions, none = torch.arange(length - 1).expand(count, -1), torch.full((count,), -1)
    return Batch(tokens, targets, positions, torch.zeros_like(tokens), none, none)


@contextmanager
def _predicted_tokens(decoder: Decoder) -> Iterator[None]:
    """Context in which a head given targets (B, T) returns (B, T, 2) in place of the loss.

    These are the log-likelihood of each target and 1 where it is the likeliest token, or 0; for no target
    they are 0 and 1.
    """
    kept = decoder.head.hooks
    decoder.head.hooks = replace(kept, predict=_picked(kept.predict))
    try:
        yield
    finally:
        decoder.head.hooks = kept


def _picked(predict: Predict) -> Predict:
    def picked(
        x_BTD: Tensor,
        weight: Tensor,
        targets_BT: Tensor | None,
        _scale: float,
        _soft: SoftTargets | None,
        softcap: float | None,
    ) -> Tensor:
        assert targets_BT is not None
        counted = targets_BT != IGNORE
        x_ND, targets_N = x_BTD[counted], targets_BT[counted]
        found = torch.zeros(*targets_BT.shape, 2, dtype=torch.float64, device=x_BTD.device)
        found[..., 1] = 1.0
        rows: list[Tensor] = []
        size = max(1, MOST_LOGITS // len(weight))
        for x, target in zip(x_ND.split(size), targets_N.split(size), strict=True):
            logits_NV = predict(x.unsqueeze(0), weight, None, 1.0, None, softcap)[0]
            exact = logits_NV if logits_NV.dtype == torch.float64 else logits_NV.float()
            nats = exact.log_softmax(-1).gather(1, target.unsqueeze(1))[:, 0]
            rows.append(torch.stack([nats.double(), (exact.argmax(-1) == target).double()], 1))
        if rows:
            found[counted] = torch.cat(rows)
        return found

    return picked
