"""Linear layers of a decoder on a CPU, with weights in the blocked format of oneDNN's products.

A turn of generation multiplies few rows, so it takes as long as the weights take from memory. PyTorch's
product in the usual format reads them at half the rate, or less, of one whose weights were reordered once.
Layers that share an input (queries, keys and values; gate and up) become one product.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.model.attention_gqa import Attention
from meshwright.model.decoder import Block, Decoder
from meshwright.model.linear import Linear, project
from meshwright.model.mlp import Mlp
from meshwright.model.moe import Moe

_ROWS = 16
"""Rows of the products that the format is chosen for; it takes any number."""
_SMALLEST = 2**18
"""Elements of weights that are packed; smaller ones stay in a core's cache, and the usual product begins
sooner."""
_LEAST = 4
"""Rows that a product has at least: with one it reads weights a fifth slower than with four."""


class _Packed:
    """Layers of one input, as one product."""

    def __init__(self, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> None:
        given = [bias for bias in biases if bias is not None]
        self.sizes = [len(weight) for weight in weights]
        self.bias = torch.cat(given) if given else None
        self.weight = torch.ops.mkldnn._reorder_linear_weight(torch.cat(list(weights)), _ROWS)

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        """(..., inputs) -> (..., outputs) of each layer."""
        rows = x.shape[:-1].numel()
        wide = x if rows >= _LEAST else F.pad(x.reshape(rows, -1), (0, 0, 0, _LEAST - rows))
        y: Tensor = torch.ops.mkldnn._linear_pointwise(wide, self.weight, self.bias, "none", [], "")
        y = y if rows >= _LEAST else y[:rows].view(*x.shape[:-1], -1)
        return y.split(self.sizes, -1)


class PackedLinears:
    """Hooks of a decoder's modules with packed weights."""

    def __init__(self) -> None:
        self._packed: dict[tuple[nn.Module, ...], _Packed] = {}

    def add(self, modules: Sequence[nn.Module]) -> None:
        """Pack the weights of layers of one input, if they are large; they keep shapes, and no memory."""
        weights = [module.get_parameter("weight").data for module in modules]
        if sum(weight.numel() for weight in weights) < _SMALLEST:
            return
        self._packed[tuple(modules)] = _Packed(weights, [getattr(module, "bias", None) for module in modules])
        for module, weight in zip(modules, weights, strict=True):
            module.register_parameter("weight", nn.Parameter(weight.to("meta"), requires_grad=False))

    def project(self, x: Tensor, linears: Sequence[Linear]) -> tuple[Tensor, ...]:
        """Apply layers to x (..., inputs): one (..., outputs) per layer."""
        packed = self._packed.get(tuple(linears))
        return packed(x) if packed is not None else project(x, linears)

    def output(self, x: Tensor, linear: Linear) -> Tensor:
        """Apply one layer to x (..., inputs): (..., outputs)."""
        return self.project(x, (linear,))[0]


@torch.no_grad()
def pack_linears(decoder: Decoder) -> Decoder:
    """Let a decoder on a CPU compute dense layers with packed weights; from then on it can only generate.

    Others stay as they are: the embedding and a head that is tied to it, experts, and the queries and latents
    of latent attention. So does all of a decoder in a format that oneDNN has no product for on this CPU.
    """
    first, onednn = next(decoder.parameters()), torch.ops.mkldnn
    supported: dict[torch.dtype, Callable[[], bool]] = {
        torch.float32: lambda: True,
        torch.bfloat16: onednn._is_mkldnn_bf16_supported,
        torch.float16: onednn._is_mkldnn_fp16_supported,
    }
    available = first.device.type == "cpu" and torch.backends.mkldnn.is_available()
    if not available or first.dtype not in supported or not supported[first.dtype]():
        return decoder
    packed = PackedLinears()
    for block in decoder.blocks:
        assert isinstance(block, Block)
        attention, mlp = block.attn, block.mlp
        packed.add([attention.o])
        attention.hooks = replace(attention.hooks, output=packed.output)
        if isinstance(attention, Attention):
            packed.add([attention.q, attention.k, attention.v])
            attention.hooks = replace(attention.hooks, project=packed.project)
        dense = mlp.shared if isinstance(mlp, Moe) else mlp
        if isinstance(dense, Mlp):
            packed.add([dense.up] if dense.gate is None else [dense.gate, dense.up])
            packed.add([dense.down])
            dense.hooks = replace(dense.hooks, project=packed.project, output=packed.output)
    head = decoder.head
    if not decoder.spec.tied and head.weight.numel() >= _SMALLEST:
        logits = _Packed([head.weight.data], [None])
        head.weight = nn.Parameter(head.weight.to("meta"), requires_grad=False)
        head.hooks = replace(head.hooks, predict=lambda x_BTD, *_: logits(x_BTD)[0])
    return decoder
