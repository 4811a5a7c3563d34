"""Reference of a router's losses, statistics and bias, computed per sequence and expert."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from meshwright.model.moe import Moe
from meshwright.model.router import Routing
from meshwright.spec import MoeSpec


class RouterReference:
    """One layer's routing of a whole batch on one device, written apart from `parallel/router_balance.py`."""

    def __init__(self, layer: int, mixture: Moe) -> None:
        self.layer, self.mixture, self.moe = layer, mixture, mixture.moe
        self._admit = mixture.hooks.admit
        mixture.hooks = replace(mixture.hooks, admit=self._observe)
        self._counts = torch.zeros(0)
        self.found: dict[str, Tensor] = {}

    def _observe(
        self, moe: MoeSpec, layer: int, routing: Routing, batch: int
    ) -> tuple[Tensor, Tensor | None]:
        self._routing = routing
        weights, self._admitted = self._admit(moe, layer, routing, batch)
        return weights, self._admitted

    def loss(self, sequences: int) -> Tensor:
        """This layer's auxiliary losses per sequence, a scalar to add to the mean loss; fills `found`."""
        moe, routing = self.moe, self._routing
        shares = routing.scores / routing.scores.sum(1, keepdim=True)
        chosen = torch.zeros_like(shares)
        for choice in range(moe.top_k):
            chosen[torch.arange(len(chosen)), routing.experts[:, choice]] = 1.0
        aux = z = shares.new_zeros(())
        for own, share, logits in zip(
            chosen.chunk(sequences), shares.chunk(sequences), routing.logits.chunk(sequences), strict=True
        ):
            aux = aux + moe.experts / moe.top_k * (own.mean(0) * share.mean(0)).sum() / sequences
            z = z + logits.exp().sum(1).log().square().mean() / sequences
        self._counts = chosen.sum(0)
        admitted = self._admitted
        dropped = 0.0 if admitted is None else float((~admitted).double().mean())
        found = {
            "load": self._counts / self._counts.mean(),
            "dropped": torch.tensor([dropped], dtype=torch.float64),
            "entropy": -(shares * shares.log()).sum(1).mean().reshape(1),
            "aux_loss": (aux if moe.aux_loss else torch.zeros_like(aux)).reshape(1),
            "z_loss": (z if moe.z_loss else torch.zeros_like(z)).reshape(1),
        }
        self.found = {f"blocks.{self.layer} {name}": value.detach().cpu() for name, value in found.items()}
        return moe.aux_loss * aux + moe.z_loss * z

    def move_bias(self) -> None:
        """A step up where the load is below the mean, and down where it is above."""
        bias, mean = self.mixture.router.bias, float(self._counts.mean())
        if bias is None:
            return
        for expert, count in enumerate(self._counts.tolist()):
            if count != mean:
                bias[expert] += self.moe.bias_rate if count < mean else -self.moe.bias_rate
