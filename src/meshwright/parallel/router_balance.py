"""Balance of the experts: the losses that ask for it, the bias that makes it, and what a step counts of it.

Shapes: B sequences of T tokens, N tokens of this rank, E experts, k experts of a token.

Losses are defined for each sequence and averaged over those of the global batch, so that neither the layout
nor the microbatches change them: the balance loss of a sequence is E / (k T) sum_e count_e P_e, with P_e the
mean of the tokens' shares of scores (Fedus et al. 2022, Switch, §2.2, for a batch; DeepSeek-V3, 2024, §2.1.2,
for a sequence), its z-loss the mean of the squared log-sum-exp of the logits (Zoph et al. 2022, ST-MoE).
Counts are not differentiable, so each rank finds the gradient of its own tokens from the summed counts. They
join no loss: their gradient enters where the weights of a layer's experts do, in whichever stage that is.

Wire          over the cp x tp ranks that share sequences, each layer and microbatch: B E counts of 4 bytes,
              all-reduced, where there is a balance loss; and where there is a capacity the experts that each
              token chose, all-gathered. Over all ranks, once a step and joined to the other numbers that all
              need: E + 4 numbers for each layer with experts of the whole model.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Replicate

from meshwright.model.decoder import Decoder
from meshwright.model.moe import Moe, Routing, with_room
from meshwright.parallel.collectives import gather_rows, start_all_reduce
from meshwright.parallel.context_parallel import zigzag
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.recompute import RecomputeCache


class LayerBalance(NamedTuple):
    """What the global batch of one step did in one layer."""

    load: list[float]
    """The share of all copies that chose each expert, in even shares: 1 is even."""
    dropped: float
    """The share of all copies that found no room."""
    entropy: float
    """Of the scores of a token, in nats, the mean."""
    aux_loss: float
    z_loss: float
    """Means over sequences, without their factors; 0 where the factor is."""


class _Attach(torch.autograd.Function):
    """Weights as they are; the loss beside them gets the gradient that a step's `scale` says."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, loss: Tensor, balance: Balance) -> Tensor:
        ctx.balance, ctx.like = balance, loss
        return weights.view_as(weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        return grad, ctx.like.new_full((), ctx.balance.scale), None


class Balance:
    """The routers of one rank's stages; `scale` is what a sequence's loss counts in the step's objective."""

    def __init__(self, decoder: Decoder, layers: list[int], mesh: Mesh, kept: RecomputeCache) -> None:
        self.mesh, self._kept, self.scale = mesh, kept, 0.0
        self._routed: dict[int, Moe] = {
            layer: mixture for layer, mixture in decoder.each_mixture() if layer in layers
        }
        self.counts: Tensor | None = None
        """Counts of one step, a row for each of `_layers`: this rank's, and after the step all ranks'."""
        if decoder.spec.moe is None:
            return
        self.moe = decoder.spec.moe
        self._layers = [layer for layer, _ in decoder.each_mixture()]
        """Layers with experts of the whole model."""
        shape = (len(self._layers), self.moe.experts + 4)
        self.counts = torch.zeros(shape, dtype=torch.float64, device=mesh.device)
        for row, layer in enumerate(self._layers):
            if layer in self._routed:
                mixture = self._routed[layer]
                mixture.settle = partial(self._settle, row)
                if mixture.router.bias is not None:
                    mixture.router.bias = torch.zeros(self.moe.experts, device=mesh.device)

    # Forward ----------------------------------------------------------------------------------------

    def _settle(self, row: int, routing: Routing, batch: int) -> tuple[Tensor, Tensor | None]:
        """The weights, with the losses' gradient attached, and which copies find room."""
        length = len(routing.experts) // batch * self.mesh.sequence.size
        room = self._room(routing.experts, batch, length)
        if not torch.is_grad_enabled():
            return routing.weights, room
        moe, weights = self.moe, routing.weights
        shares = routing.scores / routing.scores.sum(-1, keepdim=True)
        aux = z = shares.new_zeros(())
        if moe.aux_loss:
            aux = self._aux_loss(routing.experts, shares, batch, length)
        if moe.z_loss:
            z = routing.logits.logsumexp(-1).square().sum() / length
        if not self._kept.second:
            self._note(row, routing.experts, shares.detach(), room, [aux.detach(), z.detach()])
        if moe.aux_loss or moe.z_loss:
            weights = _Attach.apply(weights, moe.aux_loss * aux + moe.z_loss * z, self)
        return weights, room

    def _aux_loss(self, experts_Nk: Tensor, shares_NE: Tensor, batch: int, length: int) -> Tensor:
        """This rank's part of the sum over its sequences."""
        moe = self.moe
        sequence = self._sequences(len(experts_Nk), batch)
        key = (experts_Nk + sequence.unsqueeze(1) * moe.experts).flatten()
        counts = torch.bincount(key, minlength=batch * moe.experts).view(batch, moe.experts).float()
        (counts,) = self._kept.run(None, lambda: (self._summed(counts),))
        even = moe.experts / (moe.top_k * length)
        per_sequence = shares_NE.new_zeros(batch, moe.experts).index_add(0, sequence, shares_NE)
        return (per_sequence * counts.to(shares_NE.dtype)).sum() * (even / length)

    def _summed(self, counts: Tensor) -> Tensor:
        start_all_reduce(counts, self.mesh.sequence).wait()
        return counts

    def _sequences(self, tokens: int, batch: int) -> Tensor:
        """(N,): which of the B sequences each token is of; a tensor rank has some rows of (B T, D)."""
        tensor = self.mesh.tensor
        rows = torch.arange(tokens, device=self.mesh.device) + tensor.rank * tokens
        return rows // (tokens * tensor.size // batch)

    def _room(self, experts_Nk: Tensor, batch: int, length: int) -> Tensor | None:
        """Which copies are among the first of their sequence in their expert, over all that have a part."""
        capacity = self.moe.capacity(length)
        if capacity is None:
            return None
        context, tensor = self.mesh.context, self.mesh.tensor
        (whole,) = self._kept.run(None, lambda: (gather_rows(experts_Nk.int(), self.mesh.sequence),))
        places = torch.cat([zigzag(length, context.size, rank) for rank in range(context.size)])
        by_rank = whole.view(context.size, batch, -1, self.moe.top_k).transpose(0, 1).flatten(1, 2)
        in_order = torch.empty_like(by_rank, dtype=torch.int64)
        places = places.to(in_order.device)
        in_order[:, places] = by_rank.long()
        room = with_room(in_order, self.moe.experts, capacity).view(batch, length, -1)[:, places]
        mine = room.view(batch, context.size, -1, self.moe.top_k)[:, context.rank]
        return mine.reshape(tensor.size, -1, self.moe.top_k)[tensor.rank]

    @torch.no_grad()
    def _note(
        self, row: int, experts_Nk: Tensor, shares_NE: Tensor, room: Tensor | None, losses: list[Tensor]
    ) -> None:
        assert self.counts is not None
        experts, sums = self.moe.experts, self.counts[row]
        sums[:experts] += torch.bincount(experts_Nk.flatten(), minlength=experts)
        if room is not None:
            sums[experts] += (~room).sum()
        sums[experts + 1] += torch.special.entr(shares_NE).sum()
        sums[experts + 2] += losses[0]
        sums[experts + 3] += losses[1]

    # Step -------------------------------------------------------------------------------------------

    def begin_step(self, scale: float) -> None:
        """Call before a step's first forward."""
        self.scale = scale
        if self.counts is not None:
            self.counts.zero_()

    def found(self, sequences: int, length: int) -> dict[int, LayerBalance]:
        """The balance of each layer with experts, of every stage, in the step whose counts were summed last.

        A step takes `sequences` of `length` tokens. Waits for the device.
        """
        if self.counts is None:
            return {}
        moe, copies = self.moe, sequences * length * self.moe.top_k
        layers = {}
        for layer, row in zip(self._layers, self.counts.tolist(), strict=True):
            dropped, entropy, aux, z = row[moe.experts :]
            layers[layer] = LayerBalance(
                [count / copies * moe.experts for count in row[: moe.experts]],
                dropped / copies,
                entropy / (sequences * length),
                aux / sequences,
                z / sequences,
            )
        return layers

    @torch.no_grad()
    def update(self) -> None:
        """Move each bias a step towards an even load (Wang et al. 2024); the same on every rank."""
        for layer, mixture in self._routed.items():
            bias = mixture.router.bias
            if bias is not None and self.counts is not None:
                load = self.counts[self._layers.index(layer), : self.moe.experts]
                bias += (self.moe.bias_rate * torch.sign(load.mean() - load)).to(bias.dtype)

    def held(self) -> list[Tensor]:
        """The tensors that it holds between steps: counts, and the biases."""
        biases = [mixture.router.bias for mixture in self._routed.values()]
        return [tensor for tensor in (self.counts, *biases) if tensor is not None]

    def biases(self) -> Mapping[str, DTensor]:
        """Of this rank's stages, by name; every rank of a stage has the same."""
        mesh = self.mesh.storage
        return {
            f"blocks.{layer}.mlp.router.bias": DTensor.from_local(
                mixture.router.bias, mesh, [Replicate()] * mesh.ndim, run_check=False
            )
            for layer, mixture in self._routed.items()
            if mixture.router.bias is not None
        }
