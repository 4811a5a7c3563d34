"""Pipeline stages of a decoder, and the units in which their parameters are gathered and reduced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from meshwright.comm.mesh import Mesh
from meshwright.model.decoder import Decoder
from meshwright.model.log_probs import LogProbLoss
from meshwright.model.multi_token_prediction import FurtherTokens
from meshwright.model.soft_targets import SoftTargets
from meshwright.parallel.data_parallel import UnitModules
from meshwright.parallel.precision import formats
from meshwright.spec import RunSpec
from meshwright.spec.stages import Stage


class Microbatch(Protocol):
    """Tensors of a microbatch that a stage reads: (B, T) each, documents (B, S) of whole sequences, slots
    (B,) of the global batch, and soft targets, or another loss, and further tokens, if the loss takes any."""

    tokens: Tensor
    targets: Tensor
    positions: Tensor
    documents: Tensor
    slots: Tensor
    soft_targets: SoftTargets | LogProbLoss | None
    further: FurtherTokens | None


class DecoderStage:
    """One pipeline stage of a decoder on one rank: embedding, blocks and head as `Stage` lists them."""

    def __init__(
        self,
        decoder: Decoder,
        stage: Stage,
        spec: RunSpec,
        mesh: Mesh,
        begin: Callable[[Microbatch], None] = lambda _: None,
    ) -> None:
        """`begin` is called before each forward of a microbatch."""
        self.decoder, self.stage, self.mesh, self._begin = decoder, stage, mesh, begin
        self._dtype = formats(spec.precision).compute
        self._token_shards = mesh.tensor.size if spec.layout.sequence_parallel else 1
        self.target_weight = 1.0

    def __call__(self, microbatch: Microbatch, x_BTD: Tensor | None) -> Tensor:
        """Activations (B, T, D) for the next stage, or on the last the summed loss times `target_weight`."""
        decoder, stage = self.decoder, self.stage
        self._begin(microbatch)
        if x_BTD is None:
            x_BTD = decoder.embed(microbatch.tokens, microbatch.positions)
        around = microbatch.tokens.shape[1], microbatch.positions, microbatch.documents
        if stage.blocks:
            x_BTD = decoder.through(stage.blocks, x_BTD, *around)
        if not stage.head:
            return x_BTD
        given = [microbatch.targets, self.target_weight, microbatch.soft_targets]
        if microbatch.further is not None:
            given.append(decoder.further(microbatch.further, *around))
        return decoder.head(x_BTD, *given)

    def empty(self, microbatch: Microbatch) -> Tensor:
        """An empty tensor for the stage's input: (B, T, D), or (B, T/n, D) with sequence sharding."""
        batch, length = microbatch.tokens.shape
        shape = (batch, length // self._token_shards, self.decoder.spec.hidden)
        return torch.empty(shape, dtype=self._dtype, device=self.mesh.device)


def unit_modules(decoder: Decoder, own: Sequence[Stage]) -> list[UnitModules]:
    """Modules of each unit of this rank's stages: the embedding, each block, the head, and each layer that
    predicts further tokens; ends that share a weight are one unit."""
    embed: list[nn.Module] = [decoder.embed for stage in own if stage.embed]
    head: list[nn.Module] = [decoder.head for stage in own if stage.head]
    blocks = [[decoder.blocks[index]] for stage in own for index in stage.blocks]
    beyond = [[decoder.blocks[index]] for stage in own for index in stage.beyond]
    if decoder.spec.head_embeds and embed and head:
        return [[*embed, *head], *blocks, *beyond]
    return [*([embed] if embed else []), *blocks, *([head] if head else []), *beyond]
