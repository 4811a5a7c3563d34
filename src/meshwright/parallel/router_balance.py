"""Load balancing of experts: auxiliary losses, the routers' biases, and a step's statistics.

Shapes: B sequences of T tokens, N tokens of this rank, E experts, k experts of a token.

Losses are defined per sequence and averaged over the global batch, so that neither the layout nor the number
of microbatches changes them: the balance loss of a sequence is E / (k T) sum_e count_e P_e, where P_e is the
mean of the tokens' normalised scores (Fedus et al. 2022, Switch, §2.2, for a batch; DeepSeek-V3, 2024,
§2.1.2, for a sequence), and its z-loss the mean of the squared log-sum-exp of the logits (Zoph et al. 2022,
ST-MoE). Counts are not differentiable, so each rank computes the gradient of its own tokens from the summed
counts. These losses are not added to the objective: their gradient is attached to the routing weights of each
layer, in whichever stage it is.

Wire          over the cp x tp ranks that share sequences, each layer and microbatch: B E counts of 4 bytes,
              all-reduced, if there is a balance loss; the experts of each token, all-gathered, if there is a
              capacity. Over all ranks, once a step in one message with the other totals: E + 4 numbers for
              each MoE layer of the whole model.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from meshwright.comm.collectives import gather_rows, start_all_reduce
from meshwright.comm.mesh import Mesh
from meshwright.kernels.with_backward import with_backward
from meshwright.model.decoder import Decoder
from meshwright.model.router import Router, Routing, within_capacity
from meshwright.model.token_dispatcher import add_counts_
from meshwright.parallel.context_parallel import zigzag
from meshwright.parallel.flat_param import Stored, dtensor
from meshwright.parallel.fsdp_unit import Unit
from meshwright.parallel.loss_normalization import share_of_a_sequence
from meshwright.parallel.recompute_cache import RecomputeCache
from meshwright.parallel.step_part import StepBegin, StepEnd, StepPart
from meshwright.spec import ModelSpec, MoeSpec


class LayerBalance(NamedTuple):
    """Routing statistics of one layer over the global batch of one step."""

    load: list[float]
    """Copies routed to each expert, relative to an even share: 1 is even."""
    dropped: float
    """Fraction of copies dropped for lack of capacity."""
    entropy: float
    """Mean entropy of a token's normalised scores, in nats."""
    aux_loss: float
    z_loss: float
    """Mean over sequences, like `aux_loss` without its factor; 0 where the factor is 0."""


