"""The order in which a decoder is made parallel, and the hooks that each axis puts into its modules."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from functools import partial

import torch

from meshwright.comm.mesh import Mesh
from meshwright.model.decoder import Decoder
from meshwright.model.hooks import Hooks
from meshwright.model.init import init_part_
from meshwright.model.lora import attach_adapters
from meshwright.model.low_precision_linear import LowPrecision, Products
from meshwright.model.moe import Moe
from meshwright.model.scaled_products import products_of
from meshwright.parallel.activation_offload import ActivationOffload
from meshwright.parallel.adapter_dropout import AdapterDropout
from meshwright.parallel.context_parallel import context_parallel_hooks
from meshwright.parallel.data_parallel import DataParallel
from meshwright.parallel.deferred_wgrad import WeightGradStore
from meshwright.parallel.expert_buffers import ExpertBuffers
from meshwright.parallel.expert_parallel import expert_parallel_hooks
from meshwright.parallel.fp8_gather import Fp8Gather
from meshwright.parallel.fsdp_unit import UnitObserver
from meshwright.parallel.heads_norm import HeadsNorm
from meshwright.parallel.multi_token_prediction import FurtherLoss, further_loss_of
from meshwright.parallel.pipeline_parallel import Pipeline
from meshwright.parallel.precision import formats
from meshwright.parallel.recompute import apply_recompute
from meshwright.parallel.recompute_cache import RecomputeCache
from meshwright.parallel.router_balance import RouterBalance
from meshwright.parallel.stage import DecoderStage, unit_modules
from meshwright.parallel.tensor_parallel import (
    parameter_pieces,
    shard_parameters,
    tensor_parallel_hooks,
)
from meshwright.parallel.vocab_parallel import VocabParallel
from meshwright.schedule import schedule_of
from meshwright.spec import ModelSpec, RunSpec
from meshwright.spec.stages import first_trained, first_trained_stage, stages


@dataclass(frozen=True)
class ParallelDecoder:
    """One rank's part of a decoder on a mesh."""

    decoder: Decoder
    states: DataParallel
    balance: RouterBalance
    buffers: ExpertBuffers
    further: FurtherLoss
    pipeline: Pipeline
    products: Products
    dropout: AdapterDropout
    offload: ActivationOffload | None
    """None if activations stay on the device."""


def parallelize(spec: RunSpec, mesh: Mesh, observer: UnitObserver | None = None) -> ParallelDecoder:
    """Build this rank's part of a decoder on the mesh.

    The values of the parameters are zeros until `initialise` or a checkpoint fills them. `observer` is called
    about the buffers of units.
    """
    model, layout = spec.model, spec.layout
    schedule = schedule_of(layout, spec.microbatches)
    # In compiled blocks operations that communicate are operators, which a policy knows by name.
    cache, store = None if spec.train.compile else RecomputeCache(), WeightGradStore()
    moe_cache = cache or RecomputeCache()
    balance, buffers = RouterBalance(model, mesh, moe_cache), ExpertBuffers(spec, mesh)
    products = products_of(spec.precision, mesh.device, mesh.rank == 0)
    further = further_loss_of(spec, mesh, schedule.rank_of[-1] == mesh.pipeline.rank)
    hooks = decoder_hooks(spec, mesh, cache, moe_cache, store, balance, buffers, products)
    hooks = replace(hooks, further=further.attach)
    dropout = AdapterDropout(spec, mesh)
    with torch.device("meta"):
        decoder = attach_adapters(Decoder(model, hooks), spec.lora, dropout.keys)
    pieces = parameter_pieces(spec, mesh)
    if max(mesh.tensor.size, mesh.expert.size) > 1:
        shard_parameters(decoder, pieces)
    names = {parameter: name for name, parameter in decoder.named_parameters()}
    communicates = mesh.tensor.size * mesh.context.size > 1 or schedule.splits_backward or products.low
    offload = ActivationOffload(mesh.device) if spec.train.offload_activations == "host" else None
    dropout.before_recompute(decoder.blocks)
    recompute_and_compile(decoder, spec, cache if communicates else None, moe_cache, offload)
    dropout.after_recompute(decoder.blocks)
    every = stages(model, layout, spec.data.seq_len)
    own = [every[index] for index in schedule.stages_of(mesh.pipeline.rank)]
    if offload is not None:
        for stage in own:
            offload.attach([*decoder.blocks[stage.first : stage.last]])
    balance.attach(decoder, [index for stage in own for index in stage.layers])
    apart = "embed.weight" if model.head_embeds and schedule.rank_of[0] != schedule.rank_of[-1] else None
    units, recipe = unit_modules(decoder, own), formats(spec.precision)
    fp8 = None
    if spec.precision.fp8_gather and isinstance(products, LowPrecision):
        fp8 = Fp8Gather(products)
    stale, first = spec.staleness > 0, first_trained(spec)
    states = DataParallel(
        units, mesh, recipe, pieces, names, apart, observer, fp8, stale, first, own[-1].beyond
    )
    store.gradient_sum, store.parameter_at = states.gradient_sum, states.parameter_at
    modules = {stage.index: DecoderStage(decoder, stage, spec, mesh, dropout.begin) for stage in own}
    pipeline = Pipeline(
        modules,
        mesh,
        partial(schedule_of, layout),
        store,
        states.begin_microbatch,
        states.take,
        first_trained_stage(spec, every),
    )
    return ParallelDecoder(decoder, states, balance, buffers, further, pipeline, products, dropout, offload)


