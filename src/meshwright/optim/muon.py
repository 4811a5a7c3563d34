"""Muon: momentum whose matrices are orthogonalised whole, however layouts cut them (Jordan et al. 2024).

It updates the matrices of blocks, each expert's too; the embedding, the head, norms and biases are AdamW's.
The step of a matrix of r x c is scaled by 0.2 sqrt(max(r, c)), so that its size is that of AdamW's, whose
`lr` and `weight_decay` then hold (Liu et al. 2025, arXiv 2502.16982).

Ranks that share a unit's storage deal its matrices out: each gets all rows of its own from the others, in one
all-to-all, and returns the rows of the result in another. Tensor ranks gather what they have of these.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from math import prod
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.comm.collectives import start_all_gather, start_all_to_all
from meshwright.comm.mesh import Axis, Mesh
from meshwright.optim.offload import MomentMemory
from meshwright.optim.optimiser import AdamW, FlatPart, cuts_of
from meshwright.parallel.data_parallel import DataParallel
from meshwright.parallel.flat_param import ParamSlot
from meshwright.parallel.fsdp_unit import Unit
from meshwright.spec import RunSpec

COEFFICIENTS = 3.4445, -4.775, 2.0315
"""Factors of x, x^3 and x^5 in each Newton-Schulz step. Source: Jordan et al. 2024."""
STEPS = 5
EPS = 1e-7
"""Added to the norm that a matrix is divided by."""
RMS = 0.2
"""Root mean square of AdamW's steps. Source: Liu et al. 2025."""


def orthogonalised(matrices: Tensor) -> Tensor:
    """Matrices (..., r, c) with all singular values near 1: some Newton-Schulz steps, without an SVD.

    Those in fp32 are computed in bf16 on a GPU, as by Jordan et al. 2024.
    """
    a, b, c = COEFFICIENTS
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    if x.is_cuda and x.dtype is torch.float32:
        x = x.bfloat16()
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + EPS)
    for _ in range(STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if tall else x).to(matrices.dtype)


class _Matrix(NamedTuple):
    """A matrix of a unit, as this rank stores it."""

    slot: ParamSlot
    start: int
    """Its place in the unit's flat buffers."""
    part: tuple[int, int]
    """Rows, padding included, and columns of each rank that shares the storage."""
    rows: int
    """Rows of all of them, without padding."""

    @property
    def size(self) -> int:
        """Elements of this rank's rows, padding included."""
        return prod(self.part)


def matrices_of(unit: Unit) -> list[_Matrix]:
    """The matrices of a unit of a block, in the order of its buffers; none of the embedding and the head."""
    found = []
    for slot in unit.slots:
        if not (slot.decay and slot.key.startswith("blocks.")):
            continue
        shape, dim = slot.part, slot.dim
        count = prod(shape[:dim])  # experts
        part = shape[dim], prod(shape[dim + 1 :])
        rows = slot.piece.local_shape[dim]
        found += [_Matrix(slot, slot.start + k * prod(part), part, rows) for k in range(count)]
    return found


