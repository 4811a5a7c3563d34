"""Linear layers of a decoder on a CPU: those of one input are one product, and large ones are reordered.

A turn of generation multiplies few rows, so it takes as long as the weights take from memory, and each
operator some microseconds more. PyTorch's product in the usual format reads weights at half the rate, or
less, of one whose weights were reordered once, in the blocked format of oneDNN's products. Queries, keys and
values stay in the one tensor that their product returns, turn in place, and go to the cache as one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.infer.paged_cache import PagedCache
from meshwright.model.attention import attend
from meshwright.model.attention_gqa import Attention
from meshwright.model.decoder import Block, Decoder
from meshwright.model.dynamic_linear import DynamicLinear
from meshwright.model.linear import Linear, project
from meshwright.model.mlp import Mlp
from meshwright.model.moe import Moe
from meshwright.model.rope import Rope, rotate_

_ROWS = 16
"""Rows of the products that the format is chosen for; it takes any number."""
_SMALLEST = 2**18
"""Elements of weights that are reordered; smaller ones stay in a core's cache, and the usual product begins
sooner."""
_LEAST = 4
"""Rows that a product has at least: with one it reads weights a fifth slower than with four."""


class Product:
    """Layers of one input, as one product: (..., inputs) -> (..., sum of outputs).

    With `reorder` the layers keep the shapes of their weights, and no memory; else their weights are views of
    the one weight.
    """

    def __init__(self, modules: Sequence[nn.Module], reorder: bool) -> None:
        weights = [module.get_parameter("weight").data for module in modules]
        given = [bias for module in modules if (bias := getattr(module, "bias", None)) is not None]
        self.sizes = [len(weight) for weight in weights]
        self.bias = torch.cat(given).detach() if given else None
        self.weight = torch.cat(weights) if len(weights) > 1 else weights[0]
        self.padded: Tensor | None = None
        kept = self.weight.to("meta") if reorder else self.weight
        for module, weight in zip(modules, kept.split(self.sizes), strict=True):
            module.register_parameter("weight", nn.Parameter(weight, requires_grad=False))
        if reorder:
            self.padded = self.weight.new_zeros(_LEAST, self.weight.shape[1])
            self.weight = torch.ops.mkldnn._reorder_linear_weight(self.weight, _ROWS)

    def __call__(self, x: Tensor) -> Tensor:
        if self.padded is None:
            return F.linear(x, self.weight, self.bias)
        rows = x.shape[:-1].numel()
        if rows >= _LEAST:
            return self._multiply(x)
        self.padded[:rows] = x.reshape(rows, -1)
        return self._multiply(self.padded)[:rows].view(*x.shape[:-1], -1)

    def _multiply(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return y


class JointProducts:
    """Hooks of a decoder's modules whose layers are joint products, of weights that are large `reordered`."""

    def __init__(self, reordered: bool) -> None:
        self._products: dict[tuple[nn.Module, ...], Product] = {}
        self._reordered = reordered

    def add(self, *modules: nn.Module) -> Product:
        """Make a product of layers of one input."""
        size = sum(module.get_parameter("weight").numel() for module in modules)
        product = Product(modules, self._reordered and size >= _SMALLEST)
        self._products[modules] = product
        return product

    def project(self, x: Tensor, linears: Sequence[Linear]) -> tuple[Tensor, ...]:
        """Apply layers to x (..., inputs): one (..., outputs) per layer."""
        product = self._products.get(tuple(linears))
        return project(x, linears) if product is None else product(x).split(product.sizes, -1)

    def output(self, x: Tensor, linear: Linear) -> Tensor:
        """Apply one layer to x (..., inputs): (..., outputs)."""
        return self._products[(linear,)](x)


class JointAttention(Attention):
    """`Attention` with the parameters of `attention`, in few operators that work in place."""

    def __init__(self, attention: Attention, products: JointProducts) -> None:
        nn.Module.__init__(self)
        self.hooks, self.head_dim = attention.hooks, attention.head_dim
        self.q, self.k, self.v, self.o = attention.q, attention.k, attention.v, attention.o
        self.q_norm, self.k_norm = attention.q_norm, attention.k_norm
        self._qkv, self._out = products.add(self.q, self.k, self.v), products.add(self.o)
        queries, keys, _ = self._qkv.sizes
        self._heads, self._kv_heads = queries // self.head_dim, keys // self.head_dim

    def forward(self, x_BTD: Tensor, rope: Rope | None, mask: Any, cache: Any = None) -> Tensor:
        assert isinstance(cache, PagedCache)
        heads, turned = self._heads, self._heads + self._kv_heads
        qkv = self._qkv(x_BTD).view(*x_BTD.shape[:2], -1, self.head_dim)
        q, k = qkv[:, :, :heads], qkv[:, :, heads:turned]
        if self.q_norm is not None and self.k_norm is not None:
            q.copy_(self.q_norm(q))
            k.copy_(self.k_norm(k))
        if rope is not None:
            rotate_(qkv[:, :, :turned], rope)
        keys, values = cache.store(qkv[:, :, heads:]).chunk(2, 2)
        return self._out(attend(q, keys, values, mask).flatten(2))


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
    products = JointProducts(available and supported[first.dtype]())
    for block in decoder.blocks:
        assert isinstance(block, Block)
        if isinstance(block.attn, Attention):
            block.attn = JointAttention(block.attn, products)
        else:
            products.add(block.attn.o)
            block.attn.hooks = replace(block.attn.hooks, output=products.output)
        dense = block.mlp.shared if isinstance(block.mlp, Moe) else block.mlp
        if isinstance(dense, Mlp):
            products.add(*([dense.up] if dense.gate is None else [dense.gate, dense.up]))
            products.add(dense.down)
            dense.hooks = replace(dense.hooks, project=products.project, output=products.output)
    head = decoder.head
    if not decoder.spec.tied:
        logits = products.add(head)
        head.hooks = replace(head.hooks, predict=lambda x_BTD, *_: logits(x_BTD))
    decoder.requires_grad_(False)
    return decoder