def decoder_hooks(
    spec: RunSpec,
    mesh: Mesh,
    cache: RecomputeCache | None,
    moe_cache: RecomputeCache,
    store: WeightGradStore,
    balance: RouterBalance,
    buffers: ExpertBuffers,
    products: Products,
) -> Hooks:
    """The operations that this rank's place on each axis puts in the place of one device's.

    `cache` and `moe_cache` serve dense blocks (None if compiled) and MoE blocks; `store` takes weight
    gradients that the schedule defers, and knows the sums of others.
    """
    splits = schedule_of(spec.layout, spec.microbatches).splits_backward
    model, sequence = spec.model, spec.layout.sequence_parallel
    attention, mlp = tensor_parallel_hooks(
        mesh, sequence, cache, store, products, splits, model.rereads_outputs
    )
    if mesh.tensor.size > 1 and model.qk_norm and model.qk_norm_over == "all":
        attention = replace(attention, norm_heads=HeadsNorm(mesh.tensor, cache, model).norm)
    hooks = Hooks(attention=attention, mlp=mlp)
    if mesh.tensor.size > 1:
        pieces = parameter_pieces(spec, mesh)
        head = pieces["embed.weight" if model.tied else "head.weight"]
        vocabulary = VocabParallel(mesh.tensor, sequence, pieces["embed.weight"], head)
        hooks = replace(
            hooks, embed=vocabulary.embed, predict=vocabulary.predict, log_probs=vocabulary.log_probs
        )
    if mesh.context.size > 1:
        attend, mask = context_parallel_hooks(mesh, spec.layout.context_mode, model, cache)
        ranks, attention = mesh.context.size, replace(attention, attend=attend)
        hooks = replace(hooks, attention=attention, mask=mask, whole_length=lambda length: ranks * length)
    if model.moe is not None:
        mixture = expert_parallel_hooks(mesh, balance.admit, moe_cache, store, products, buffers)
        hooks = replace(hooks, moe=mixture)
    return hooks


def recompute_and_compile(
    decoder: Decoder,
    spec: RunSpec,
    cache: RecomputeCache | None,
    moe_cache: RecomputeCache,
    offload: ActivationOffload | None,
) -> None:
    """Wrap the blocks' `forward` by the policy of recomputation, and compile it if the run says so."""
    moe = [block for block in decoder.blocks if isinstance(block.mlp, Moe)]
    dense = [block for block in decoder.blocks if block not in moe]
    apply_recompute(moe, spec.recompute, moe_cache, offload)
    # What a compiled block saves, its program gives to autograd itself, whatever the policy.
    apply_recompute(dense, spec.recompute, cache, None if spec.train.compile else offload)
    if spec.train.compile:
        # Products in fp32 are to be those of fp32; the advice of torch's compiler is a call in Python.
        warnings.filterwarnings("ignore", "TensorFloat32 tensor cores", UserWarning)
        # Of a MoE block only the attention: the rows of its experts depend on the data.
        for module in [*dense, *(block.get_submodule("attn") for block in moe)]:
            module.forward = torch.compile(module.forward)


def initialise(
    states: DataParallel, model: ModelSpec, seed: int, given: frozenset[str] = frozenset()
) -> None:
    """Draw this rank's part of the initial weights, which depend on (seed, name, element) only; not of those
    that are `given`."""
    for unit in states.units:
        for slot in unit.slots:
            if slot.key in given:
                continue
            local, indices = unit.values(slot), slot.indices()
            whole = torch.Size(slot.global_shape)
            drawn = local.to(states.formats.master)  # `local` itself, but for what is not trained
            init_part_(drawn, model, seed=seed, name=slot.key, index_vectors=indices, shape=whole)
            drawn[indices[0] >= whole[0]] = 0.0  # padding
            if drawn is not local or unit.quantised is not None:
                unit.set_values(slot, drawn)
    round_stored(states)


def round_stored(states: DataParallel) -> None:
    """Round this rank's stored parameters, which were just set, to the numbers that the run stores."""
    for unit in states.units:
        for slot in unit.slots if states.formats.rounded and unit.quantised is None else ():
            local = unit.local(unit.stored, slot)
            if local.dtype is not torch.bfloat16:
                local.copy_(local.bfloat16())
        unit.expire()
