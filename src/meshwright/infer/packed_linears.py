"""The blocks of a decoder on a CPU, for generation: linear layers of one input are one product, large weights
are reordered, and what stands between them takes few operators.

A turn of generation multiplies few rows, so it takes as long as the weights take from memory, and each
operator some microseconds more: the weights pass through the caches, so that Python and torch start it cold.
PyTorch's product in the usual format reads weights at half the rate, or less, of one whose weights were
reordered once, in the blocked format of oneDNN's products. Queries, keys and values stay in the one tensor
that their product returns, turn in place, and go to the cache as one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.infer.paged_cache import PagedCache
from meshwright.kernels.score_changes import ScoreChanges, capped
from meshwright.model.attention import KeyValueCache, attend
from meshwright.model.attention_gqa import Attention
from meshwright.model.block import Block
from meshwright.model.decoder import Decoder
from meshwright.model.dynamic_linear import DynamicLinear
from meshwright.model.mlp import Mlp
from meshwright.model.norm import RmsNorm
from meshwright.model.rope import Rope, rotate_

_ROWS = 16
"""Rows of the products that the format is chosen for; it takes any number."""
_SMALLEST = 2**18
"""Elements of weights that are kept in the blocked format only. Smaller ones in fp32 are kept in the usual
one, too: they stay in a core's cache, and for one row the usual product begins sooner."""
_COPIED_ROWS, _COPIED = 8, 2**22
"""Rows from which on, and elements of their keys and values up to which, attention reads a copy of them: in
one piece and in fp32 its kernel reads them up to a third sooner, copy included, than between other heads' and
in half formats."""


class JointLinear:
    """Layers of one input, as one product: (..., inputs) -> (..., sum of outputs).

    `reorder` makes it one of oneDNN. The layers then keep the shapes of their weights, and no memory, unless
    one row is multiplied by the weights as they were; else their weights are views of the one weight.
    """

    def __init__(self, modules: Sequence[nn.Module], reorder: bool) -> None:
        weights = [module.get_parameter("weight").data for module in modules]
        given = [bias for module in modules if (bias := getattr(module, "bias", None)) is not None]
        self.sizes = [len(weight) for weight in weights]
        self.bias = torch.cat(given).detach() if given else None
        joint = torch.cat(weights) if len(weights) > 1 else weights[0]
        usual = not reorder or (joint.dtype == torch.float32 and joint.numel() < _SMALLEST)
        self.weight = joint if usual else None
        self.reordered: Tensor | None = None
        kept = joint if usual else joint.to("meta")
        for module, weight in zip(modules, kept.split(self.sizes), strict=True):
            module.register_parameter("weight", nn.Parameter(weight, requires_grad=False))
        if reorder:
            self.reordered = torch.ops.mkldnn._reorder_linear_weight(joint, _ROWS)
            self._multiply = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, x: Tensor) -> Tensor:
        weight = self.weight
        if weight is not None and (self.reordered is None or x.numel() == x.shape[-1]):
            return F.linear(x, weight, self.bias)
        y: Tensor = self._multiply(x, self.reordered, self.bias, "none", [], "")
        return y


class PackedAttention:
    """`Attention` by joint products, in few operators that work in place."""

    def __init__(self, attention: Attention, reorder: bool) -> None:
        q, k, v, self.head_dim = attention.q, attention.k, attention.v, attention.head_dim
        self._qkv, self._out = JointLinear([q, k, v], reorder), JointLinear([attention.o], reorder)
        queries, keys, _ = self._qkv.sizes
        self._heads, self._kv_heads = queries // self.head_dim, keys // self.head_dim
        self._changes = ScoreChanges(attention.softcap, attention.sinks)
        self._q_norm, self._k_norm = attention.q_norm, attention.k_norm
        self._norms_all_heads, self._query_factor = attention.norms_all_heads, attention.query_factor

    def __call__(self, x_BTD: Tensor, rope: Rope | None, mask: Any, cache: KeyValueCache | None) -> Tensor:
        assert isinstance(cache, PagedCache)
        rows, count, hidden = x_BTD.shape
        heads, kv_heads = self._heads, self._kv_heads
        qkv = self._qkv(x_BTD.view(-1, hidden)).view(rows, count, heads + 2 * kv_heads, self.head_dim)
        q = qkv.narrow(2, 0, heads)
        if self._q_norm is not None and self._k_norm is not None:
            k = qkv.narrow(2, heads, kv_heads)
            for x, norm in ((q, self._q_norm), (k, self._k_norm)):
                x.copy_(norm(x.flatten(2)).view(x.shape) if self._norms_all_heads else norm(x))
        if rope is not None:
            rotate_(qkv.narrow(2, 0, heads + kv_heads), rope)
        if self._query_factor != 1.0:
            q.mul_(self._query_factor)
        stored = cache.store(qkv.narrow(2, heads, 2 * kv_heads))
        if count == 1 and mask is None and rows >= _COPIED_ROWS and stored.numel() <= _COPIED:
            exact = torch.promote_types(stored.dtype, torch.float32)
            q, stored = q.to(exact), stored.to(exact).contiguous()
        keys, values = stored.chunk(2, 2)
        out = attend(q, keys, values, mask, self._changes).to(qkv.dtype).reshape(rows * count, -1)
        return self._out(out).view(rows, count, hidden)


