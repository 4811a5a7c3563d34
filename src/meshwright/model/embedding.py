"""Embedding lookup whose gradients are accumulated in at least fp32."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.kernels.with_backward import with_backward


def embedding(indices: Tensor, weight: Tensor) -> Tensor:
    """Look up rows of `weight` (V, D) at `indices` (...): (..., D).

    PyTorch's CPU backward adds a row's gradients one by one in their own format: in bf16 the sum is 2.3%
    short after 1,024 terms, and the 16,384th term is lost. CUDA accumulates in fp32, and so does this.
    """
    if weight.device.type != "cpu" or weight.dtype.itemsize >= 4:
        return F.embedding(indices, weight)
    rows = weight.shape[0]

    def backward(grad: Tensor) -> Tensor:
        wide = torch.ops.aten.embedding_dense_backward(grad.float(), indices, rows, -1, False)
        return wide.to(grad.dtype)

    return with_backward(partial(F.embedding, indices), backward, weight)


def embed_tokens(
    tokens_BT: Tensor, positions: Tensor, weight: Tensor, position_weight: Tensor | None
) -> Tensor:
    """Token embeddings (B, T, D), plus those of `positions` (T,) or (B, T) where they are learned."""
    x_BTD = embedding(tokens_BT, weight)
    return x_BTD if position_weight is None else x_BTD + embedding(positions, position_weight)
