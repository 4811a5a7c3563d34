"""Maximal update parametrisation: initial values and learning rates that keep their effect as models widen.

Source: Yang et al. 2022, "Tensor Programs V" (arXiv 2203.03466), table 3, without multipliers. With
m = hidden / `model.mup_base_hidden`:

    parameters                        initial std     rate of AdamW, Lion     rate of Muon
    embedding, norms, biases          as at the base  as at the base          as at the base (AdamW's)
    matrices of blocks, experts' too  / sqrt(m)       / m                     / sqrt(m)
    head, routers, shared_gate        / m             / m                     / m

The head and routers map a width that grows to a number of outputs that does not, so the table's "output
weights" are both. A step of Muon has the spectral norm 0.2 sqrt(max(rows, columns)). One of
sqrt(rows / columns) keeps the change of activations (Yang et al. 2023, arXiv 2310.17813, condition 1), which
is less by sqrt(m) where both sides grow, and by m where only columns do.

The base is taken to have all widths divided by m (ffn, experts' ffn, heads, kv_heads), and the layers,
head_dim, number of experts and vocabulary of the model. As head_dim is that of the base, scores of attention
keep their factor 1/sqrt(head_dim); the paper's 1/head_dim is for one that grows.
"""

from __future__ import annotations

from meshwright.spec.architecture import Architecture
from meshwright.spec.errors import UserError
from meshwright.spec.optimisers import OptimiserKind
from meshwright.spec.sections import Sections


def init_factor(model: Architecture, name: str) -> float:
    """Factor on the standard deviation of a matrix's initial values."""
    if model.mup_base_hidden is None or name.startswith("embed."):
        return 1.0
    widening = model.hidden / model.mup_base_hidden
    return 1 / widening if _is_output(name) else widening**-0.5


def rate_factor(model: Architecture, optimiser: OptimiserKind, name: str, dims: int) -> float:
    """Factor on the learning rate of a parameter of `dims` dims."""
    if model.mup_base_hidden is None or dims < 2 or name.startswith("embed."):
        return 1.0
    widening = model.hidden / model.mup_base_hidden
    return widening**-0.5 if optimiser.orthogonalises and not _is_output(name) else 1 / widening


def _is_output(name: str) -> bool:
    """True for matrices whose outputs do not become more as the model widens."""
    return name == "head.weight" or name.endswith((".router.weight", ".shared_gate.weight"))


def widths_are_known(spec: Sections) -> None:
    """Each matrix is an input, a hidden or an output one, with sides that grow with hidden or not at all."""
    model = spec.model
    if model.mup_base_hidden is None:
        return
    what = f"model.mup_base_hidden: {model.mup_base_hidden}"
    if model.tied:
        raise UserError(
            f"{what} does not go with model.tied, as an embedding and a head have other initial values and "
            f"rates; give model.tied = false"
        )
    if model.mla is not None:
        raise UserError(
            f"{what} does not go with model.mla, as it is not known whether the ranks of latents grow with "
            f"model.hidden; leave it out, or give train.lr_factors"
        )