def _pack_norm(norm: RmsNorm) -> None:
    """Let a norm compute in few operators: sqrt(D) (w + offset) * x / sqrt(|x|^2 + D eps).

    The denominator is the hypotenuse of |x| and sqrt(D eps). Its last bits are not those of `RmsNorm`.
    """
    size, exact = len(norm.weight), torch.promote_types(norm.weight.dtype, torch.float32)
    floor = torch.full((1,), (size * norm.eps) ** 0.5, dtype=exact)
    factors = (norm.weight.to(exact) + norm.offset) * size**0.5

    def forward(x: Tensor) -> Tensor:
        length = torch.linalg.vector_norm(x, 2, -1, True, dtype=exact)
        y = (x / length.hypot_(floor)).mul_(factors)
        return y if y.dtype is x.dtype else y.to(x.dtype)

    norm.forward = forward  # type: ignore[method-assign]


def _pack_mlp(mlp: Mlp, reorder: bool) -> Callable[[Tensor], Tensor]:
    """Let a feed-forward layer compute by joint products, and return it as a function of x (B, T, D)."""
    up = JointLinear([mlp.up] if mlp.gate is None else [mlp.gate, mlp.up], reorder)
    down = JointLinear([mlp.down], reorder)

    def split(x: Tensor, _: Sequence[nn.Module]) -> tuple[Tensor, ...]:
        return up(x).split_with_sizes(up.sizes, -1)

    mlp.hooks = replace(mlp.hooks, project=split, output=lambda x, _: down(x))
    return lambda x_BTD: down(mlp.inner(x_BTD.view(-1, x_BTD.shape[-1]))).view(x_BTD.shape)


def _pack_block(block: Block, reorder: bool) -> None:
    """Let a block compute by joint products. Its parameters stay where they are."""
    if isinstance(block.attn, Attention):
        block.attn.forward = PackedAttention(block.attn, reorder)  # type: ignore[method-assign, assignment]
    else:
        out = JointLinear([block.attn.o], reorder)
        block.attn.hooks = replace(block.attn.hooks, output=lambda x, _: out(x))
    if isinstance(block.mlp, Mlp):
        block.mlp.forward = _pack_mlp(block.mlp, reorder)  # type: ignore[method-assign, assignment]
    elif block.mlp.shared is not None:
        _pack_mlp(block.mlp.shared, reorder)


@torch.no_grad()
def pack_linears(decoder: Decoder) -> Decoder:
    """Let a decoder on a CPU compute dense layers by joint products; from then on it can only generate.

    Others stay as they are: the embedding and a head that is tied to it, experts, and the queries and latents
    of latent attention; and all of a decoder with layers that round their inputs. No weight is reordered in a
    format that oneDNN has no product for on this CPU.
    """
    first, onednn = next(decoder.parameters()), torch.ops.mkldnn
    dynamic = any(isinstance(module, DynamicLinear) for module in decoder.modules())
    if first.device.type != "cpu" or dynamic:
        return decoder
    supported: dict[torch.dtype, Callable[[], bool]] = {
        torch.float32: lambda: True,
        torch.bfloat16: onednn._is_mkldnn_bf16_supported,
        torch.float16: onednn._is_mkldnn_fp16_supported,
    }
    available = torch.backends.mkldnn.is_available() and first.dtype in supported
    reorder = available and supported[first.dtype]()
    for module in decoder.modules():
        if isinstance(module, RmsNorm):
            _pack_norm(module)
    for block in decoder.blocks[: decoder.spec.layers]:
        assert isinstance(block, Block)
        _pack_block(block, reorder)
    head = decoder.head
    if not decoder.spec.tied:
        logits = JointLinear([head], reorder)
        softcap = decoder.spec.logit_softcap
        head.hooks = replace(head.hooks, predict=lambda x_BTD, *_: capped(logits(x_BTD), softcap))
    decoder.requires_grad_(False)
    return decoder
