"""Adapters of low rank in a decoder (Hu et al. 2021, LoRA), with magnitudes of rows (Liu et al. 2024, DoRA),
and weights with adapters merged into them.

Shapes: I inputs and O outputs of a linear layer, r the rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.model.decoder import Decoder
from meshwright.model.expert_lora import ExpertAdapter
from meshwright.model.experts import Experts
from meshwright.model.linear import Linear
from meshwright.model.lora_dropout import Dropout, ExpertDropout, TokenKeys
from meshwright.model.moe import Moe
from meshwright.spec.lora import LoraSpec
from meshwright.spec.parameters import Parameter
from meshwright.spec.tiling import Tiling, tiling

Total = Callable[[Tensor], Tensor]
"""Sums what each rank has of a row: the squares (O,) of its part -> those of the whole row."""


class LoraLinear(Linear):
    """x (B, T, I) -> W x + bias + scale B A dropout(x), A (r, I) being in `lora_a`, B (O, r) in `lora_b`.

    Without `enabled` it is W x + bias.
    """

    rescales = False
    """True if W x is changed, too, so that the layer needs W dropout(x)."""

    def __init__(self, inputs: int, outputs: int, bias: bool, lora: LoraSpec, dropout: Dropout) -> None:
        super().__init__(inputs, outputs, bias)
        self.scale, self.dropout, self.enabled = lora.scale, dropout, True
        self.lora_a = Linear(inputs, lora.rank, False)
        self.lora_b = Linear(lora.rank, outputs, False)

    def matrix(self) -> Tensor:
        return merged(self.weight, self.lora_a.weight, self.lora_b.weight, self.scale)

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if not self.enabled:
            return y
        dropped = self.dropout(x)
        added = self.lora_b(self.scale * self.lora_a(dropped))
        base = F.linear(dropped, self.weight, self.bias) if self.rescales and dropped is not x else y
        return self.joined(y, added, base)

    def joined(
        self, y: Tensor, added: Tensor, base: Tensor, total: Total = lambda squares: squares
    ) -> Tensor:
        """The layer's outputs, of y = W x + bias, of what A and B add, and of `base` = W dropout(x) + bias,
        which is y itself where nothing is dropped."""
        return y + added


class DoraLinear(LoraLinear):
    """x (B, T, I) -> W x + bias + (g - 1) W d + g scale B A d, with d = dropout(x), g = m / |W + scale B A|.

    The lengths m (O,) of the rows are in `lora_magnitude`; those of W + scale B A have no gradient (Liu et
    al. 2024, DoRA, section 4.3). Without dropout it is g (W + scale B A) x + bias. All is as in PEFT.
    """

    rescales = True

    def __init__(self, inputs: int, outputs: int, bias: bool, lora: LoraSpec, dropout: Dropout) -> None:
        super().__init__(inputs, outputs, bias, lora, dropout)
        self.lora_magnitude = _Magnitudes(outputs)

    def matrix(self) -> Tensor:
        a, b = self.lora_a.weight, self.lora_b.weight
        return merged(self.weight, a, b, self.scale, self.lora_magnitude.weight)

    def joined(
        self, y: Tensor, added: Tensor, base: Tensor, total: Total = lambda squares: squares
    ) -> Tensor:
        here = squares_of_rows(self.weight, self.scale, self.lora_a.weight, self.lora_b.weight)
        factor = _quotient(self.lora_magnitude.weight, total(here).sqrt())  # in fp32: it is close to one
        if self.bias is None:
            changed = (factor * (base + added)).to(y.dtype)
        else:
            changed = (factor * (base - self.bias + added)).to(y.dtype) + self.bias
        return changed if base is y else changed + (y - base)


class _Magnitudes(nn.Module):
    """The lengths of a layer's rows, without values yet."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs))


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
            kind = DoraLinear if lora.dora else LoraLinear
            adapted = kind(inputs, outputs, linear.bias is not None, lora, dropout)
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


def merged(weight: Tensor, a: Tensor, b: Tensor, scale: float, magnitude: Tensor | None = None) -> Tensor:
    """W + scale B A (O, I), or of each expert (E, O, I), with rows of the lengths `magnitude` (O,) where
    these are given; computed in at least fp32, in the format of W."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    add = torch.addmm if weight.dim() == 2 else torch.baddbmm
    found = add(weight.to(wide), b.to(wide), a.to(wide), alpha=scale)
    if magnitude is not None:
        found *= _quotient(magnitude.to(wide), found.norm(dim=-1)).unsqueeze(-1)
    return found.to(weight.dtype)


@torch.no_grad()
def squares_of_rows(
    weight: Tensor, scale: float = 0.0, a: Tensor | None = None, b: Tensor | None = None
) -> Tensor:
    """The squares (O,) of the lengths of the rows of W + scale B A, or of W alone, in at least fp32."""
    wide, count = torch.promote_types(weight.dtype, torch.float32), _rows_at_a_time(weight.shape[1])
    found: list[Tensor] = []
    for start in range(0, len(weight), count):
        rows = weight[start : start + count].to(wide)
        if a is not None and b is not None:
            # Policies of recomputation save the results of addmm, which none reads again here.
            some = b[start : start + count].to(wide).unsqueeze(0), a.to(wide).unsqueeze(0)
            rows = torch.baddbmm(rows.unsqueeze(0), *some, alpha=scale).squeeze(0)
        found.append(rows.norm(dim=-1).square())
    return torch.cat(found)


def _rows_at_a_time(columns: int) -> int:
    """Rows of so many columns whose lengths are taken at a time; a compiled block knows one size only."""
    elements = Tiling.row_elements if torch.compiler.is_compiling() else tiling().row_elements
    return max(1, elements // columns)


def _quotient(magnitude: Tensor, lengths: Tensor) -> Tensor:
    """Magnitudes over the lengths of rows, 0 for rows that are 0."""
    return magnitude.to(lengths.dtype) / lengths.clamp_min(torch.finfo(lengths.dtype).tiny)