class RouterBalance(StepPart):
    """Load balancing of the routers in one rank's stages.

    `scale` is the factor of a sequence's auxiliary losses in the step's objective.
    """

    component = "balance"

    def __init__(self, model: ModelSpec, mesh: Mesh, cache: RecomputeCache) -> None:
        self.mesh, self._cache, self.scale = mesh, cache, 0.0
        layers = (*range(model.layers), *model.mtp_layers)
        self._layers = [layer for layer in layers if model.has_experts(layer)]
        self._routers: dict[int, Router] = {}
        self.counts: Tensor | None = None
        """Statistics of one step, a row per MoE layer of the model: this rank's, after the step all
        ranks'."""
        if model.moe is not None:
            self.moe = model.moe
            shape = (len(self._layers), self.moe.experts + 4)
            self.counts = torch.zeros(shape, dtype=torch.float64, device=mesh.device)

    def attach(self, decoder: Decoder, layers: Collection[int]) -> None:
        """Allocate the biases of the routers in `layers`, those of this rank's stages."""
        for layer, mixture in decoder.each_mixture():
            if layer in layers:
                self._routers[layer] = mixture.router
                if mixture.router.bias is not None:
                    mixture.router.bias = torch.zeros(self.moe.experts, device=self.mesh.device)

    # Forward ----------------------------------------------------------------------------------------

    def admit(self, moe: MoeSpec, layer: int, routing: Routing, batch: int) -> tuple[Tensor, Tensor | None]:
        """Routing weights (N, k) with the losses' gradient attached, and the copies within capacity."""
        length = len(routing.experts) // batch * self.mesh.sequence.size
        admitted = self._within_capacity(routing.experts, batch, length)
        if not torch.is_grad_enabled():
            return routing.weights, admitted
        weights = routing.weights
        aux = z = routing.scores.new_zeros(())
        if moe.aux_loss:
            aux = self._aux_loss(routing.experts, routing.scores, batch, length)
        if moe.z_loss:
            z = routing.logits.logsumexp(-1).square().sum() / length
        if not self._cache.recomputing:
            self._count(layer, routing, admitted, [aux.detach(), z.detach()])
        if moe.aux_loss or moe.z_loss:
            loss = moe.aux_loss * aux + moe.z_loss * z
            # The weights are unchanged; in the backward the loss gets the gradient `scale`.
            weights = with_backward(
                lambda weights, _loss: weights.view_as(weights),
                lambda grad: (grad, aux.new_full((), self.scale)),
                weights,
                loss,
            )
        return weights, admitted

    def _aux_loss(self, experts_Nk: Tensor, scores_NE: Tensor, batch: int, length: int) -> Tensor:
        """This rank's part of the sum of its sequences' balance losses, a scalar."""
        moe = self.moe
        sequence = self._sequences(len(experts_Nk), batch)
        key = (experts_Nk + sequence.unsqueeze(1) * moe.experts).flatten()
        zeros = torch.zeros(batch, moe.experts, device=key.device)
        counts = add_counts_(zeros.view(-1), key).view_as(zeros)
        (counts,) = self._cache.run(None, lambda: (self._summed(counts),))
        even = moe.experts / (moe.top_k * length)
        counts_NE = counts.to(scores_NE.dtype).index_select(0, sequence)
        return ((counts_NE * scores_NE).sum(-1) / scores_NE.sum(-1)).sum() * (even / length)

    def _summed(self, counts: Tensor) -> Tensor:
        start_all_reduce(counts, self.mesh.sequence).wait()
        return counts

    def _sequences(self, tokens: int, batch: int) -> Tensor:
        """Index (N,) of each token's sequence; a tensor rank holds some rows of (B T, D)."""
        tensor = self.mesh.tensor
        rows = torch.arange(tokens, device=self.mesh.device) + tensor.rank * tokens
        return rows // (tokens * tensor.size // batch)

    def _within_capacity(self, experts_Nk: Tensor, batch: int, length: int) -> Tensor | None:
        """Mask (N, k) of copies within their expert's capacity, over all ranks that share a sequence."""
        capacity = self.moe.capacity(length)
        if capacity is None:
            return None
        context, tensor = self.mesh.context, self.mesh.tensor
        (whole,) = self._cache.run(None, lambda: (gather_rows(experts_Nk.int(), self.mesh.sequence),))
        places = torch.cat([zigzag(length, context.size, rank) for rank in range(context.size)])
        by_rank = whole.view(context.size, batch, -1, self.moe.top_k).transpose(0, 1).flatten(1, 2)
        in_order = torch.empty_like(by_rank, dtype=torch.int64)
        places = places.to(in_order.device, non_blocking=True)
        in_order[:, places] = by_rank.long()
        admitted = within_capacity(in_order, self.moe.experts, capacity).view(batch, length, -1)[:, places]
        own = admitted.view(batch, context.size, -1, self.moe.top_k)[:, context.rank]
        return own.reshape(tensor.size, -1, self.moe.top_k)[tensor.rank]

    @torch.no_grad()
    def _count(self, layer: int, routing: Routing, admitted: Tensor | None, losses: list[Tensor]) -> None:
        assert self.counts is not None
        experts, sums = self.moe.experts, self.counts[self._layers.index(layer)]
        scores_NE = routing.scores.detach()
        shares_NE = scores_NE / scores_NE.sum(-1, keepdim=True)
        add_counts_(sums[:experts], routing.experts.flatten())
        if admitted is not None:
            sums[experts] += (~admitted).sum()
        sums[experts + 1] += torch.special.entr(shares_NE).sum()
        sums[experts + 2] += losses[0]
        sums[experts + 3] += losses[1]

    def counted(self) -> list[Tensor]:
        """The counts of this rank, in float64, which become those of all ranks; nothing without experts."""
        return [] if self.counts is None else [self.counts]

    # Step -------------------------------------------------------------------------------------------

    def begin_step(self, begin: StepBegin) -> None:
        """Weigh the losses of routers, which are means over the step's sequences, and count from 0."""
        self.scale = share_of_a_sequence(begin.sequences) * begin.loss_factor
        if self.counts is not None:
            self.counts.zero_()

    def constants(self) -> float:
        """The factor of auxiliary losses; 0 without experts."""
        return 0.0 if self.counts is None else self.scale

    def statistics(self, sequences: int, length: int) -> dict[int, LayerBalance]:
        """Statistics of each MoE layer of the model, by layer, in the step whose counts were summed last.

        A step processes `sequences` of `length` tokens. Waits for the device.
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
    def after_update(self, end: StepEnd) -> None:
        """Move each bias one step towards an even load of this step's tokens (Wang et al. 2024).

        Equal on every rank. The bias of a router that is not trained stays as it is.
        """
        if not end.counted:
            return
        for layer, router in self._routers.items():
            bias = router.bias
            if bias is not None and router.weight.requires_grad and self.counts is not None:
                load = self.counts[self._layers.index(layer), : self.moe.experts]
                bias += (self.moe.bias_rate * torch.sign(load.mean() - load)).to(bias.dtype)

    def tensors(self) -> Iterator[tuple[str, Stored]]:
        """(`model/name`, bias) of each router of this rank's stages."""
        return ((f"model/{name}", bias) for name, bias in self.biases().items())

    def held(self) -> Iterator[tuple[Unit | None, Tensor]]:
        """Counts and biases."""
        return ((None, tensor) for tensor in self._tensors)

    def of_gradients(self) -> tuple[list[object], list[Tensor]]:
        """Counts of tokens: they grow while gradients are computed."""
        return [self], self._tensors

    @property
    def _tensors(self) -> list[Tensor]:
        biases = [router.bias for router in self._routers.values()]
        return [tensor for tensor in (self.counts, *biases) if tensor is not None]

    def biases(self) -> Mapping[str, DTensor]:
        """Biases (E,) of this rank's stages by name, replicated over the ranks of a stage."""
        mesh = self.mesh.storage
        return {
            f"blocks.{layer}.mlp.router.bias": dtensor(router.bias, mesh, [Replicate()] * mesh.ndim)
            for layer, router in self._routers.items()
            if router.bias is not None
        }
