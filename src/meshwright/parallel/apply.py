"""The order in which a decoder is made parallel."""

from __future__ import annotations

import torch

from meshwright.model.decoder import Decoder
from meshwright.model.init import fill_, init_value
from meshwright.parallel.context import split_sequences
from meshwright.parallel.data import DataParallel, UnitModules
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.precision import formats
from meshwright.parallel.recompute import Kept, apply_recompute
from meshwright.parallel.tensor import split_tensors
from meshwright.spec import ModelSpec, RunSpec


def parallelise(spec: RunSpec, mesh: Mesh) -> tuple[Decoder, DataParallel]:
    """Describe the decoder without memory, split its tensors and sequences, decide what it keeps, compile it,
    and give its states a home.

    The parameters' values are zeros until `initialise` or a checkpoint fills them.
    """
    with torch.device("meta"):
        decoder = Decoder(spec.model)
    kept = Kept()
    pieces = split_tensors(decoder, mesh.tensor, spec.layout.sequence_parallel, kept)
    split_sequences(decoder, mesh, spec.layout.context_mode, kept)
    messages = mesh.tensor.size * mesh.context.size > 1
    apply_recompute(decoder.blocks, spec.recompute, kept if messages else None)
    if spec.train.compile:
        for block in decoder.blocks:
            block.forward = torch.compile(block.forward)
    return decoder, DataParallel(units(decoder), mesh, formats(spec.precision), pieces)


def units(decoder: Decoder) -> list[UnitModules]:
    """What is gathered and reduced together: the embedding, each block, the head; tied ends are one unit."""
    blocks: list[UnitModules] = [[(f"blocks.{i}", block)] for i, block in enumerate(decoder.blocks)]
    embed, head = ("embed", decoder.embed), ("head", decoder.head)
    if decoder.spec.tied:
        return [[embed, head], *blocks]
    return [[embed], *blocks, [head]]


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
