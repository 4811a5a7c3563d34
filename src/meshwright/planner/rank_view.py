"""A rank's view of a run: its stages, their parameters, and the widths of its numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from math import ceil, prod
from typing import NamedTuple

from meshwright.schedule import Schedule, schedule_of
from meshwright.spec import ModelSpec, RunSpec
from meshwright.spec.eight_bit import LARGEST_BLOCK
from meshwright.spec.layers import LayerKind
from meshwright.spec.lora import BASE_BITS, BLOCK, LORA_A, MAGNITUDE
from meshwright.spec.low_precision_rules import is_rounded
from meshwright.spec.parameter_groups import frozen_names, run_parameters
from meshwright.spec.parameters import (
    BaseFormat,
    Parameter,
    Piece,
    block_parameters,
    expert_piece,
    piece_of,
)
from meshwright.spec.precision import FP8_TILE, WORD
from meshwright.spec.sections import SavedOp, SelectiveRecompute
from meshwright.spec.stages import Stage, first_trained, parameters_of, stages
from meshwright.units import DTYPE_BYTES


@dataclass(frozen=True)
class Widths:
    """Bytes of an element: in compute, of stored weights, of reduced gradients, of exact sums and moments."""

    compute: int
    master: int
    reduce: int
    exact: int


FLASH_CHANNELS = 256
"""Channels of the widest heads that flash kernels take."""


def widths(spec: RunSpec) -> Widths:
    """The widths of a run's formats in bytes; fp64 is used throughout where it computes."""
    precision = spec.precision
    return _widths(precision.base, precision.master, precision.reduce)


@cache
def _widths(base: str, master: str, reduce: str) -> Widths:
    compute = DTYPE_BYTES[base]
    if compute == 8:
        return Widths(8, 8, 8, 8)
    return Widths(compute, DTYPE_BYTES[master], DTYPE_BYTES[reduce], 4)


def sum_width(spec: RunSpec) -> int:
    """Bytes of an element of the sum of a unit's gradients in a step, where it is packed whole."""
    return widths(spec).exact if spec.microbatches > 1 else widths(spec).reduce


def adds_gradients(spec: RunSpec) -> bool:
    """True if products of a block's layers write the gradients of their weights where they are sent, and add
    them there (`kernels/gradient_accumulation_fusion.py`).

    Uncompiled layers of one tensor rank leave them to autograd beside context ranks.
    """
    layout, precision = spec.layout, spec.precision
    low = precision.low or precision.qat is not None
    return layout.cp == 1 or layout.tp > 1 or layout.splits_backward or low or spec.train.compile


def added_by_products(spec: RunSpec, routed: bool = False) -> bool:
    """True if such gradients lie where a unit is packed whole all through a step, those of experts if
    `routed`."""
    layout = spec.layout
    ranks = layout.expert_data_ranks if routed else layout.shard_ranks
    return (routed or adds_gradients(spec)) and (layout.zero == 0 or ranks == 1)


def loss_by_kernel(spec: RunSpec, cpu: bool) -> bool:
    """True if kernels take the loss of the logits where they lie (`kernels/cross_entropy.py`): on a GPU, but
    in fp64, and without a teacher."""
    return not cpu and widths(spec).compute < 8 and spec.distil is None


def takes_flash(spec: RunSpec) -> bool:
    """True if the flash kernels of a GPU take the run's attention (`kernels/attention_flash.py`)."""
    model = spec.model
    fits = model.head_dim % 8 == 0 and model.head_dim <= FLASH_CHANNELS
    return widths(spec).compute == 2 and fits and model.attention_softcap is None


def moment_width(spec: RunSpec) -> float:
    """Bytes of the moments of a number of a matrix of a block; in 8 bits, with the largest blocks."""
    width = widths(spec).exact
    kind = spec.train.optimiser_kind
    return len(kind.matrix_moments) * (1 + width / LARGEST_BLOCK if kind.eight_bit else width)


