"""The square of the gradient's norm, of what one rank counts, without a wait for the device.

Each element of every gradient counts on one rank only (`Unit.counted_gradients`), so the sum of the squares
over all ranks is that of the whole model. `train/step.py` sums over the ranks and clips (`Trainer.totals`,
`Trainer.apply`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from meshwright.spec.tiling import tiling


def norms(flats: Sequence[Tensor], exact: bool = False) -> list[Tensor]:
    """Norms of parts of flat tensors, which together are all elements, as tensors of one dim.

    Devices other than a CPU take few kernels for any number of tensors. On a CPU norms of rows of 1,024
    elements are taken in the format of the elements, which is ten times as fast as converting each element.
    The norm of a row of fp32 may be beyond fp32's range, unless `exact` converts every element.
    """
    flats = [flat for flat in flats if len(flat)]
    if not flats:
        return []
    if exact:
        return [torch.linalg.vector_norm(flat, dtype=torch.float64).view(1) for flat in flats]
    if flats[0].device.type != "cpu":
        return [torch.stack(torch._foreach_norm(flats, 2, dtype=torch.float64))]
    return row_norms(flats)


def row_norms(flats: Sequence[Tensor]) -> list[Tensor]:
    """The norms of the rows of flat tensors, and the elements beyond whole rows as they are."""
    row, found, rests = tiling().norm_row, [], []
    for flat in flats:
        rows, rest = flat.split([len(flat) // row * row, len(flat) % row])
        if len(rows):
            found.append(torch.linalg.vector_norm(rows.view(-1, row), dim=1))
        if len(rest):
            rests.append(rest)
    return found + rests


def sum_of_squares(parts: Sequence[Tensor], device: torch.device) -> Tensor:
    """The sum of the squares of all numbers of `norms`, a scalar in float64 on `device`."""
    if not parts:
        return torch.zeros((), dtype=torch.float64, device=device)
    joined = torch.cat(list(parts)).double()
    return torch.dot(joined, joined)
