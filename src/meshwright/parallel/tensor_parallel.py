"""Tensor parallelism with sequence sharding: layers are split inside, and tokens between layers.

Splits        attention by heads, the feed-forward layer by its channels (Shoeybi et al. 2019, §3), embedding
              and head by the vocabulary. With `sequence_parallel` norms, residual stream and their gradients
              by tokens between those regions (Korthikanti et al. 2022, §4.2.2). Where there are fewer
              key-value heads than ranks, neighbouring ranks hold the same head.
Wire          for N tokens of D channels in a microbatch, b bytes to compute in, a block, f = (n-1)/n:
                sequence sharded   forward   2 all-gathers and 2 reduce-scatters of N D b f each
                                   backward  4 all-gathers (2 of them instead of keeping what the forward
                                             gathered) and 2 reduce-scatters
                otherwise          2 all-reduces of 2 N D b f, forward and backward each
              once more around embedding and head; and in the loss 2 numbers a token from each rank. In
              latent attention D is the latents' channels where they are expanded; the keys' rotary part is
              not gathered a second time.
Saves         all but 1/n of the weights, gradients and optimiser states, and of the activations inside
              layers; with sequence sharding also of those between layers.

A column-parallel layer overlaps its messages: the gather of its input, which the weight gradient needs, runs
during the matmul of the input gradient, and the sum of that during the matmul of the weight gradient
(Korthikanti et al. 2022, §4.2.2). Tokens are split as they lie in memory, (B, T) flattened, so no collective
needs a transposed copy: a rank's (B, T/n, D) stands for N/n rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor, nn

from meshwright.comm.mesh import Axis, Mesh
from meshwright.model.decoder import Decoder
from meshwright.model.hooks import AttentionHooks, MlpHooks
from meshwright.model.linear import Linear, project
from meshwright.model.low_precision_linear import Products
from meshwright.parallel.deferred_wgrad import WeightGradStore
from meshwright.parallel.recompute_cache import RecomputeCache
from meshwright.parallel.tensor_linears import (
    ColumnParallel,
    EnterParallelRegion,
    RowParallel,
)
from meshwright.spec import RunSpec
from meshwright.spec.parameter_groups import run_parameters
from meshwright.spec.parameters import Piece, expert_piece, piece_of


class TensorLinears:
    """Column- and row-parallel linear layers of the blocks on one rank of the tensor axis.

    With `cache` None they are operators of compiled blocks. `store` takes deferred weight gradients, and
    knows the sums of others.
    """

    def __init__(
        self,
        axis: Axis,
        sequence: bool,
        cache: RecomputeCache | None,
        store: WeightGradStore,
        products: Products,
    ) -> None:
        sequence = sequence and axis.size > 1
        self._columns = ColumnParallel(axis, sequence, cache, store, products)
        self._rows = RowParallel(axis, sequence, cache, store, products)
        self._enter = EnterParallelRegion(axis, sequence, cache)

    def project(self, x_BTD: Tensor, linears: Sequence[Linear]) -> tuple[Tensor, ...]:
        """Column-parallel layers of one input: (B, T/n or T, D) -> (B, T, F/n) each."""
        biases = [linear.bias for linear in linears if linear.bias is not None]
        return tuple(self._columns(x_BTD, *(linear.weight for linear in linears), *biases))

    def gather(self, x_BTD: Tensor) -> Tensor:
        """Activations of all tokens, which every rank uses: (B, T/n or T, D) -> (B, T, D)."""
        return self._enter(x_BTD)[0]

    def output(self, x_BTF: Tensor, linear: Linear, read_again: bool = True) -> Tensor:
        """A row-parallel layer: (B, T, F/n) -> (B, T/n or T, D); the bias is added once, to the sum."""
        (x_BTD,) = self._rows(x_BTF, linear.weight, read_again=read_again)
        return x_BTD if linear.bias is None else x_BTD + linear.bias

    def last_output(self, x_BTF: Tensor, linear: Linear) -> Tensor:
        """`output` for the last layer of a block, whose result no recomputing forward of the block reads."""
        return self.output(x_BTF, linear, read_again=False)


def tensor_parallel_hooks(
    mesh: Mesh,
    sequence: bool,
    cache: RecomputeCache | None,
    store: WeightGradStore,
    products: Products,
    splits_backward: bool,
    rereads_outputs: bool = False,
) -> tuple[AttentionHooks, MlpHooks]:
    """Hooks for blocks whose linear layers are split over the tensor axis, defer weight gradients, compute
    in low precision, or add gradients within products.

    On one rank with none of these they are the defaults. The last is for CPUs, since it takes some tens of
    microseconds a layer of Python, and for one context rank: beside others a recomputing forward would read
    these layers' results from the cache. `rereads_outputs` is that of the model.
    """
    axis = mesh.tensor
    adds = cache is not None and mesh.device.type == "cpu" and mesh.context.size == 1
    if axis.size == 1 and not (splits_backward or products.low or adds):
        return AttentionHooks(), MlpHooks()
    split = TensorLinears(axis, sequence, cache, store, products)
    whole = TensorLinears(replace(axis, size=1, rank=0), False, cache, store, products)
    latents = project if cache is None and not products.low else whole.project
    attention = AttentionHooks(
        project=split.project, output=split.output, project_latents=latents, gather_rotary_key=split.gather
    )
    # A policy saves operators of one rank whether they are read or not; a norm or a gate after them reads them.
    unread = (axis.size > 1 or splits_backward or bool(products.low)) and not rereads_outputs
    output = split.last_output if unread else split.output
    return attention, MlpHooks(project=split.project, output=output)


def parameter_pieces(spec: RunSpec, mesh: Mesh) -> dict[str, Piece]:
    """The piece of each parameter that this rank of the tensor and expert axes holds, by name."""
    axis, layout = mesh.tensor, mesh.layout
    return {
        parameter.name: expert_piece(parameter, layout.ep, layout.etp, mesh.expert.rank)
        if parameter.expert
        else piece_of(parameter, spec.model, axis.size, axis.rank, layout.sequence_parallel)
        for unit in run_parameters(spec).values()
        for parameter in unit
    }


def shard_parameters(decoder: Decoder, pieces: Mapping[str, Piece]) -> None:
    """Replace each parameter of a decoder on `meta` by one of its piece's shape; tied weights stay tied."""
    replaced: dict[nn.Parameter, nn.Parameter] = {}
    names = {parameter: name for name, parameter in decoder.named_parameters()}
    for module in decoder.modules():
        for attribute, whole in list(module.named_parameters(recurse=False)):
            if whole not in replaced:
                replaced[whole] = nn.Parameter(whole.new_empty(pieces[names[whole]].local_shape))
            setattr(module, attribute, replaced[whole])
