"""Adapters of low rank of routed experts (Hu et al. 2021, LoRA): an A and a B for each.

Shapes: R rows, which are sorted by expert, E experts on this rank, I inputs and O outputs of their matrices,
r the rank. Products with A and B are grouped as those of the experts (`model/grouped_mm.py`). The backward
computes A x again, which is little beside the products of the experts, and draws again what is dropped, so
that nothing is kept for it but the keys of the rows' tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from meshwright.model.grouped_mm import grouped_mm
from meshwright.model.hooks import ExpertsHooks
from meshwright.model.lora_dropout import ExpertDropout
from meshwright.model.token_dispatcher import RowGroups

Pair = tuple[Tensor, Tensor, nn.Parameter]
"""(gradients of rows (R, O), inputs of rows (R, I), the matrices (E, O, I) between them)."""


class NoAdapter:
    """The adapter of matrices that have none: it adds nothing."""

    @property
    def factors(self) -> Sequence[nn.Parameter]:
        """The parameters whose gradients are those of `pairs`."""
        return ()

    def add_(self, y_RO: Tensor, x_RI: Tensor, groups: RowGroups) -> None:
        """Add the adapter's share for rows x to the rows y."""

    def input_gradient_(self, grad_RI: Tensor, grad_RO: Tensor, groups: RowGroups) -> Tensor | None:
        """Add to the gradient of x what comes through the adapter; returns the gradient (R, r) of A x."""
        return None

    def pairs(self, grad_RO: Tensor, x_RI: Tensor, at_a: Tensor | None, groups: RowGroups) -> Sequence[Pair]:
        """The operands of the gradients of A and B, where `at_a` is what `input_gradient_` returned."""
        return ()


NO_ADAPTER = NoAdapter()


class ExpertAdapter(nn.Module, NoAdapter):
    """Adds scale B A dropout(x) to each expert's rows: A (E, r, I) is `lora_a.weight`, B (E, O, r)
    `lora_b.weight`.

    Without `enabled` it adds nothing, in a forward without gradients.
    """

    def __init__(
        self, weight_EOI: Tensor, rank: int, scale: float, dropout: ExpertDropout, hooks: ExpertsHooks
    ) -> None:
        super().__init__()
        experts, outputs, inputs = weight_EOI.shape
        self.scale, self.enabled, self.dropout, self.hooks = scale, True, dropout, hooks
        self.inputs = inputs
        self.lora_a, self.lora_b = (
            _ExpertMatrices(experts, rank, inputs),
            _ExpertMatrices(experts, outputs, rank),
        )

    @property
    def factors(self) -> Sequence[nn.Parameter]:
        return self.lora_a.weight, self.lora_b.weight

    def add_(self, y_RO: Tensor, x_RI: Tensor, groups: RowGroups) -> None:
        if self.enabled:
            low = self._low(self._dropped(x_RI, groups), groups)
            grouped_mm(low, self.lora_b.weight.detach(), groups, onto=y_RO)

    def input_gradient_(self, grad_RI: Tensor, grad_RO: Tensor, groups: RowGroups) -> Tensor | None:
        a, b = (factor.detach() for factor in self.factors)
        at_a = grouped_mm(grad_RO, b.mT, groups).mul_(self.scale)
        if (kept := self._kept(grad_RI, groups)) is None:
            grouped_mm(at_a, a.mT, groups, onto=grad_RI)
        else:
            grad_RI.addcmul_(grouped_mm(at_a, a.mT, groups), kept)
        return at_a

    def pairs(self, grad_RO: Tensor, x_RI: Tensor, at_a: Tensor | None, groups: RowGroups) -> Sequence[Pair]:
        assert at_a is not None
        x_RI = self._dropped(x_RI, groups)
        of_b = grad_RO, self._low(x_RI, groups), self.lora_b.weight
        return (at_a, x_RI, self.lora_a.weight), of_b

    def _low(self, x_RI: Tensor, groups: RowGroups) -> Tensor:
        """scale A x (R, r)."""
        return grouped_mm(x_RI, self.lora_a.weight.detach(), groups).mul_(self.scale)

    def _dropped(self, x_RI: Tensor, groups: RowGroups) -> Tensor:
        return x_RI if (kept := self._kept(x_RI, groups)) is None else x_RI * kept

    def _kept(self, x_RI: Tensor, groups: RowGroups) -> Tensor | None:
        """Factors (R, I) on the adapter's input; None where nothing is dropped."""
        here = x_RI.shape[1]
        channel = self.hooks.slice * here if here < self.inputs else 0
        return self.dropout.factors(x_RI, groups, (self.hooks.group * len(groups.ends), channel))


class _ExpertMatrices(nn.Module):
    """A matrix for each expert, without values yet."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape))
