"""A caller's loss of the log-probabilities of whole samples, whatever layout computes them.

Splits        nothing: a microbatch's log-probabilities are put together to whole samples on every context
              rank of the last stage, where each calls the function.
Wire          all-gather over cp: B T numbers of 4 bytes (8 in fp64) each microbatch, forward only, and as
              many entropies where they are asked for.

The function returns a SUM over its samples, which `train/accumulation.py` divides once by the count of the
global batch. Each context rank takes of the gradient what belongs to its own tokens, and the first of them
counts the loss.

Shapes: B samples of a microbatch, T tokens of each as the caller gave them, S with padding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.comm.mesh import Axis
from meshwright.kernels.with_backward import with_backward
from meshwright.model.log_probs import LogProbLoss
from meshwright.parallel.context_parallel import whole_sequences
from meshwright.spec import UserError

LossFn = Callable[..., Tensor]
"""(log-probabilities (B, T), batch) -> the SUM of the samples' losses, a scalar; with entropies (B, T) as a
third argument, where they are asked for. `batch` has the rows of the caller's tensors."""


@dataclass(frozen=True)
class SampleLogProbs(LogProbLoss):
    """Log-probabilities of the tokens of samples, (1, B, T), and with `entropy` entropies behind them.

    They stand at the place of the token that was predicted. `rows` are tensors by sample, whose number is
    that of the samples without padding, and `length` the tokens of each.
    """

    axis: Axis
    length: int
    rows: Mapping[str, Tensor]
    entropy: bool = False

    def each(self, change: Callable[[Tensor], Tensor], /) -> Self:
        """A loss of the same kind with `change` applied to the tensors by sample."""
        return replace(self, rows={name: change(value) for name, value in self.rows.items()})

    def loss(self, log_probs_BT: Tensor, entropies_BT: Tensor, scale: float) -> Tensor:
        """The log-probabilities themselves, without gradients."""
        found = [log_probs_BT, entropies_BT] if self.entropy else [log_probs_BT]
        return torch.stack([self._of_samples(each) for each in found])

    def _of_samples(self, part_BT: Tensor) -> Tensor:
        """Numbers of this rank's places, as those of the samples' tokens (B, T): each one place later."""
        whole_BS = F.pad(whole_sequences(part_BT, self.axis)[:, :-1], (1, 0))
        return whole_BS[: len(self.rows["input_ids"]), : self.length]


@dataclass(frozen=True)
class SampleLoss(SampleLogProbs):
    """The loss of `function`, of samples' log-probabilities; `others` is what a batch has by no sample."""

    function: LossFn = lambda log_probs, _batch: log_probs.sum()
    others: Mapping[str, Any] | None = None

    def loss(self, log_probs_BT: Tensor, entropies_BT: Tensor, scale: float) -> Tensor:
        """`scale` times what the function returns; on all context ranks but the first of value 0.

        Raises `UserError` for a result that is no scalar, or does not depend on the log-probabilities.
        """
        given = [log_probs_BT, entropies_BT] if self.entropy else [log_probs_BT]
        log_probs, *entropies = map(self._of_samples, given)
        if not len(log_probs):  # padding alone; its backward takes part in the messages of the others'
            return log_probs_BT.sum() * 0
        found = self.function(log_probs, {**(self.others or {}), **self.rows}, *entropies)
        if not isinstance(found, Tensor) or found.numel() != 1:
            kind = f"a tensor of shape {list(found.shape)}" if isinstance(found, Tensor) else repr(found)
            raise UserError(f"loss_fn: returned {kind}; return the sum of the samples' losses, a scalar")
        if torch.is_grad_enabled() and not found.requires_grad:
            raise UserError(
                "loss_fn: returned a number without a gradient; compute it from the log-probabilities that "
                "it is given, and do not detach them"
            )
        scaled = found.view(()) * scale
        if self.axis.rank == 0:
            return scaled
        counted_elsewhere: Tensor = with_backward(torch.zeros_like, lambda grad: grad, scaled)
        return counted_elsewhere