class _Exchange:
    """Whole matrices of a unit's flat buffers, dealt to the ranks that share its storage."""

    def __init__(self, unit: Unit, mesh: Mesh, matrices: Sequence[_Matrix]) -> None:
        self.unit = unit
        self.axis: Axis | None = unit.shards
        ranks, rank = (unit.shards.size, unit.shards.rank) if unit.shards else (1, 0)
        # The largest first, each to the rank with least, by sizes that all ranks know.
        loads, self.dealt = [0] * ranks, list[list[_Matrix]]([] for _ in range(ranks))
        for matrix in sorted(matrices, key=lambda each: -each.size):
            owner = loads.index(min(loads))
            loads[owner] += matrix.size
            self.dealt[owner].append(matrix)
        self.own, self.loads, self.rank, self.ranks = self.dealt[rank], loads, rank, ranks
        self.tensor = mesh.expert_tensor if matrices[0].slot.piece.routed else mesh.tensor

    def update(self, flat: Tensor) -> None:
        """Replace the matrices in `flat` by orthogonal ones, each scaled."""
        listed = [matrix for dealt in self.dealt for matrix in dealt]
        mine = torch.cat([flat[m.start : m.start + m.size] for m in listed])
        whole = self._whole(mine)
        starts = [0, *accumulate(m.size for m in self.own)]
        pieces = [
            whole[:, start : start + m.size].reshape(-1, m.part[1])[: m.rows]
            for m, start in zip(self.own, starts, strict=False)
        ]
        for matrix, start, result in zip(self.own, starts, self._steps(pieces), strict=False):
            padded = F.pad(result, (0, 0, 0, self.ranks * matrix.part[0] - matrix.rows))
            whole[:, start : start + matrix.size] = padded.view(self.ranks, matrix.size)
        back = self._returned(whole, mine)
        for matrix, start in zip(listed, [0, *accumulate(m.size for m in listed)], strict=False):
            flat[matrix.start : matrix.start + matrix.size] = back[start : start + matrix.size]

    def _whole(self, mine: Tensor) -> Tensor:
        """(ranks, elements of this rank's own matrices): the parts that all ranks have of them."""
        if self.axis is None or self.ranks == 1:
            return mine.view(1, -1).clone()
        received = mine.new_empty(self.ranks * self.loads[self.rank])
        splits = [self.loads[self.rank]] * self.ranks
        start_all_to_all(received, mine, self.axis, splits, self.loads).wait()
        return received.view(self.ranks, self.loads[self.rank])

    def _returned(self, whole: Tensor, like: Tensor) -> Tensor:
        """This rank's parts of all results, in the order in which they were sent."""
        if self.axis is None or self.ranks == 1:
            return whole.view(-1)
        received = torch.empty_like(like)
        splits = [self.loads[self.rank]] * self.ranks
        start_all_to_all(received, whole.reshape(-1), self.axis, self.loads, splits).wait()
        return received

    def _steps(self, pieces: Sequence[Tensor]) -> Iterator[Tensor]:
        """This tensor rank's piece of the step of each matrix."""
        split = [m.slot.piece.parts > 1 for m in self.own]
        gathered = self._gathered([piece for piece, cut in zip(pieces, split, strict=True) if cut])
        for matrix, piece, cut in zip(self.own, pieces, split, strict=True):
            whole, held = piece, matrix.slot.piece
            dim = held.dim - (len(held.global_shape) - 2)
            if cut:
                every = next(gathered)[:: held.copies]
                whole = torch.cat([*every], dim)
            step = orthogonalised(whole) * (RMS * max(whole.shape) ** 0.5)
            yield step.narrow(dim, held.first, held.size) if cut else step

    def _gathered(self, pieces: Sequence[Tensor]) -> Iterator[Tensor]:
        """(tensor ranks, r, c) of each piece."""
        if not pieces:
            return
        axis, sent = self.tensor, torch.cat([piece.reshape(-1) for piece in pieces])
        every = sent.new_empty(axis.size * len(sent))
        start_all_gather(every, sent, axis).wait()
        parts = every.view(axis.size, -1).split([piece.numel() for piece in pieces], 1)
        for piece, part in zip(pieces, parts, strict=True):
            yield part.view(axis.size, *piece.shape)


class Muon(AdamW):
    """Muon for the matrices of blocks, AdamW for all other parameters."""

    @staticmethod
    def begins(moment: str, unit: Unit) -> int:
        """Where the buffer of a moment begins in those of a unit: matrices have no second one."""
        return unit.decayed if moment == "exp_avg_sq" and matrices_of(unit) else 0

    def __init__(self, states: DataParallel, spec: RunSpec, memory: MomentMemory) -> None:
        super().__init__(states, spec, memory)
        self.exchanges: list[tuple[list[FlatPart], _Exchange]] = []
        for unit in states.trained:
            if matrices := matrices_of(unit):
                parts = [part for part in self.parts if part.unit is unit and len(part.moments) == 1]
                self.exchanges.append((parts, _Exchange(unit, states.mesh, matrices)))

    @torch.no_grad()
    def step(self, rate: float, factor: float = 1.0) -> None:
        """Update the stored parameters from the units' gradients times `factor`, at learning rate `rate`."""
        for parts, exchange in self.exchanges:
            assert exchange.unit.gradient is not None
            step = torch.empty_like(exchange.unit.gradient[: exchange.unit.decayed])
            most = self.staging.length if self.staging else len(step)
            cuts = [cut for part in parts for cut in cuts_of(part, most)]
            for (part, start, end), (momentum,) in zip(cuts, self.moments_at(cuts), strict=True):
                gradient = part.gradient[start:end].mul_(factor)
                momentum.lerp_(gradient, 1 - self.train.beta1)
                nesterov = step[part.place][start:end]
                torch.lerp(gradient, momentum, self.train.beta1, out=nesterov)
            exchange.update(step)
            for part in parts:
                own_rate = rate * part.group.factor
                for _, flat, _, own in self.pieces([part._replace(moments=())], step[part.place]):
                    flat.mul_(1 - own_rate * part.group.decay).sub_(own, alpha=own_rate)
        super().step(rate, factor)
