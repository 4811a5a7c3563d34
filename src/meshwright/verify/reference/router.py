"""Losses, statistics and bias of a router, from what the reference decoder returned, sequence by sequence.

Shapes: n sequences of T tokens, E experts, k experts of a token.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.spec import MoeSpec
from meshwright.verify.reference.decoder import ReferenceRouting


def router_losses(moe: MoeSpec, routing: ReferenceRouting) -> tuple[Tensor, Tensor]:
    """Balance loss (DeepSeek-AI 2024, DeepSeek-V3, equations 17 to 20) and z-loss (Zoph et al. 2022), each
    a mean over sequences without its factor."""
    balance, z = [], []
    for logits, scores, experts in zip(routing.logits, routing.scores, routing.experts, strict=True):
        share_of_copies = F.one_hot(experts, moe.experts).to(scores.dtype).sum((0, 1)) / experts.numel()
        mean_score = (scores / scores.sum(-1, keepdim=True)).mean(0)
        balance.append(moe.experts * (share_of_copies * mean_score).sum())
        z.append(logits.exp().sum(-1).log().square().mean())
    return torch.stack(balance).mean(), torch.stack(z).mean()


@torch.no_grad()
def router_statistics(moe: MoeSpec, routing: ReferenceRouting) -> dict[str, Tensor]:
    """Statistics by the names of `LayerBalance`'s fields, as float64 vectors; losses without a factor are
    0."""
    balance, z = router_losses(moe, routing)
    shares = routing.scores / routing.scores.sum(-1, keepdim=True)
    copies = expert_copies(moe, routing.experts)
    found = {
        "load": copies / copies.mean(),
        "dropped": (~routing.admitted).double().mean(),
        "entropy": -torch.xlogy(shares, shares).sum(-1).mean(),
        "aux_loss": balance if moe.aux_loss else torch.zeros_like(balance),
        "z_loss": z if moe.z_loss else torch.zeros_like(z),
    }
    return {name: value.reshape(-1).cpu() for name, value in found.items()}


def expert_copies(moe: MoeSpec, experts: Tensor) -> Tensor:
    """Number of copies of `experts` (n, T, k) for each expert (E,) in float64, dropped ones included."""
    return torch.stack([(experts == expert).sum() for expert in range(moe.experts)]).double()


def move_bias(moe: MoeSpec, experts: Tensor, bias: Tensor) -> None:
    """Move `bias` (E,) after a step with these experts (n, T, k): one step up where the load is below the
    mean, and down where it is above (Wang et al. 2024)."""
    counts = expert_copies(moe, experts)
    mean = float(counts.mean())
    for expert, count in enumerate(counts.tolist()):
        if count != mean:
            bias[expert] += moe.bias_rate if count < mean else -moe.bias_rate
