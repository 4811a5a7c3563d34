"""One training step: the same for every layout, one device included."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from meshwright.checkpoint.ranks import Ranks
from meshwright.data.loader import Batch
from meshwright.parallel.apply import initialise, parallelise
from meshwright.parallel.balance import LayerBalance
from meshwright.parallel.collectives import sum_scalars
from meshwright.parallel.context import share
from meshwright.parallel.data import MakeUnit
from meshwright.parallel.loss import count_targets, mean_over_targets, share_of_a_sequence
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.precision import LossScale
from meshwright.parallel.unit import Unit
from meshwright.spec import RunSpec
from meshwright.train.optimiser import Optimiser
from meshwright.train.schedule import learning_rate


@dataclass(frozen=True)
class Step:
    """What one step did. `loss` is in nats a token, over the global batch; `grad_norm` is before clipping."""

    loss: float
    grad_norm: float
    rate: float
    applied: bool
    """False when a gradient was not finite: then nothing was changed, on any rank."""


class Trainer:
    """A decoder, its states and its optimiser on one rank of a mesh."""

    def __init__(self, spec: RunSpec, mesh: Mesh, make_unit: MakeUnit = Unit) -> None:
        self.spec, self.mesh = spec, mesh
        self.decoder, self.states, self.balance, self.pipeline = parallelise(spec, mesh, make_unit)
        self.optimiser = Optimiser(self.states, spec.train)
        self.loss_scale = LossScale(spec.precision)

    def initialise(self) -> None:
        """Draw the initial weights."""
        initialise(self.states, self.spec.model, self.spec.train.seed)

    def gradients(self, batch: Batch) -> float:
        """Forward and backward of the step; leaves the summed gradients, returns the global mean loss."""
        batch = own_tokens(batch, self.mesh)
        (targets,) = sum_scalars([self._targets(batch)], self.mesh.data)
        losses: list[torch.Tensor] = []

        def objective(total: torch.Tensor) -> torch.Tensor:
            loss = mean_over_targets(total, int(targets))
            losses.append(loss.detach())
            return loss * self.loss_scale.value

        micros = list(microbatches(batch, self.spec.micro_batch, self.mesh.device))
        self.states.begin_step(len(micros))
        sequences = self.spec.batch_sequences
        self.balance.begin_step(self.loss_scale.value * share_of_a_sequence(sequences))
        self.pipeline.run(micros, objective)
        self.states.finish_step()
        self.balance.finish_step(sequences, self.spec.data.seq_len)
        (loss_sum,) = sum_scalars([math.fsum(map(float, losses))], self.mesh.data)
        return loss_sum

    def step(self, batch: Batch, number: int) -> Step:
        """Optimiser step `number` (from 1) on this rank's samples of the global batch."""
        return self.apply(self.gradients(batch), number)

    def apply(self, loss: float, number: int) -> Step:
        """Clip the gradients that `gradients` left, update the parameters, and drop the gradients."""
        scale = self.loss_scale.value
        norm = self.states.gradient_norm() / scale
        finite = math.isfinite(norm) and math.isfinite(loss)
        rate = learning_rate(self.spec.train, number)
        if finite:
            clip = self.spec.train.clip
            shrink = min(1.0, clip / (norm + 1e-6)) if clip is not None else 1.0
            self.states.scale_gradients(shrink / scale)
            self.optimiser.step(rate)
            self.balance.update()
        self.loss_scale.update(finite)
        self.states.end_step()
        return Step(loss, norm, rate, finite)

    def layers_balance(self) -> dict[int, LayerBalance]:
        """What the last step did in each layer with experts, of every stage: on the first rank, in order."""
        own = {layer: list(found) for layer, found in self.balance.found.items()}
        gathered = Ranks(self.mesh.control.group).gather(own if self.mesh.stage.rank == 0 else {})
        every = {int(layer): LayerBalance(*found) for part in gathered for layer, found in part.items()}
        return dict(sorted(every.items()))

    @torch.no_grad()
    def nll(self, batch: Batch) -> torch.Tensor:
        """(2,) in float64 on the device: the sum over this rank's targets of the negative log-likelihood in
        nats, and their number."""
        batch = own_tokens(batch, self.mesh)
        micros = list(microbatches(batch, self.spec.micro_batch, self.mesh.device))
        sums = [total.double() for total in self.pipeline.forward(micros)]
        count = torch.tensor(self._targets(batch), dtype=torch.float64, device=self.mesh.device)
        return torch.stack([torch.stack(sums).sum() if sums else torch.zeros_like(count), count])

    def _targets(self, batch: Batch) -> int:
        """Targets whose loss this rank computes."""
        return count_targets(batch.targets) if self.pipeline.has_end else 0


def own_tokens(batch: Batch, mesh: Mesh) -> Batch:
    """What a context rank computes on: its tokens of each sequence; the documents stay whole."""
    axis = mesh.context
    tokens, targets, positions = (share(x, axis) for x in (batch.tokens, batch.targets, batch.positions))
    return replace(batch, tokens=tokens, targets=targets, positions=positions)


def microbatches(batch: Batch, size: int, device: torch.device) -> Iterator[Batch]:
    """Each microbatch in order, on the device."""
    count = batch.tokens.shape[0]
    for start in range(0, count, size):
        yield batch.rows(start, min(start + size, count)).to(device)
