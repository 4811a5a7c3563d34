"""A mixture of experts: a router sends each token to a few of many small feed-forward layers.

Shapes: B batch, T sequence, N = B T tokens, D hidden, E experts, k experts of each token. Sparsely gated
experts are due to Shazeer et al. (2017); shared experts, which process every token, to DeepSeekMoE (Dai et
al. 2024). Tokens are dropped only where a capacity is set (Lepikhin et al. 2021).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from meshwright.model.experts import Experts
from meshwright.model.grouped_mm import one_kernel
from meshwright.model.hooks import Hooks
from meshwright.model.linear import Linear
from meshwright.model.lora_dropout import TokenKeys
from meshwright.model.mlp import Mlp
from meshwright.model.router import Router
from meshwright.spec import ModelSpec


class Moe(nn.Module):
    """x (B, T, D) -> (B, T, D): the weighted sum of each token's experts, plus the shared experts, which a
    gate may weigh."""

    def __init__(self, spec: ModelSpec, layer: int = 0, hooks: Hooks | None = None) -> None:
        super().__init__()
        assert spec.moe is not None
        hooks = hooks or Hooks()
        moe = self.moe = spec.moe
        self.layer, self.hooks = layer, hooks.moe
        self.keys = TokenKeys()  # of what adapters of the experts drop
        self.router = Router(moe, spec.hidden)
        self.experts = Experts(moe, spec.hidden, hooks.moe.experts)
        self.shared = Mlp(spec, moe.shared_ffn, hooks.mlp) if moe.shared_ffn else None
        self.shared_gate = Linear(spec.hidden, 1, False) if moe.shared_gate else None

    def forward(self, x_BTD: Tensor) -> Tensor:
        hooks, shared = self.hooks, self.shared
        local_BTD = hooks.scatter_tokens(x_BTD)
        x_ND = local_BTD.flatten(0, 1)
        routing = self.router(x_ND)
        weights, admitted = hooks.admit(self.moe, self.layer, routing, local_BTD.shape[0])
        keys_BT = self.keys.of(local_BTD.shape[:2], hooks.shard)
        keys_N = None if keys_BT is None else keys_BT.flatten()
        chunks = list(_split(hooks.chunks, x_ND, weights, routing.experts, admitted, keys_N))
        dispatchers = [
            hooks.dispatch(experts, mask, self.moe.experts, one_kernel(x))
            for x, _, experts, mask, _ in chunks
        ]
        # Shared experts compute while messages are in flight: `in_flight` holds the handle of each chunk.
        in_flight = [
            d.start_dispatch(x, w, keys) for d, (x, w, _, _, keys) in zip(dispatchers, chunks, strict=True)
        ]
        inner = None if shared is None else shared.inner(x_BTD)
        for index, dispatcher in enumerate(dispatchers):
            rows, row_weights = dispatcher.finish_dispatch(in_flight[index])
            in_flight[index] = dispatcher.start_combine(self.experts(rows, row_weights, dispatcher.groups))
        shared_BTD = None if shared is None or inner is None else shared.hooks.output(inner, shared.down)
        if shared_BTD is not None and self.shared_gate is not None:
            shared_BTD = self.shared_gate(x_BTD).sigmoid() * shared_BTD
        outputs = [d.finish_combine(handle) for d, handle in zip(dispatchers, in_flight, strict=True)]
        y_ND = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        y_BTD = hooks.gather_tokens(y_ND.view(local_BTD.shape))
        return y_BTD if shared_BTD is None else y_BTD + shared_BTD


def _split(chunks: int, *tensors: Tensor | None) -> list[tuple[Any, ...]]:
    """Split tensors (N, ...) along dim 0 into `chunks`, at most N; None stays None in each chunk."""
    first = tensors[0]
    assert first is not None
    if chunks == 1:
        return [tensors]
    sizes = [len(rows) for rows in torch.arange(len(first)).tensor_split(min(chunks, len(first)))]
    split = [x.split(sizes) if x is not None else [None] * len(sizes) for x in tensors]
    return list(zip(*split, strict=True))
