"""The forward of a turn on one rank: its stage of the decoder, with caches, and the choice of tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshwright.infer.batching import Turn
from meshwright.infer.paged_cache import PAGE_TOKENS, PagedCache, Places, places
from meshwright.infer.sampling import Sampling
from meshwright.model.decoder import Decoder
from meshwright.model.rope import rope_table
from meshwright.parallel.collectives import start_broadcast, start_receive, start_send
from meshwright.parallel.mesh import Mesh
from meshwright.spec import UserError
from meshwright.spec.stages import Stage


class Part(NamedTuple):
    """The part of a decoder that a rank computes: its stage, in a format, on a mesh."""

    stage: Stage
    mesh: Mesh
    dtype: torch.dtype


class StageForward:
    """Runs turns on this rank's part of a decoder, by default all of it.

    `pages` are those of each block's cache. Only ids below `limit` are chosen: a tokenizer may know fewer
    than the model.
    """

    def __init__(
        self,
        decoder: Decoder,
        sampling: Sampling,
        pages: int,
        limit: int | None = None,
        part: Part | None = None,
    ) -> None:
        self.decoder, self.sampling, self.limit = decoder, sampling, limit
        self.pipeline = part.mesh.pipeline if part is not None and part.mesh.pipeline.size > 1 else None
        self.stage = Stage(0, 0, decoder.spec.layers, True, True) if part is None else part.stage
        if part is None:
            self._like = next(decoder.parameters()).new_empty(0)
        else:
            self._like = torch.empty(0, dtype=part.dtype, device=part.mesh.device)
        blocks = decoder.blocks[self.stage.first : self.stage.last]
        try:
            self._caches = [PagedCache(block.get_submodule("attn"), pages, self._like) for block in blocks]
        except RuntimeError as error:  # torch's way to say that there is no memory
            raise UserError(
                f"generate: no memory for the keys and values of {pages * PAGE_TOKENS} tokens; give fewer "
                f"max_new_tokens, or fewer cache_tokens"
            ) from error

    @torch.no_grad()
    def __call__(self, turn: Turn) -> list[int]:
        """The next token of each row of a turn whose requests are to get one; collective in a pipeline."""
        device, stage, decoder = self._like.device, self.stage, self.decoder
        tokens_BT = torch.tensor(turn.tokens, device=device)
        count = tokens_BT.shape[1]
        begins = torch.tensor(turn.first, device=device).unsqueeze(1)
        positions_BT = begins + torch.arange(count, device=device)
        at = places(turn.pages, turn.first, count, device)
        x_BTD = decoder.embed(tokens_BT, positions_BT) if stage.embed else self._receive(tokens_BT)
        if stage.first < stage.last:
            spec = decoder.spec
            rope = rope_table(spec, positions_BT, x_BTD.dtype) if spec.position == "rope" else None
            mask = self._mask(at, turn.first, positions_BT, x_BTD)
            for block, cache in zip(decoder.blocks[stage.first : stage.last], self._caches, strict=True):
                cache.places = at
                x_BTD = block(x_BTD, rope, mask, cache)
        if not stage.head:
            self._send(x_BTD)
        if not turn.requests:
            return []
        if stage.head:
            logits_BV = decoder.head(x_BTD[:, -1:])[:, 0, : self.limit]
            chosen_B = self.sampling.choose(logits_BV, turn.requests, turn.positions)
        else:
            chosen_B = torch.empty(len(turn.tokens), dtype=torch.int64, device=device)
        if self.pipeline is not None:
            start_broadcast(chosen_B, self.pipeline.size - 1, self.pipeline).wait()
        return [int(token) for token in chosen_B.tolist()]

    def _mask(self, at: Places, first: Sequence[int], positions_BT: Tensor, like: Tensor) -> Any:
        """The decoder's own mask for whole prompts; else None if rows see all that is read, or a bias (B, 1,
        T, S)."""
        spec, count = self.decoder.spec, positions_BT.shape[1]
        if at.read is None:
            return self.decoder.hooks.mask(count, count, spec.sliding_window, None, like, spec.head_dim)
        keys, window = at.read.shape[1], spec.sliding_window
        if count == 1 and min(first) == max(first) and (window is None or window >= keys):
            return None
        other = torch.arange(keys, device=like.device)
        hidden = other > positions_BT.unsqueeze(2)
        if window is not None:
            hidden = hidden | (other <= positions_BT.unsqueeze(2) - window)
        mask = torch.zeros(hidden.shape, dtype=like.dtype, device=like.device)
        return mask.masked_fill_(hidden, float("-inf")).unsqueeze(1)

    def _receive(self, tokens_BT: Tensor) -> Tensor:
        assert self.pipeline is not None
        shape = (*tokens_BT.shape, self.decoder.spec.hidden)
        x_BTD = torch.empty(shape, dtype=self._like.dtype, device=self._like.device)
        start_receive(x_BTD, self.pipeline.rank - 1, self.pipeline).wait()
        return x_BTD

    def _send(self, x_BTD: Tensor) -> None:
        assert self.pipeline is not None
        start_send(x_BTD.contiguous(), self.pipeline.rank + 1, self.pipeline).wait()


@contextmanager
def no_token_dropped(decoder: Decoder) -> Iterator[None]:
    """Context in which experts admit every token: capacities are for training, and count whole sequences."""
    mixtures = [mixture for _, mixture in decoder.each_mixture()]
    kept = [mixture.hooks for mixture in mixtures]
    for mixture in mixtures:
        mixture.hooks = replace(
            mixture.hooks, admit=lambda _moe, _layer, routing, _batch: (routing.weights, None)
        )
    try:
        yield
    finally:
        for mixture, hooks in zip(mixtures, kept, strict=True):
            mixture.hooks = hooks
