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

from collections.abc import Mapping
from dataclasses import replace

from torch import nn

from meshwright.comm.mesh import Mesh
from meshwright.model.decoder import Decoder
from meshwright.model.hooks import AttentionHooks, MlpHooks
from meshwright.model.low_precision_linear import Products
from meshwright.parallel.deferred_wgrad import WeightGradStore
from meshwright.parallel.recompute_cache import RecomputeCache
from meshwright.parallel.tensor_linears import TensorLinears
from meshwright.parallel.tensor_lora import TensorAdapters
from meshwright.spec import RunSpec
from meshwright.spec.parameter_groups import run_parameters
from meshwright.spec.parameters import Piece, expert_piece, piece_of


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

    On one rank with none of these they are the defaults. The last is for compiled blocks, and otherwise for
    one context rank: beside others a recomputing forward would read these layers' results from the cache.
    `rereads_outputs` is that of the model.
    """
    axis = mesh.tensor
    adds = cache is None or mesh.context.size == 1
    if axis.size == 1 and not (splits_backward or products.low or adds):
        return AttentionHooks(), MlpHooks()
    split = TensorLinears(axis, sequence, cache, store, products)
    whole = TensorLinears(replace(axis, size=1, rank=0), False, cache, store, products)
    adapted = TensorAdapters(split, whole.project, axis, cache)
    attention = AttentionHooks(
        project=adapted.project,
        output=adapted.output,
        project_latents=adapted.project_whole,
        gather_rotary_key=split.gather,
    )
    # A policy saves operators of one rank whether they are read or not, and norms or gates after them do.
    unread = (axis.size > 1 or splits_backward or bool(products.low)) and not rereads_outputs
    output = adapted.last_output if unread else adapted.output
    return attention, MlpHooks(project=adapted.project, output=output)


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
