"""Causal dot-product attention, its masks, and the interface of the cache that generation appends to.

Shapes: B batch, T queries, S keys, H heads, K key-value heads, d channels of a query or key, v of a value.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.kernels.attention_cpu import blocked_attention
from meshwright.kernels.attention_flash import Packed, flash_takes, pack, packed_attention, whole_rows
from meshwright.kernels.score_changes import UNCHANGED, ScoreChanges, add_sinks_, cap_

_FEW = 16
"""Queries of a row that are few: all the query heads of a key head then take part in one product with it."""


class Attend(Protocol):
    """Attention (B, T, H, v) of q (B, T, H, d) to k (B, S, K, d) and v (B, S, K, v)."""

    def __call__(
        self, q_BTHd: Tensor, k_BSKd: Tensor, v_BSKv: Tensor, mask: Any, changes: ScoreChanges = UNCHANGED, /
    ) -> Tensor:
        """Attend; `mask` comes from the function that goes with this one."""
        ...


class KeyValueCache(Protocol):
    """Keys and values of the positions that one block has processed: (B, S, K, d) each.

    For multi-head latent attention it is instead one tensor (B, S, c + r): the latent of c channels, then the
    rotary part of the keys, which all heads share.
    """

    @property
    def filled(self) -> int:
        """The most positions that a row had before this forward."""
        ...

    def append(self, *new: Tensor) -> list[Tensor]:
        """Store the next T positions (B, T, ...), and return all that they attend to (B, S, ...)."""
        ...


def attend(
    q_BTHd: Tensor,
    k_BSKd: Tensor,
    v_BSKv: Tensor,
    mask: Tensor | Packed | None,
    changes: ScoreChanges = UNCHANGED,
    /,
) -> Tensor:
    """Causal attention of the last T of S positions: (B, T, H, v). `mask` comes from `attention_mask`.

    On other devices than the CPU, too, changed scores are for `blocked_attention`, but for sinks where flash
    attention takes the queries: no kernel of torch's caps scores, and SDPA's give no log-sum-exp.
    """
    if isinstance(mask, Packed):
        return with_wide_values(_packed)(q_BTHd, k_BSKd, v_BSKv, mask, changes)
    queries, keys = q_BTHd.shape[1], k_BSKd.shape[1]
    few = queries == 1 or (queries <= _FEW and queries < keys and mask is not None)
    if few and not torch.is_grad_enabled():
        return attend_few_queries(q_BTHd, k_BSKd, v_BSKv, mask, changes)
    if not changes.none and mask is None and queries == keys and _flash_takes(q_BTHd, changes):
        mask = whole_rows(len(q_BTHd), queries, q_BTHd.device)
        return with_wide_values(_packed)(q_BTHd, k_BSKd, v_BSKv, mask, changes)
    if q_BTHd.device.type == "cpu" or not changes.none:
        return blocked_attention(q_BTHd, k_BSKd, v_BSKv, mask, changes)
    return sdpa(q_BTHd, k_BSKd, v_BSKv, mask)


def _flash_takes(q: Tensor, changes: ScoreChanges) -> bool:
    return changes.softcap is None and flash_takes(q, q.shape[-1])


def _packed(q: Tensor, k: Tensor, v: Tensor, mask: Packed, changes: ScoreChanges = UNCHANGED, /) -> Tensor:
    assert changes.softcap is None  # `attention_mask` makes no `Packed` for it
    return packed_attention(q, k, v, mask, changes.sinks)


def attend_few_queries(
    q_BTHd: Tensor,
    k_BSKd: Tensor,
    v_BSKv: Tensor,
    mask: Tensor | None,
    changes: ScoreChanges = UNCHANGED,
) -> Tensor:
    """Attention (B, T, H, v) of few queries a row to all keys that `mask`, (1 or B, 1, T, S), leaves.

    The query heads of a key head stand as its queries, so that no kernel copies keys for them.
    """
    (batch, queries, heads, _), key_heads = q_BTHd.shape, k_BSKd.shape[2]
    group = heads // key_heads
    if queries == 1:  # the usual turn of generation, in which each operator counts
        q = q_BTHd.reshape(batch, key_heads, group, -1)
    else:
        q = q_BTHd.unflatten(2, (-1, group)).permute(0, 2, 3, 1, 4).flatten(2, 3)
        mask = None if mask is None else mask.repeat(1, 1, group, 1)
    k, v = k_BSKd.transpose(1, 2), v_BSKv.transpose(1, 2)
    if changes.none:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    else:
        out = _attend_all(q, k, v, mask, changes)
    if queries == 1:
        return out.reshape(batch, 1, heads, -1)
    return out.unflatten(2, (group, queries)).permute(0, 3, 1, 2, 4).flatten(2, 3)


def _attend_all(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, changes: ScoreChanges) -> Tensor:
    """Attention (B, K, Q, v) of q (B, K, Q, d), of G heads one after another, to k (B, K, S, d)."""
    exact = torch.promote_types(q.dtype, torch.float32)
    scores = (q @ k.transpose(2, 3)).to(exact).mul_(q.shape[-1] ** -0.5)
    if changes.softcap is not None:
        cap_(scores, changes.softcap)
    if mask is not None:
        scores.add_(mask)
    chances = scores.softmax(-1)
    if changes.sinks is not None:
        by_head = changes.sinks.view(q.shape[1], -1, 1)
        of_queries = by_head.expand(-1, -1, q.shape[2] // by_head.shape[1]).flatten(1).unsqueeze(-1)
        chances.mul_(add_sinks_(scores.logsumexp(-1, keepdim=True), of_queries))
    return chances.to(q.dtype) @ v


def with_wide_values(attend: Attend) -> Attend:
    """Wrap an `attend` that needs d channels in the values so that it accepts fewer: zeros are appended to
    the values and cut off the output, which is exact."""

    def attend_narrow(
        q_BTHd: Tensor, k_BSKd: Tensor, v_BSKv: Tensor, mask: Any, changes: ScoreChanges = UNCHANGED, /
    ) -> Tensor:
        channels = v_BSKv.shape[-1]
        if channels == k_BSKd.shape[-1]:
            return attend(q_BTHd, k_BSKd, v_BSKv, mask, changes)
        v_BSKd = F.pad(v_BSKv, (0, k_BSKd.shape[-1] - channels))
        return attend(q_BTHd, k_BSKd, v_BSKd, mask, changes)[..., :channels]

    return attend_narrow


def sdpa(q_BTHd: Tensor, k_BSKd: Tensor, v_BSKv: Tensor, mask: Tensor | None) -> Tensor:
    """Causal attention (B, T, H, v) by PyTorch's SDPA kernels, for devices other than the CPU.

    Raises ValueError where several queries need a mask because more keys precede them.
    """
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
    """Mask that lets `queries` positions, the last of `keys`, attend; built once and shared by all blocks.

    A position attends to itself and earlier ones: at most `window` positions (its own included), and within
    its document, a run of equal ids in `documents_BT` (B, T). Returns None for the plain causal mask, which
    needs no memory; a `Packed` (ends of documents) where flash attention supports `like` and `head_dim`; else
    a bias of 0 and -inf to add to the scores, (1 or B, 1, T, S), in the dtype and on the device of `like`.
    Pass `documents_BT` on the CPU, so that the host does not wait for a device.
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
        documents_BT = documents_BT.to(like.device, non_blocking=True)
        visible = visible & (documents_BT.unsqueeze(2) == documents_BT.unsqueeze(1))
    mask = torch.zeros(visible.shape, dtype=like.dtype, device=like.device)
    return mask.masked_fill_(~visible, float("-inf")).unsqueeze(1)


def _one_document_each(documents_BT: Tensor) -> bool:
    """True if every row is one document; False where reading `documents_BT` would wait for a device."""
    if documents_BT.device.type != "cpu" or type(documents_BT) is not Tensor:
        return False
    return bool((documents_BT == documents_BT[:, :1]).all())