class BlockTraining(NamedTuple):
    """Parameters of a block that are trained, from which follows which parts of it have a backward."""

    before: bool = True
    """True if a module before the block is trained: then the block's input has a gradient."""
    names: frozenset[str] | None = None
    """Names within the block of the parameters that are trained; None for all."""

    def trains(self, *prefixes: str) -> bool:
        """True if a parameter is trained whose name begins with one of these."""
        return self.names is None or any(name.startswith(prefixes) for name in self.names)

    def trains_layer(self, *layers: str) -> bool:
        """True if the weight or the bias of one of these linear layers is trained, and not its adapter
        alone."""
        return self.trains(*(f"{layer}.{leaf}" for layer in layers for leaf in ("weight", "bias")))

    def adapters(self, *layers: str) -> int:
        """Number of these linear layers that have an adapter."""
        return sum(f"{layer}{LORA_A}" in (self.names or ()) for layer in layers)

    def rescales(self, *layers: str) -> bool:
        """True if the rows of one of these linear layers have magnitudes."""
        return any(f"{layer}{MAGNITUDE}" in (self.names or ()) for layer in layers)

    @property
    def adapts_experts(self) -> bool:
        """True if a matrix of its routed experts has adapters."""
        return self.adapters(*(f"mlp.experts.{name}_adapter" for name in ("gate", "up", "down"))) > 0

    @property
    def attention_input(self) -> bool:
        """True if the input of attention, after its norm, has a gradient."""
        return self.before or self.trains("attn_norm.")

    @property
    def mixed(self) -> bool:
        """True if the weighted sums of values have a gradient."""
        return self.attention_input or any(not name.startswith("attn.o.") for name in self._of("attn."))

    @property
    def attention(self) -> bool:
        """True if attention has a backward."""
        return self.before or self.trains("attn")

    def _of(self, prefix: str) -> list[str]:
        """Names of trained parameters that begin so; one stands for all."""
        return [prefix] if self.names is None else [name for name in self.names if name.startswith(prefix)]

    @property
    def feed_forward(self) -> bool:
        """True if the feed-forward layer has a backward, and with it the block."""
        return self.attention or self.trains("mlp")


@dataclass(frozen=True)
class RankView:
    """The stages of a pipeline rank, and the part of the model that they hold."""

    spec: RunSpec
    schedule: Schedule
    own: tuple[Stage, ...]

    @property
    def rank(self) -> int:
        """The pipeline rank."""
        return self.schedule.rank_of[self.own[0].index]

    @property
    def layers(self) -> int:
        """Number of its blocks."""
        return sum(len(stage.blocks) for stage in self.own)

    @property
    def routed(self) -> int:
        """Number of its layers with routed experts."""
        return sum(self.spec.model.has_experts(layer) for stage in self.own for layer in stage.layers)

    @property
    def embed(self) -> bool:
        """True if it has the embedding."""
        return any(stage.embed for stage in self.own)

    @property
    def head(self) -> bool:
        """True if it has the head."""
        return any(stage.head for stage in self.own)

    def kinds(self) -> Counter[tuple[bool, BlockTraining]]:
        """How many of its layers have (routed experts, the same that is trained)."""
        layers = [layer for stage in self.own for layer in stage.layers]
        return Counter((self.spec.model.has_experts(n), training_of(self.spec, n)) for n in layers)

    def kinds_of_units(self) -> dict[str, object]:
        """Unit -> what it shares with blocks of equal parameters, in the order of its forward."""
        spec = self.spec
        listed, kinds = parameters_of(spec, self.own), spec.model.layer_kinds
        blocks = {
            (unit := f"blocks.{n}"): (kinds[n], *(p.trainable for p in listed[unit]))
            for stage in self.own
            for n in stage.blocks
        }
        return {unit: blocks.get(unit, unit) for unit in listed}

    def pieces(self) -> dict[str, list[tuple[Parameter, Piece]]]:
        """The rank's pieces of each unit's parameters; blocks of one kind share the first's list."""
        spec, layout = self.spec, self.spec.layout

        def piece(p: Parameter) -> Piece:
            if p.expert:
                return expert_piece(p, layout.ep, layout.etp, 0)
            return piece_of(p, spec.model, layout.tp, 0, layout.sequence_parallel)

        listed, kinds = parameters_of(spec, self.own), self.kinds_of_units()
        first: dict[object, str] = {kinds[unit]: unit for unit in reversed([*listed])}
        made = {kind: [(p, piece(p)) for p in listed[unit]] for kind, unit in first.items()}
        return {unit: made[kind] for unit, kind in kinds.items()}


