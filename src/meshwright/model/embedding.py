"""Embedding lookup whose gradients are accumulated in at least fp32."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


class _EmbeddingOnCpu(torch.autograd.Function):
    """Embedding lookup in bf16 or fp16 with a backward that accumulates in fp32.

    PyTorch's CPU backward adds a row's gradients one by one in their own format: in bf16 the sum is 2.3%
    short after 1,024 terms, and the 16,384th term is lost. CUDA accumulates in fp32.
    """

    @staticmethod
    def forward(ctx: Any, indices: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(indices)
        ctx.rows = weight.shape[0]
        return F.embedding(indices, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        (indices,) = ctx.saved_tensors
        wide = torch.ops.aten.embedding_dense_backward(grad.float(), indices, ctx.rows, -1, False)
        return None, wide.to(grad.dtype)


def embedding(indices: Tensor, weight: Tensor) -> Tensor:
    """Look up rows of `weight` (V, D) at `indices` (...): (..., D)."""
    if weight.device.type == "cpu" and weight.dtype.itemsize < 4:
        return _EmbeddingOnCpu.apply(indices, weight)
    return F.embedding(indices, weight)


def embed_tokens(
    tokens_BT: Tensor, positions: Tensor, weight: Tensor, position_weight: Tensor | None
) -> Tensor:
    """Token embeddings (B, T, D), plus those of `positions` (T,) or (B, T) where they are learned."""
    x_BTD = embedding(tokens_BT, weight)
    return x_BTD if position_weight is None else x_BTD + embedding(positions, position_weight)
