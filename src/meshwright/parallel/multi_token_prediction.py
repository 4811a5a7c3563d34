"""The loss of further tokens (`model/multi_token_prediction.py`) as a part of a training step.

Splits        nothing of its own: the layer that predicts further tokens is on the last stage of a pipeline,
              which then holds the embedding, too, as with tied ends; all axes split it as any block.
Wire          what a block, a lookup and a head send, each microbatch; in a pipeline the gradient of the
              embedding between its ends, once a step. Two numbers more of those that a step sums.

Further tokens are taken of whole sequences, before context ranks divide them. Their loss is a mean over their
own targets in the global batch; its gradient is attached to the loss of the next token, whose value does not
change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from meshwright.comm.mesh import Mesh
from meshwright.data.loader import Batch
from meshwright.kernels.with_backward import with_backward
from meshwright.model.hooks import next_token_alone
from meshwright.model.multi_token_prediction import FurtherTokens, further_tokens
from meshwright.parallel.context_parallel import share
from meshwright.parallel.loss_normalization import count_targets, weight_of_a_target
from meshwright.parallel.step_part import StepBegin, StepPart
from meshwright.spec import RunSpec


class FurtherLoss(StepPart):
    """The part of a step without further tokens."""

    numbers = 0
    """Numbers that a step sums over all ranks because of it."""
    mean: float | None = None
    """The mean loss of a further token in the last step, without its factor; None without further tokens."""

    def attach(self, loss: Tensor, compute: Callable[[float], Tensor]) -> Tensor:
        """The loss with the gradient of the loss of further tokens (`Hooks.further`)."""
        return next_token_alone(loss, compute)

    def own_targets(self, batch: Batch) -> list[int]:
        """The further targets whose loss this rank counts in a batch, in a list that is empty without any."""
        return []

    def expect_targets(self, targets: Sequence[float]) -> None:
        """Take `own_targets` of the batch that comes next, summed over all ranks."""

    def own_numbers(self, factor: float, following: Batch | None) -> list[Tensor]:
        """This rank's share of `numbers`: the step's loss times the gradients' `factor`, and the targets of
        the batch that follows."""
        return []

    def take(self, numbers: Sequence[float]) -> None:
        """Take `own_numbers`, summed over all ranks."""


class MultiTokenPrediction(FurtherLoss):
    """The loss of further tokens on one rank, `factor` times whose mean joins that of the next token.

    `scale` is the factor of a target's loss in the step's objective. It is no power of two, so half formats
    round the logits' gradients by up to 2^-9, at targets mostly alike: as if `factor` were so far off.
    """

    numbers = 2

    def __init__(self, mesh: Mesh, factor: float, counts: bool) -> None:
        self._mesh, self._factor, self.scale, self._expected = mesh, factor, 0.0, 0.0
        self._counts = counts and mesh.tensor.rank == 0
        """True for the one tensor rank that counts losses, where there are any."""
        self._losses: tuple[Tensor, ...] = ()
        """Those of this step's microbatches."""

    def with_answers(self, batch: Batch, own: Batch) -> Batch:
        """This rank's tokens of a batch with those after them."""
        return replace(
            own, further=self._own(batch).each(lambda x: x.to(self._mesh.device, non_blocking=True))
        )

    def begin_step(self, begin: StepBegin) -> None:
        """Weigh the losses of the step's further targets, and begin to add them up."""
        self.scale = self._factor * weight_of_a_target(int(self._expected)) * begin.loss_factor
        self._losses = ()

    def constants(self) -> float:
        """The factor of a further target's loss."""
        return self.scale

    def attach(self, loss: Tensor, compute: Callable[[float], Tensor]) -> Tensor:
        """The loss with the gradient of the loss of further tokens (`Hooks.further`)."""
        further = compute(self.scale)
        self._losses = (*self._losses, further.detach())
        return with_backward(lambda loss, _: loss.view_as(loss), lambda grad: (grad, grad), loss, further)

    def own_targets(self, batch: Batch) -> list[int]:
        """The further targets whose loss this rank counts in a batch."""
        return [count_targets(self._own(batch).targets) if self._counts else 0]

    def expect_targets(self, targets: Sequence[float]) -> None:
        """Take the targets of the batch that comes next."""
        (self._expected,) = targets

    def own_numbers(self, factor: float, following: Batch | None) -> list[Tensor]:
        """The step's loss on this rank, and the targets of the batch that follows."""
        targets = self.own_targets(following) if following is not None else [0]
        losses = [each.double() for each in self._losses] if self._counts else []
        counted = torch.tensor([0.0, *targets], dtype=torch.float64).to(self._mesh.device, non_blocking=True)
        if losses:
            counted[0] += torch.stack(losses).sum() * factor
        return [counted]

    def take(self, numbers: Sequence[float]) -> None:
        """Take the loss of all ranks, and their targets in the batch that follows."""
        loss, self._expected = numbers
        self.mean = loss / self._factor

    def _own(self, batch: Batch) -> FurtherTokens:
        whole = further_tokens(batch.tokens, batch.targets, batch.documents)
        return whole.each(lambda x: share(x, self._mesh.context))

    def of_gradients(self) -> tuple[list[object], list[Tensor]]:
        """The losses, which become more while gradients are computed."""
        return [self], []


def further_loss_of(spec: RunSpec, mesh: Mesh, counts: bool) -> FurtherLoss:
    """The loss of further tokens of a run, if its model predicts any. `counts` is True for a rank with the
    head."""
    if spec.model.mtp_num_layers == 0:
        return FurtherLoss()
    return MultiTokenPrediction(mesh, spec.train.mtp_loss_scaling_factor, counts)