ALL_TRAINED = BlockTraining()


def training_of(spec: RunSpec, layer: int) -> BlockTraining:
    """The parameters of a block that are trained."""
    if spec.trains_all:
        return ALL_TRAINED
    listed, first = run_parameters(spec)[f"blocks.{layer}"], first_trained(spec)
    names = frozenset(p.name.split(".", 2)[2] for p in listed if p.trainable)
    return BlockTraining(first <= layer, None if len(names) == len(listed) else names)


def embedding_is_trained(spec: RunSpec) -> bool:
    """True if the embedding of tokens has a gradient."""
    return "embed.weight" not in frozen_names(spec)


def place_of(spec: RunSpec, rank: int) -> RankView:
    """The view of pipeline rank `rank`."""
    schedule = schedule_of(spec.layout, spec.microbatches)
    every = stages(spec.model, spec.layout, spec.data.seq_len)
    return RankView(spec, schedule, tuple(every[index] for index in schedule.stages_of(rank)))


def layer_parameters(model: ModelSpec, kind: LayerKind) -> tuple[int, int, int]:
    """Parameters of a layer: split by tensor ranks, replicated on them, of routed experts."""
    sizes = Counter[str]()
    for p in block_parameters(model, model.layer_kinds.index(kind)):
        sizes["experts" if p.expert else "split" if p.split else "whole"] += p.size
    return sizes["split"], sizes["whole"], sizes["experts"]


def share(ranks: int) -> float:
    """(n - 1) / n: the fraction of a tensor sharded over `ranks` ranks that the others hold."""
    return (ranks - 1) / ranks


def part_elements(piece: Piece, ranks: int) -> int:
    """Elements of a piece that each of `ranks` ranks stores, padding included."""
    rows = piece.local_shape[piece.rows_dim]
    return ceil(rows / ranks) * (prod(piece.local_shape) // rows)


def quantised_bytes(elements: int, form: BaseFormat, width: int) -> int:
    """Bytes of codes and of scales of `width` bytes, of weights of a quantised base."""
    return elements * BASE_BITS[form] // 8 + elements // BLOCK * width


def saved_by_a_base(spec: RunSpec) -> float:
    """Bytes by which a weight of a quantised base is smaller than one in the format that computes."""
    if spec.lora is None or (form := spec.lora.base_format) is None:
        return 0.0
    width = widths(spec).compute
    return width - quantised_bytes(BLOCK, form, width) / BLOCK


def gathered_bytes(spec: RunSpec, pieces: Iterable[Piece], ranks: int) -> int:
    """Bytes of a rank's part of a unit that `ranks` ranks gather (`parallel/fp8_gather.py`, and of a
    quantised base `parallel/quantised_weights.py`)."""
    width, precision, found = widths(spec).compute, spec.precision, 0
    for piece in pieces:
        elements = part_elements(piece, ranks)
        if piece.quantised is not None:
            found += quantised_bytes(elements, piece.quantised, width)
            continue
        if not (precision.fp8_gather and is_rounded(piece.key, len(piece.global_shape))):
            found += elements * width
            continue
        found += elements
        if precision.compute == "fp8-blockwise":
            columns = piece.local_shape[-1]
            rows = elements // columns // (piece.local_shape[0] if piece.experts is not None else 1)
            tiles = ceil(rows / FP8_TILE) * ceil(columns / FP8_TILE)
            found += tiles * (elements // (rows * columns))
    return ceil(found / WORD) * WORD if precision.fp8_gather else found


def recomputed(spec: RunSpec, kind: SavedOp) -> bool:
    """True if a block's backward recomputes operators of this kind."""
    if isinstance(spec.recompute, SelectiveRecompute):
        return kind not in spec.recompute.save
    return spec.recompute.policy == "full"
