"""The order in which a decoder is made parallel."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from meshwright.model.decoder import Decoder
from meshwright.model.init import fill_, init_value
from meshwright.model.moe import Moe
from meshwright.parallel.context_parallel import split_sequences
from meshwright.parallel.data_parallel import DataParallel, MakeUnit, UnitModules
from meshwright.parallel.deferred_wgrad import WeightGradStore
from meshwright.parallel.expert_parallel import split_experts
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.pipeline_parallel import Pipeline
from meshwright.parallel.precision import formats
from meshwright.parallel.recompute import RecomputeCache, apply_recompute
from meshwright.parallel.router_balance import Balance
from meshwright.parallel.tensor_parallel import split_tensors
from meshwright.parallel.unit import Unit
from meshwright.schedule import schedule_of
from meshwright.spec import ModelSpec, RunSpec
from meshwright.spec.stages import Stage, stages


def parallelise(
    spec: RunSpec, mesh: Mesh, make_unit: MakeUnit = Unit
) -> tuple[Decoder, DataParallel, Balance, Pipeline]:
    """Describe the decoder without memory, split its tensors, experts and sequences, decide what it keeps,
    compile it, cut it into stages, and give the states of this rank's stages a home.

    The parameters' values are zeros until `initialise` or a checkpoint fills them.
    """
    with torch.device("meta"):
        decoder = Decoder(spec.model)
    schedule = schedule_of(spec.layout, spec.microbatches)
    # In compiled blocks what sends is an operator, which a policy knows by name.
    kept, later = None if spec.train.compile else RecomputeCache(), WeightGradStore()
    put_off = later if schedule.splits_backward else None
    pieces = split_tensors(decoder, mesh, spec.layout.sequence_parallel, kept, put_off)
    split_sequences(decoder, mesh, spec.layout.context_mode, kept)
    routed = kept or RecomputeCache()
    split_experts(decoder, mesh, routed, put_off)
    messages = mesh.tensor.size * mesh.context.size > 1 or schedule.splits_backward
    sparse = [block for block in decoder.each_block() if isinstance(block.mlp, Moe)]
    apply_recompute(sparse, spec.recompute, routed)
    dense = [block for block in decoder.each_block() if block not in sparse]
    apply_recompute(dense, spec.recompute, kept if messages else None)
    if spec.train.compile:
        compiled: list[nn.Module] = [*dense, *(block.attn for block in sparse)]
        for (
            module
        ) in compiled:  # of a sparse block only attention: the data alone know how many take an expert
            module.forward = torch.compile(module.forward)
    every = stages(spec.model, spec.layout, spec.data.seq_len)
    own = [every[index] for index in schedule.stages_of(mesh.pipeline.rank)]
    names = {parameter: name for name, parameter in decoder.named_parameters()}
    apart = "embed.weight" if spec.model.tied and schedule.rank_of[0] != schedule.rank_of[-1] else None
    own_units, recipe = units(decoder, own), formats(spec.precision)
    states = DataParallel(own_units, mesh, recipe, pieces, names, apart, make_unit)
    modules = {stage.index: DecoderStage(decoder, stage, spec, mesh) for stage in own}
    scheduled = partial(schedule_of, spec.layout)
    pipeline = Pipeline(modules, mesh, scheduled, later, states.begin_microbatch, states.take)
    balance = Balance(decoder, [index for stage in own for index in stage.blocks], mesh, routed)
    return decoder, states, balance, pipeline


class Microbatch(Protocol):
    """What a stage reads of a microbatch: (B, T) each, documents of whole sequences."""

    tokens: Tensor
    targets: Tensor
    positions: Tensor
    documents: Tensor


class DecoderStage:
    """One stage of a decoder on one rank: what it computes, and the form of what it takes."""

    def __init__(self, decoder: Decoder, stage: Stage, spec: RunSpec, mesh: Mesh) -> None:
        self.decoder, self.stage, self.mesh = decoder, stage, mesh
        self._dtype = formats(spec.precision).compute
        self._share = mesh.tensor.size if spec.layout.sequence_parallel else 1
        self.target_weight = 1.0

    def __call__(self, microbatch: Microbatch, x_BTD: Tensor | None) -> Tensor:
        """(B, T, D) for the stage after, or the head's summed loss times `target_weight`."""
        decoder, stage = self.decoder, self.stage
        if x_BTD is None:
            x_BTD = decoder.embed(microbatch.tokens, microbatch.positions)
        if stage.blocks:
            length = microbatch.tokens.shape[1]
            look = decoder.look(length, microbatch.positions, microbatch.documents, x_BTD)
            for block in decoder.blocks[stage.first : stage.last]:
                x_BTD = block(x_BTD, *look)
        return decoder.head(x_BTD, microbatch.targets, self.target_weight) if stage.head else x_BTD

    def empty(self, microbatch: Microbatch) -> Tensor:
        """Room for (B, T, D), or with sequence sharding for this rank's tokens of it."""
        batch, length = microbatch.tokens.shape
        shape = (batch, length // self._share, self.decoder.spec.hidden)
        return torch.empty(shape, dtype=self._dtype, device=self.mesh.device)


def units(decoder: Decoder, own: Sequence[Stage]) -> list[UnitModules]:
    """What is gathered and reduced together: the embedding, each block, the head; tied ends are one unit."""
    embed: list[nn.Module] = [decoder.embed for stage in own if stage.embed]
    head: list[nn.Module] = [decoder.head for stage in own if stage.head]
    blocks = [[decoder.blocks[index]] for stage in own for index in stage.blocks]
    if decoder.spec.tied and embed and head:
        return [[*embed, *head], *blocks]
    return [*([embed] if embed else []), *blocks, *([head] if head else [])]


def initialise(states: DataParallel, model: ModelSpec, seed: int) -> None:
    """Draw this rank's part of the initial weights, a function of (seed, name, element) and not of layout."""
    for unit in states.units:
        for slot in unit.slots:
            local, start = unit.local(unit.stored, slot), init_value(model, slot.name)
            if start.kind != "normal":
                local.fill_(1.0 if start.kind == "ones" else 0.0)
                continue
            indices, whole = slot.indices(), torch.Size(slot.piece.whole)
            fill_(local, seed=seed, name=slot.name, index_vectors=indices, shape=whole, std=start.std)
            local[indices[0] >= whole[0]] = 0.0  # padding
        unit.expire()
