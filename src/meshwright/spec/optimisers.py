"""Optimisers: what each keeps of a parameter, and the keys of `[train]` that it does not read.

Rules, the planner, checkpoints and training read this table. An optimiser is added by a row here, a class in
`optim/optimisers.py`, and the same update for one device in `verify/reference/optimisers.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from meshwright.spec.sharded_tensor import is_matrix

OptimiserName = Literal["adamw", "adamw8bit", "lion", "muon", "sgd"]


@dataclass(frozen=True)
class OptimiserKind:
    """One optimiser."""

    about: str
    """A few words with its source, for the help of `train.optimiser`."""
    moments: tuple[str, ...]
    """Names of its states of a parameter, as checkpoints call them."""
    matrix_moments: tuple[str, ...]
    """Names of its states of a matrix of a block: a beginning of `moments`."""
    orthogonalises: bool = False
    """True if the step of a matrix of a block is an orthogonal matrix, for which ranks gather whole ones."""
    eight_bit: bool = False
    """True if moments of matrices are kept as codes of 8 bits, with a scale for each block."""
    counts: bool = False
    """True if the device holds a count of updates for each run of parameters that have all moments."""
    unused: tuple[str, ...] = ()
    """Keys of `[train]` that have no effect with it."""

    def moments_of(self, parameter: str, dims: int) -> tuple[str, ...]:
        """Names of the states of one parameter."""
        of_block = parameter.startswith("blocks.") and is_matrix(parameter, dims)
        return self.matrix_moments if of_block else self.moments


_FIRST = ("exp_avg",)
_BOTH = ("exp_avg", "exp_avg_sq")

OPTIMISERS: dict[OptimiserName, OptimiserKind] = {
    "adamw": OptimiserKind("AdamW (Loshchilov & Hutter 2019)", _BOTH, _BOTH, counts=True),
    "adamw8bit": OptimiserKind(
        "AdamW with moments of matrices in 8 bits (Dettmers et al. 2022)",
        _BOTH,
        _BOTH,
        eight_bit=True,
        counts=True,
    ),
    "lion": OptimiserKind(
        "Lion (Chen et al. 2023), which takes an lr 3 to 10 times smaller, a weight_decay as much larger, "
        "and beta2 = 0.99",
        _FIRST,
        _FIRST,
        unused=("eps",),
    ),
    "muon": OptimiserKind(
        "Muon (Jordan et al. 2024) for the matrices of blocks and AdamW for the rest, with AdamW's lr, and "
        "beta1 = 0.95",
        _BOTH,
        _FIRST,
        orthogonalises=True,
        counts=True,
    ),
    "sgd": OptimiserKind("SGD with momentum beta1", _FIRST, _FIRST, unused=("beta2", "eps")),
}
"""Name -> optimiser, for each name that `train.optimiser` takes."""

assert set(OPTIMISERS) == set(get_args(OptimiserName))
