"""Adapters of low rank (Hu et al. 2021, LoRA) in a decoder, and weights with adapters merged into them.

Shapes: I inputs and O outputs of a linear layer, r the rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from meshwright.model.decoder import Decoder
from meshwright.model.expert_lora import ExpertAdapter
from meshwright.model.experts import Experts
from meshwright.model.linear import Linear
from meshwright.model.lora_dropout import Dropout, ExpertDropout, TokenKeys
from meshwright.model.moe import Moe
from meshwright.spec.lora import LoraSpec
from meshwright.spec.parameters import Parameter


class LoraLinear(Linear):
    """x (B, T, I) -> W x + bias + scale B A dropout(x), A (r, I) being in `lora_a`, B (O, r) in `lora_b`.

    Without `enabled` it is W x + bias.
    """

    def __init__(self, inputs: int, outputs: int, bias: bool, lora: LoraSpec, dropout: Dropout) -> None:
        super().__init__(inputs, outputs, bias)
        self.scale, self.dropout, self.enabled = lora.scale, dropout, True
        self.lora_a = Linear(inputs, lora.rank, False)
        self.lora_b = Linear(lora.rank, outputs, False)

    def matrix(self) -> Tensor:
        return merged(self.weight, self.lora_a.weight, self.lora_b.weight, self.scale)

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y + self.lora_b(self.scale * self.lora_a(self.dropout(x))) if self.enabled else y


def attach_adapters(decoder: Decoder, lora: LoraSpec | None, keys: TokenKeys | None = None) -> Decoder:
    """Give the layers and experts that `lora` names adapters, which have no values yet; returns the decoder.

    Weights and biases stay the same parameters. What adapters drop of their inputs follows from `keys`;
    without these nothing is dropped.
    """
    keys = keys or TokenKeys()
    for path, linear in [*decoder.named_modules()] if lora is not None else ():
        if isinstance(linear, Experts) and lora is not None:
            _attach_to_experts(decoder.get_submodule(path.rpartition(".")[0]), linear, path, lora, keys)
        if type(linear) is not Linear or lora is None:
            continue
        if not lora.adapts(Parameter(f"{path}.weight", tuple(linear.weight.shape))):
            continue
        outputs, inputs = linear.weight.shape
        with linear.weight.device:
            dropout = Dropout(lora.dropout, f"{path}.weight", keys)
            adapted = LoraLinear(inputs, outputs, linear.bias is not None, lora, dropout)
        adapted.weight, adapted.bias = linear.weight, linear.bias
        adapted.to(linear.weight.dtype).train(linear.training)
        parent, _, name = path.rpartition(".")
        setattr(decoder.get_submodule(parent), name, adapted)
    return decoder


def _attach_to_experts(
    mixture: nn.Module, experts: Experts, path: str, lora: LoraSpec, keys: TokenKeys
) -> None:
    """Give the experts' matrices that `lora` names adapters, and their mixture the keys of dropout."""
    for name, weight in [*experts.named_parameters(recurse=False)]:
        if lora.adapts(Parameter(f"{path}.{name}", tuple(weight.shape), expert=True)):
            with weight.device:
                dropout = ExpertDropout(lora.dropout, f"{path}.{name}")
                adapter = ExpertAdapter(weight, lora.rank, lora.scale, dropout, experts.hooks)
            setattr(experts, f"{name}_adapter", adapter.to(weight.dtype).train(experts.training))
            assert isinstance(mixture, Moe)
            mixture.keys = keys


@contextmanager
def adapters_off(decoder: Decoder) -> Iterator[None]:
    """Compute with the model without its adapters, which keep their values."""
    adapted = [each for each in decoder.modules() if isinstance(each, LoraLinear | ExpertAdapter)]
    for module in adapted:
        module.enabled = False
    try:
        yield
    finally:
        for module in adapted:
            module.enabled = True


def merged(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """W + scale B A (O, I), or of each expert (E, O, I), summed in at least fp32, in the format of W."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    add = torch.addmm if weight.dim() == 2 else torch.baddbmm
    return add(weight.to(wide), b.to(wide), a.to(wide), alpha=scale).to(weight.dtype)
