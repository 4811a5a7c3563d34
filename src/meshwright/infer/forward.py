"""The forward of a turn on one rank: its stage of the decoder, with caches, and the choice of tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshwright.comm.collectives import start_broadcast, start_receive, start_send
from meshwright.comm.mesh import Mesh
from meshwright.infer.batching import ForwardBatch
from meshwright.infer.paged_cache import PagedCache, Places, places
from meshwright.infer.sampling import Sampling
from meshwright.model.decoder import Decoder, flash_channels
from meshwright.model.rope import Rope, rope_table, with_signs
from meshwright.spec import UserError
from meshwright.spec.layers import RopeSpec
from meshwright.spec.serving import PAGE_TOKENS
from meshwright.spec.stages import Stage

_LEAST_POSITIONS = 512
"""Positions that the first rotary tables have."""


class DecoderPart(NamedTuple):
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
        part: DecoderPart | None = None,
    ) -> None:
        self.decoder, self.sampling, self.limit = decoder, sampling, limit
        self.pipeline = part.mesh.pipeline if part is not None and part.mesh.pipeline.size > 1 else None
        self.stage = Stage(0, 0, decoder.spec.layers, True, True) if part is None else part.stage
        if part is None:
            self._like = next(decoder.parameters()).new_empty(0)
        else:
            self._like = torch.empty(0, dtype=part.dtype, device=part.mesh.device)
        self._ropes: dict[RopeSpec, Rope] = {}
        # What a decoder that goes on to be trained keeps of a forward, such as casts, must not be made in
        # inference mode, which begins each operator sooner.
        trained = any(parameter.requires_grad for parameter in decoder.parameters())
        self._mode = torch.no_grad if trained or part is not None else torch.inference_mode
        self._blocks = list(decoder.blocks)[self.stage.first : self.stage.last]
        kinds = decoder.spec.layer_kinds[self.stage.first : self.stage.last]
        self._rotary = list(dict.fromkeys(kind.rope for kind in kinds))
        self._windows = list(dict.fromkeys(kind.window for kind in kinds))
        self._kinds = [(self._rotary.index(kind.rope), self._windows.index(kind.window)) for kind in kinds]
        """Places of each block's rotary positions and window among the different ones."""
        try:
            self._caches = [
                PagedCache(block.get_submodule("attn"), pages, self._like) for block in self._blocks
            ]
        except RuntimeError as error:  # torch's way to say that there is no memory
            raise UserError(
                f"generate: no memory for the keys and values of {pages * PAGE_TOKENS} tokens; give fewer "
                f"max_new_tokens, or fewer cache_tokens"
            ) from error

    def __call__(self, turn: ForwardBatch) -> list[list[int]]:
        """The tokens that a turn chooses for each row, if it is to; collective in a pipeline."""
        with self._mode():
            return self._run(turn)

    def _run(self, turn: ForwardBatch) -> list[list[int]]:
        device, stage, decoder = self._like.device, self.stage, self.decoder
        tokens_BT = torch.tensor(turn.tokens, device=device)
        count = tokens_BT.shape[1]
        begins = torch.tensor(turn.first, device=device).unsqueeze(1)
        positions_BT = begins + torch.arange(count, device=device) if count > 1 else begins
        at = places(turn.pages, turn.first, count, device)
        x_BTD = decoder.embed(tokens_BT, positions_BT) if stage.embed else self._receive(tokens_BT)
        if stage.first < stage.last:
            end = max(turn.first) + count
            ropes = [self._rope_of(rope, positions_BT, end) for rope in self._rotary]
            masks = [self._mask(window, at, turn.first, positions_BT, x_BTD) for window in self._windows]
            for block, (rope, window), cache in zip(self._blocks, self._kinds, self._caches, strict=True):
                cache.places = at
                x_BTD = block(x_BTD, ropes[rope], masks[window], cache)
        if not stage.head:
            self._send(x_BTD)
        if not turn.requests:
            return []
        if stage.head:
            logits_NV = decoder.head(x_BTD[:, -turn.chosen :]).flatten(0, 1)[:, : self.limit]
            requests = [request for request in turn.requests for _ in range(turn.chosen)]
            chosen_N = self.sampling.choose(logits_NV, requests, turn.positions)
        else:
            chosen_N = torch.empty(len(turn.tokens) * turn.chosen, dtype=torch.int64, device=device)
        if self.pipeline is not None:
            start_broadcast(chosen_N, self.pipeline.size - 1, self.pipeline).wait()
        rows: list[list[int]] = chosen_N.view(-1, turn.chosen).tolist()
        return rows

    def _rope_of(self, rope: RopeSpec | None, positions_BT: Tensor, count: int) -> Rope | None:
        """Rotary tables (B, T, 1, d) for positions below `count`; those of all positions so far are kept."""
        if rope is None:
            return None
        if rope not in self._ropes or len(self._ropes[rope][0]) < count:
            every = torch.arange(max(_LEAST_POSITIONS, 2 * count), device=positions_BT.device)
            # Lengths at which LongRoPE takes its long factors are refused before.
            self._ropes[rope] = with_signs(rope_table(rope, every, self._like.dtype))
        cosine, sine = self._ropes[rope]
        return cosine[positions_BT], sine[positions_BT]

    def _mask(
        self, window: int | None, at: Places, first: Sequence[int], positions_BT: Tensor, like: Tensor
    ) -> Any:
        """The decoder's own mask for whole prompts; else None if rows see all that is read, or a bias (B, 1,
        T, S)."""
        spec, count = self.decoder.spec, positions_BT.shape[1]
        if at.read is None:
            return self.decoder.hooks.mask(count, count, window, None, like, flash_channels(spec))
        keys = at.keys
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
