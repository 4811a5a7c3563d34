"""Gradients of several batches before one update, as those of one batch that has all their samples.

Each batch leaves sums; the division is by the counts of all batches together, once, at the update. Losses
that are no sums over targets (of the balance of experts, of further tokens) are means over each batch,
weighted by its count.
"""

from __future__ import annotations

import torch
from torch import Tensor

from meshwright.data.loader import Batch
from meshwright.parallel.loss_normalization import power_and_rest, weight_of_a_count
from meshwright.train.step import Trainer
from meshwright.train.step_result import StepResult


class Accumulation:
    """The gradients of a trainer between two updates; `count` is what their sum is divided by.

    From the second batch on, the sharded gradients of those before are held beside its own.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.batches, self.count, self._power = 0, 0.0, 1.0
        self._loss = torch.zeros((), dtype=torch.float64, device=trainer.mesh.device)

    def add(self, own: Batch, sequences: int, count: float, micro_batch: int | None = None) -> Tensor:
        """Forward and backward of this rank's tokens of a batch of `sequences` samples over all ranks.

        `count` is that of all ranks, `micro_batch` as in `Trainer.backward`. Returns this rank's share of the
        sum of losses divided by the count, a scalar in float64 on the device.
        """
        trainer, weight = self._trainer, weight_of_a_count(count)
        held, counted = None, [each.clone() for each in trainer.balance.counted()]
        if self.batches:
            held = trainer.states.take_gradients()
        else:
            self._power, _ = power_and_rest(weight)
        trainer.rest = weight / self._power
        loss = trainer.backward(own, sequences, self._power, micro_batch)
        if held is not None:
            new = trainer.states.take_gradients()
            torch._foreach_add_(held, new)
            trainer.states.put_gradients(held)
            for each, before in zip(trainer.balance.counted(), counted, strict=True):
                each += before
        self.batches, self.count = self.batches + 1, self.count + count
        self._loss += loss / weight
        return loss

    def apply(self, number: int, rate: float | None) -> StepResult:
        """Take step `number`, from 1, at the learning rate `rate` (by default the run's)."""
        trainer, weight = self._trainer, weight_of_a_count(self.count)
        trainer.rest = weight / self._power
        result = trainer.apply(trainer.sums(self._loss * weight), number, rate)
        self.clear()
        return result

    def drop(self) -> None:
        """Forget the gradients of all batches since the last step."""
        if self.batches:
            self._trainer.states.end_step()
            self.clear()

    def clear(self) -> None:
        """Begin with no batch."""
        self.batches, self.count = 0, 0.0
        self._loss = torch.zeros_like(self._loss)
