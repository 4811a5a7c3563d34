"""Grouped-query attention (Ainslie et al. 2023), its masks, and the cache that generation appends to.

Shapes: B batch, T queries, S keys, D hidden, H heads, K key-value heads, d channels of a head. Numbers of
heads are read off the weights, so that a module that holds some of the heads computes just those.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.model.attention_cpu import blocked_attention
from meshwright.model.attention_flash import Packed, flash_takes, pack, packed_attention
from meshwright.model.linear import Leave, Linear, Project, leave, project
from meshwright.model.norm import RmsNorm
from meshwright.model.rope import Rope, rotate
from meshwright.spec import ModelSpec

Attend = Callable[[Tensor, Tensor, Tensor, Any], Tensor]
"""(q (B, T, H, d), k (B, S, K, d), v (B, S, K, v), what is visible) -> (B, T, H, v)."""


class KeyValueCache:
    """What one block keeps of the positions that it has seen; room for `length` is taken at once.

    Keys and values (B, S, K, d), or for attention over latents those, with the keys' turning part (B, S, c).
    """

    def __init__(self, spec: ModelSpec, batch: int, length: int, like: Tensor) -> None:
        shapes: list[tuple[int, ...]] = [(spec.kv_heads, spec.head_dim)] * 2
        if spec.mla is not None:
            shapes = [(spec.mla.kv_rank + spec.mla.rope_dim,)]
        self._rooms = [like.new_empty(batch, length, *shape) for shape in shapes]
        self.filled = 0

    def append(self, *new: Tensor) -> list[Tensor]:
        """Store the next T positions (B, T, ...); all that are stored come back, (B, S, ...), as views."""
        first, self.filled = self.filled, self.filled + new[0].shape[1]
        for room, x in zip(self._rooms, new, strict=True):
            room[:, first : self.filled] = x
        return [room[:, : self.filled] for room in self._rooms]


class Attention(nn.Module):
    """x (B, T, D) -> (B, T, D), each position looking at itself and at those before it.

    `project` applies q, k and v, `attend` lets positions look, and `leave` applies o; a parallel layout puts
    its own there.
    """

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.project: Project = project
        self.attend: Attend = attend
        self.leave: Leave = leave
        self.head_dim = spec.head_dim
        self.q = Linear(spec.hidden, spec.heads * spec.head_dim, spec.qkv_bias)
        self.k = Linear(spec.hidden, spec.kv_heads * spec.head_dim, spec.qkv_bias)
        self.v = Linear(spec.hidden, spec.kv_heads * spec.head_dim, spec.qkv_bias)
        self.o = Linear(spec.heads * spec.head_dim, spec.hidden, spec.out_bias)
        self.q_norm = RmsNorm(spec.head_dim, spec.norm_eps) if spec.qk_norm else None
        self.k_norm = RmsNorm(spec.head_dim, spec.norm_eps) if spec.qk_norm else None

    def forward(
        self, x_BTD: Tensor, rope: Rope | None, mask: Any, cache: KeyValueCache | None = None
    ) -> Tensor:
        flat = self.project(x_BTD, (self.q, self.k, self.v))
        q, k, v = (x.unflatten(-1, (-1, self.head_dim)) for x in flat)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if rope is not None:
            q, k = rotate(q, rope), rotate(k, rope)
        if cache is not None:
            k, v = cache.append(k, v)
        return self.leave(self.attend(q, k, v, mask).flatten(2), self.o)


def attend(q_BTHd: Tensor, k_BSKd: Tensor, v_BSKv: Tensor, mask: Tensor | Packed | None) -> Tensor:
    """Causal attention of the last T of S positions: (B, T, H, v). `mask` is `attention_mask`'s."""
    if isinstance(mask, Packed):
        return with_wide_values(packed_attention)(q_BTHd, k_BSKd, v_BSKv, mask)
    if q_BTHd.device.type == "cpu":
        return blocked_attention(q_BTHd, k_BSKd, v_BSKv, mask)
    return sdpa(q_BTHd, k_BSKd, v_BSKv, mask)


def with_wide_values(attend: Attend) -> Attend:
    """Lets what takes values of d channels only take narrower ones: with zeros added, and cut off what comes
    out, which is exact."""

    def attend_narrow(q_BTHd: Tensor, k_BSKd: Tensor, v_BSKv: Tensor, seen: Any) -> Tensor:
        channels = v_BSKv.shape[-1]
        if channels == k_BSKd.shape[-1]:
            return attend(q_BTHd, k_BSKd, v_BSKv, seen)
        v_BSKd = F.pad(v_BSKv, (0, k_BSKd.shape[-1] - channels))
        return attend(q_BTHd, k_BSKd, v_BSKd, seen)[..., :channels]

    return attend_narrow


def sdpa(q_BTHd: Tensor, k_BSKd: Tensor, v_BSKv: Tensor, mask: Tensor | None) -> Tensor:
    """The same through torch's kernels, for devices other than the CPU: flash or cuDNN without a mask."""
    q, k, v = (x.transpose(1, 2) for x in (q_BTHd, k_BSKd, v_BSKv))
    queries, keys = q.shape[2], k.shape[2]
    if mask is not None:
        # The kernels that take a mask do not take fewer key heads than query heads.
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    elif queries not in (1, keys):
        raise ValueError(f"{queries} queries on {keys} keys need a mask")
    else:
        grouped = q.shape[1] != k.shape[1]
        out = F.scaled_dot_product_attention(q, k, v, is_causal=queries == keys, enable_gqa=grouped)
    return out.transpose(1, 2)


def attention_mask(
    queries: int,
    keys: int,
    window: int | None,
    documents_BT: Tensor | None,
    like: Tensor,
    head_dim: int | None = None,
) -> Tensor | Packed | None:
    """What the queries see, built once and shared by all blocks; they are the last of the keys' positions.

    A position sees itself and those before it: within `window` positions (its own included) and, of
    `documents_BT` (B, T), those of its document, a run of equal ids. None stands for the plain causal mask,
    which needs no memory. Else it is what is added to the scores, (1 or B, 1, T, S) of 0 and -inf in the
    dtype and on the device of `like` (B, ...), or, where flash attention takes that and heads of `head_dim`,
    where documents end. `documents_BT` are best on the CPU, where nothing waits for them.
    """
    if window is not None and window >= keys:
        window = None
    if documents_BT is not None and _one_document_each(documents_BT):
        documents_BT = None
    offset = keys - queries
    if window is None and documents_BT is None and (offset == 0 or queries == 1):
        return None
    if offset == 0 and head_dim is not None and flash_takes(like, head_dim):
        return pack(documents_BT, like.shape[0], keys, window, like.device)
    at = torch.arange(offset, keys, device=like.device).unsqueeze(1)
    other = torch.arange(keys, device=like.device)
    visible = other <= at
    if window is not None:
        visible = visible & (other > at - window)
    visible = visible[None]
    if documents_BT is not None:
        documents_BT = documents_BT.to(like.device)
        visible = visible & (documents_BT.unsqueeze(2) == documents_BT.unsqueeze(1))
    mask = torch.zeros(visible.shape, dtype=like.dtype, device=like.device)
    return mask.masked_fill_(~visible, float("-inf")).unsqueeze(1)


def _one_document_each(documents_BT: Tensor) -> bool:
    """Whether no row changes its document, as far as that is known without waiting for a device."""
    if documents_BT.device.type != "cpu" or type(documents_BT) is not Tensor:
        return False
    return bool((documents_BT == documents_BT[:, :1]).all())
