"""Shapes and formats of the attention kernel in C++, and its results with gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from meshwright.kernels.attention_cpu import blocked_attention
from meshwright.model.attention import attention_mask

ROUNDED = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 1.5e-3}
"""Largest relative errors of what is rounded to a format, and of differences of such numbers."""
SHAPES = {  # batch, queries, keys, heads, key heads, channels of a query and of a value
    "four tiles": (2, 256, 256, 4, 2, 64, 64),
    "parts of tiles": (1, 77, 77, 4, 4, 16, 16),
    "cached keys, narrow values": (2, 33, 130, 4, 1, 48, 24),
    "several tiles of keys": (1, 1100, 1100, 2, 1, 16, 16),
    "channels beside vectors": (2, 77, 77, 2, 1, 18, 10),
    "one query": (3, 1, 5, 2, 2, 2, 2),
}


def draw(dtype: torch.dtype, *shape: int) -> tuple[list[Tensor], Tensor]:
    """q, k and v, and the gradient of the output."""
    batch, queries, keys, heads, key_heads, dim, value_dim = shape
    generator = torch.Generator().manual_seed(sum(shape))
    sizes = (
        (queries, heads, dim),
        (keys, key_heads, dim),
        (keys, key_heads, value_dim),
        (queries, heads, value_dim),
    )
    *inputs, grad = (torch.randn(batch, *size, generator=generator).to(dtype) for size in sizes)
    return inputs, grad


def documents(dtype: torch.dtype, queries: int, keys: int, batch: int) -> Tensor | None:
    """The mask of documents that begin so late that a query sees none of the first tile of keys."""
    starts = torch.tensor([[keys // 3 + row, keys * 4 // 5] for row in range(batch)])
    ids = (torch.arange(keys) >= starts[..., None]).sum(1)
    return attention_mask(queries, keys, None, ids, torch.empty((), dtype=dtype))


def with_gradients(inputs: list[Tensor], mask: Tensor | None, grad: Tensor) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = blocked_attention(*leaves, mask)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]
