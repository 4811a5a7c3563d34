"""Bytes of activations of this program on one rank: what a microbatch keeps for its backward, and the peak.

The terms of a block follow Korthikanti et al. 2022 (section 4, table 2), tensor by tensor, for this decoder:
it has no dropout, so no masks of it; its attention keeps no scores (Dao et al. 2022), which is what that
paper's selective recomputation achieves; and its norms keep the residual stream and one or two numbers a
token. For N tokens of D channels of b bytes, Q and K channels of queries and of keys, F of the feed-forward
layer, t tensor ranks, s = t where tokens are shared between the layers (sequence parallelism) and 1
elsewhere:

    none        N b (4 D / s + (2 Q + 2 K + 3 F) / t)     2 F where the layer is not gated
    selective   N b (2 D / s + (2 Q + 2 K + 2 F) / t)     1 F where the layer is not gated; one device: 3 D
    full        N b D / s

Attention over latents (DeepSeek-AI 2024) of L channels together, with P more that turn with the position and
are shared by all H heads, with V channels of values: instead of 2 Q + 2 K, none has Q + K + 2 V, and
(2 L + P) / s more; selective Q + K - H P + 2 V, and (L + P) / s more, and P where s > 1.

Temporaries of single operators count where they make the peak: in the head's forward, whose logits are in
chunks, in the head's backward, and in those of the last block's layers and of its norm between them. For
attention over context ranks they are those of tiles, as on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from operator import sub
from typing import NamedTuple

from meshwright.planner import activations_moe as experts
from meshwright.planner.activations_head import (
    FurtherBytes,
    further_kept,
    further_peak,
    head_kept,
    head_peaks,
    in_norm,
    waiting_gradient,
)
from meshwright.planner.activations_linear import (
    at_rounded_gradients,
    feed_forward_input,
    inside,
    linear_inputs,
    output_again,
)
from meshwright.planner.activations_lora import (
    adapters_everything,
    adapters_kept,
    adapts_down,
    at_magnitudes,
    forward_with_adapters,
    made_again,
    recomputed_with_adapters,
    rescales_down,
)
from meshwright.planner.activations_sizes import Sizes
from meshwright.planner.rank_view import (
    added_by_products,
    embedding_is_trained,
    sum_width,
    takes_flash,
    training_of,
)
from meshwright.spec import MoeSpec, RunSpec
from meshwright.spec.layers import LayerKind, RopeSpec
from meshwright.spec.sections import SelectiveRecompute
from meshwright.spec.stages import Stage, first_trained, stages
from meshwright.spec.tiling import part_tile, query_rows, tiling


@dataclass(frozen=True)
class Activations:
    """Bytes on one rank for one microbatch in flight."""

    by_block: tuple[int, ...]
    """Kept by each block on the device."""
    moved: tuple[int, ...]
    """Kept by each block in the host's memory, and on the device while the block or a neighbour computes."""
    kinds: tuple[LayerKind, ...]
    """The kind of each block."""
    tables: Mapping[RopeSpec | None, int]
    """Kept once for all blocks of a stage with these rotary positions: their table."""
    masks: Mapping[int | None, int]
    """Kept once for all blocks of a stage with this window: the mask of visible keys."""
    plan: int
    """Kept for each window by all stages of a rank: the plans of context ranks. They are counted once, as in
    dry runs, whose microbatches have the same documents; each with others in flight keeps as much again,
    8 (b + 1) S bytes for b sequences of S tokens, which is little beside what the blocks keep."""
    embed: int
    """Kept for the embedding: which tokens' rows are on this rank; less `unread`."""
    unread: int
    """The first block's input, of which `by_block` has the bytes, where only forwards hold it."""
    host: int
    """Kept on the host, once for all blocks: visible keys, by which context ranks plan."""
    head: int
    """Kept by the head: its input, and the gradients that its forward computed; and for further tokens."""
    in_block: int
    """Peak beyond kept activations, in the last block's backward, while what the next one needs comes."""
    at_head: int
    """Peak beyond kept activations, in the head's forward and backward, and in what follows it."""
    further: FurtherBytes = field(default_factory=FurtherBytes)
    """Kept for further tokens, which is part of `head`."""

    @property
    def peak(self) -> int:
        """Peak of forward and backward without a pipeline, temporaries included."""
        return self.kept - self.head + max(self.head + self.at_head, self.in_block)

    @property
    def kept(self) -> int:
        """Kept on the device between forward and backward."""
        return sum(self.by_block) + self.shared + self.plans + self.embed + self.host + self.head

    @property
    def shared(self) -> int:
        """Kept once for all blocks of a model without a pipeline."""
        return self.shared_by(self.kinds)

    def shared_by(self, kinds: Iterable[LayerKind]) -> int:
        """Kept once for blocks of these kinds in a stage: rotary tables, and masks of visible keys."""
        ropes, windows = {kind.rope for kind in kinds}, {kind.window for kind in kinds}
        return sum(self.tables[rope] for rope in ropes) + sum(self.masks[window] for window in windows)

    @property
    def plans(self) -> int:
        """Kept by a rank without a pipeline: the plans of context ranks."""
        return self.plan * len(self.masks)

    def plans_of(self, own: Iterable[Stage]) -> int:
        """Kept for all of a rank's stages: the plans of context ranks."""
        return self.plan * len({self.kinds[layer].window for stage in own for layer in stage.blocks})

    def moved_of(self, stage: Stage) -> int:
        """Kept in the host's memory by one microbatch in a stage of a pipeline."""
        return sum(self.moved[layer] for layer in stage.blocks)

    def of(self, stage: Stage) -> int:
        """Kept on the device by one microbatch in a stage of a pipeline, without `plans`."""
        found = sum(self.by_block[layer] for layer in stage.blocks)
        kept = [self.kinds[layer] for layer in stage.blocks if self.by_block[layer] or self.moved[layer]]
        found += self.shared_by(kept)
        return found + (self.embed if stage.embed else 0) + (self.head if stage.head else 0)


def activations(spec: RunSpec, cpu: bool = True) -> Activations:
    """Activations of one rank, on a CPU or on another device, whose loss is taken in other chunks."""
    s, last = Sizes(spec, cpu), spec.model.layers - 1
    model, layout, b = spec.model, spec.layout, s.width.compute
    of_kind = [_block(s, layer) for layer in s.kinds.values()]
    whole = [of_kind[number] for number in model.kind_numbers]
    if not spec.trains_all:
        whole = [
            (bytes + adapters_kept(s, layer)) * training_of(spec, layer).feed_forward
            for layer, bytes in enumerate(whole)
        ]
    moved = _moved(s)
    length = spec.data.seq_len
    windows = {kind.window for kind in s.kinds}
    peaks = backward_peaks(s, last, cpu)
    in_layer = peaks.most + peaks.kept
    tables = {kind.rope: b * s.tokens * kind.rope.dim * 3 // 2 if kind.rope else 0 for kind in s.kinds}
    masks = {window: b * _mask(spec, window, cpu) for window in windows}
    host = 8 * spec.micro_batch * (length + length // layout.cp) if layout.cp > 1 else 0
    unread = _unread_input(s)
    own = model.kind_of(last)
    further = further_kept(s, _block(s, last), tables[own.rope] + masks[own.window] + host, cpu)
    return Activations(
        tuple(map(sub, whole, moved)),
        moved,
        kinds=model.layer_kinds,
        tables=tables,
        masks=masks,
        plan=8 * (spec.micro_batch + 1) * length if layout.cp > 1 else 0,
        embed=(9 * s.tokens if layout.tp > 1 and embedding_is_trained(spec) else 0) - unread,
        unread=unread,
        host=len(windows) * host,
        head=head_kept(s, cpu) + further.kept,
        in_block=in_layer - whole[last] + sum(moved[-2:-1]) + waiting_gradient(s),
        at_head=max(*head_peaks(s, cpu), further_peak(s, further, in_layer, cpu)),
        further=further,
    )


def _unread_input(s: Sizes) -> int:
    """Bytes of the first block's input where no backward reads it: of adapters, whose layers read what a
    frozen norm makes of it, and below which nothing is trained."""
    spec, norms = s.spec, s.spec.model.norms_before
    unread = spec.lora is not None and norms and spec.recompute.policy == "none"
    first = unread and first_trained(spec) == 1
    return s.width.compute * s.stream if first else 0


class BackwardPeaks(NamedTuple):
    """Peak bytes beyond those that a block keeps without recomputation, at moments of its backward."""

    kept: int
    """Bytes that the block keeps without recomputation."""
    feed_forward: int
    experts: int
    packed: int
    """While gradients of the experts' weights are packed."""
    attention: int
    """In attention, and in the norm before the feed-forward layer."""
    recomputed: int
    """In the forward that recomputes the block, before its backward; 0 where that is less than others."""
    forward: int
    """In the block's first forward, beyond what it keeps under the run's policy; 0 as above."""

    @property
    def most(self) -> int:
        """The most in the backward, with the forward that recomputes the block."""
        return max(self.feed_forward, self.experts, self.packed, self.attention, self.recomputed)


def backward_peaks(s: Sizes, layer: int, cpu: bool) -> BackwardPeaks:
    """The peaks of a block's backward, on a CPU or on another device."""
    return BackwardPeaks(
        everything(s, layer) + adapters_everything(s, layer),
        _at_feed_forward(s, layer, cpu),
        s.width.compute * s.stream + of_experts(s, layer, partial(experts.routed_backward, cpu=cpu)),
        s.width.compute * s.stream + of_experts(s, layer, partial(experts.routed_packed, cpu=cpu)),
        max(_at_norm(s, layer), _at_attention(s, layer)),
        recomputed_with_adapters(s, layer),
        forward_with_adapters(s, layer),
    )


def everything(s: Sizes, layer: int) -> int:
    """Bytes that a block keeps without recomputation."""
    return sum(_every_tensor(s, layer)) + of_experts(s, layer, experts.routed_everything)


def _every_tensor(s: Sizes, layer: int) -> list[int]:
    """Bytes of the tensors that a block keeps without recomputation, but for those of routed experts."""
    spec, b, exact = s.spec, s.width.compute, s.width.exact
    norms = spec.model.block_norms
    found = [*[s.stream] * norms, s.queries, s.keys, s.values, s.out, *[s.inner(layer)] * s.gates]
    if (mla := spec.model.mla) is not None:  # both latents before their norms
        ranks = [mla.q_rank] if mla.q_rank else []
        found += [s.own * rank for rank in [*ranks, mla.kv_rank, mla.rope_dim]]
        norms += 1 + len(ranks)
    numbers = [s.numbers(1, s.own)] * norms
    if spec.model.qk_norm:
        found += [s.queries, s.keys]
        heads = s.heads, s.keys // spec.model.head_dim // s.tokens
        numbers += [s.tokens * n * exact for n in ((1, 1) if spec.model.qk_norm_over == "all" else heads)]
    if spec.model.moe and spec.model.moe.shared_gate and spec.model.has_experts(layer):
        found += [s.stream, s.own]  # what the gate multiplies, and the gate
    numbers.append(s.tokens * s.heads * exact)  # attention's log-sum-exp
    if spec.layout.cp > 1 and spec.layout.context_mode == "gather":
        found.append((2 * spec.layout.cp - 1) * s.keys)
    return [*(b * elements for elements in found), *numbers, *linear_inputs(s, layer)]


def of_experts(s: Sizes, layer: int, count: Callable[[RunSpec, MoeSpec], int]) -> int:
    """The result of `count` for a block's routed experts; 0 if it has none."""
    model = s.spec.model
    return count(s.spec, model.moe) if model.moe and model.has_experts(layer) else 0


def _block(s: Sizes, layer: int) -> int:
    """Bytes that a block keeps under the run's policy."""
    if s.spec.recompute.policy == "none":
        return everything(s, layer)
    return sum(_kept_tensors(s, layer)) + of_experts(s, layer, experts.routed_saved)


def _kept_tensors(s: Sizes, layer: int) -> list[int]:
    """Bytes of the tensors that a block keeps under the run's policy, but for those of routed experts."""
    recompute, layout, b = s.spec.recompute, s.spec.layout, s.width.compute
    if recompute.policy == "none":
        return _every_tensor(s, layer)
    found = [b * s.stream]
    if not isinstance(recompute, SelectiveRecompute):
        return found
    if "matmul" in recompute.save:
        # One rank's operators are saved whether they are read or not, but by a compiler.
        alone = layout.tp == 1 and not layout.splits_backward and not s.compiled
        low = s.spec.precision.low or s.spec.precision.qat is not None  # then it is as with several
        read = s.spec.model.rereads_outputs or (alone and not low)
        read |= training_of(s.spec, layer).rescales("mlp.down", "mlp.shared.down")
        outputs = 2 if read and s.channels(layer) else 1
        found += [b * _attention_maps(s), *[b * s.stream] * outputs, *[b * s.inner(layer)] * s.gates]
    if "attention" in recompute.save:
        found += [b * s.out, s.tokens * s.heads * s.width.exact]
        if layout.cp > 1 and layout.context_mode == "gather":
            found.append(b * 2 * layout.cp * s.keys)
    return found


def movable(s: Sizes, layer: int) -> int:
    """Bytes of what a block keeps that offloading moves: of large tensors, and all of routed experts'."""
    policy, least = s.spec.recompute.policy, tiling().offload_bytes
    routed = experts.routed_everything if policy == "none" else experts.routed_saved
    return sum(size for size in _kept_tensors(s, layer) if size >= least) + of_experts(s, layer, routed)


def _moved(s: Sizes) -> tuple[int, ...]:
    """Bytes that each block has in the host's memory: none of a stage's last, nor the input of a stage."""
    model, found = s.spec.model, [0] * s.spec.model.layers
    if s.spec.train.offload_activations == "none":
        return tuple(found)
    of_kind = [movable(s, layer) for layer in s.kinds.values()]
    numbers = model.kind_numbers
    given = s.width.compute * s.stream
    for stage in stages(model, s.spec.layout, s.spec.data.seq_len):
        for layer in stage.blocks[:-1]:
            found[layer] = of_kind[numbers[layer]] * training_of(s.spec, layer).feed_forward
        moves = len(stage.blocks) > 1 and training_of(s.spec, stage.first).before
        if moves and not stage.embed and given >= tiling().offload_bytes:
            found[stage.first] -= given
    return tuple(found)


def _attention_maps(s: Sizes) -> int:
    """Elements of the outputs of an attention layer's maps, without the last."""
    model = s.spec.model
    if (mla := model.mla) is None:
        return s.queries + 2 * s.keys
    latents = s.own * ((mla.q_rank or 0) + mla.kv_rank + mla.rope_dim)
    shared = s.tokens * mla.rope_dim if s.own < s.tokens else 0
    return s.queries + s.tokens * s.heads * (model.head_dim - mla.rope_dim + mla.v_dim) + latents + shared


def _mask(spec: RunSpec, window: int | None, cpu: bool) -> int:
    """Elements of the mask of scores: one for each sample with several documents, one for a window.

    The flash kernels of GPUs take the ends of documents in its place.
    """
    length = spec.data.seq_len
    if spec.layout.cp > 1 or (not cpu and takes_flash(spec)):
        return 0
    if spec.data.pack and spec.data.document_mask:
        return spec.micro_batch * length**2
    return length**2 if window is not None and window < length else 0


def at_mask(s: Sizes, cpu: bool) -> int:
    """Bytes besides the masks while the last is made: which keys are visible, and which are not."""
    return 2 * max(_mask(s.spec, kind.window, cpu) for kind in s.kinds)


def _at_feed_forward(s: Sizes, layer: int, cpu: bool) -> int:
    """Peak bytes beyond those that the last block keeps, in the backward of its feed-forward layer."""
    weight = s.spec.model.hidden * s.channels(layer) // s.spec.layout.tp
    trained = training_of(s.spec, layer).trains_layer("mlp.down", "mlp.shared.down")
    if not trained or (added_by_products(s.spec) and sum_width(s.spec) == s.width.compute):
        weight = 0  # its gradient is where it is packed
    inputs = 2 if adapts_down(s, layer) else 1  # two gradients of its input, and their sum in its place
    if s.compiled and rescales_down(s, layer):
        # Both of the gates come before one is freed, beside what is computed again.
        return s.width.compute * (s.stream + (s.gates + 1) * s.inner(layer)) + made_again(s, layer)
    at_down = s.gathered + inputs * s.inner(layer) + weight  # gradients of its input and of its weight
    # A compiler writes the gradient of one gate in the place of that of their product.
    gates = s.gates - 1 if s.compiled and s.spec.lora is None else s.gates
    found = s.width.compute * (s.stream + max(gates * s.inner(layer), at_down))
    found = max(found, at_magnitudes(s, layer))
    return found if s.rounded is None else max(found, at_rounded_gradients(s, layer))


def _at_norm(s: Sizes, layer: int) -> int:
    """Peak bytes in the backward of the norm before the feed-forward layer, whose activations were freed."""
    freed = inside(s, layer) + of_experts(s, layer, experts.routed_everything)
    return s.width.compute * s.stream + in_norm(s) - freed


def _at_attention(s: Sizes, layer: int) -> int:
    """Peak bytes in attention's backward, when activations of the feed-forward layer were freed."""
    spec, b = s.spec, s.width.compute
    norms = 0 if spec.model.parallel_block else spec.model.block_norms // 2
    freed = b * norms * s.stream + inside(s, layer) + s.numbers(norms, s.own)
    freed += feed_forward_input(s, layer) if norms else 0
    freed += of_experts(s, layer, experts.routed_everything)
    if spec.layout.cp > 1:
        return _across_ranks(s) - freed - b * output_again(s)
    heads = 2 * (s.queries + s.out) + s.keys + s.values
    there = b * (s.stream + heads) + s.width.exact * (s.keys + s.values)
    keys, sequences = spec.data.seq_len, spec.micro_batch
    rows = min(keys, query_rows(sequences, s.heads, keys, b))
    tile = b * sequences * s.heads * rows * keys
    held = 3 if spec.model.attention_softcap is None else 4  # the cap's slope, too
    return there - freed + held * tile + 2 * b * s.queries * rows // keys


def _across_ranks(s: Sizes) -> int:
    """Peak bytes beyond kept ones in attention's backward over context ranks (`parallel/ring_attention.py`).

    Queries and their gradients are laid out by key heads, and sums are in wider numbers. In a ring the sums
    for keys and values return as the next ones arrive; where all keys are gathered, so are the sums.
    """
    layout, b, exact = s.spec.layout, s.width.compute, s.width.exact
    pair, sums, numbers = b * 2 * s.keys, exact * 2 * s.keys, s.tokens * s.heads
    ring = layout.cp // layout.ulysses(s.spec.model.kv_heads)
    held = b * (s.stream + s.queries + 2 * s.out) + exact * (s.queries + numbers)
    weighted = b * (s.out + 2 * numbers)
    tiles = weighted + max(exact * (s.out + 3 * numbers), _of_tiles(s, ring))
    if layout.context_mode == "gather":
        return held + layout.cp * sums + max(tiles, layout.cp * sums)
    if ring == 1:
        return held + pair + sums + tiles
    return held + (1 if ring == 2 else 2) * pair + 3 * sums + tiles  # sent, received, and added up


def _of_tiles(s: Sizes, ring: int) -> int:
    """Bytes of tiles of scores, copies of their queries and of all values, and masks or key gradients.

    Documents of a packed sample are taken to be its halves.
    """
    spec, b = s.spec, s.width.compute
    ulysses = spec.layout.ulysses(spec.model.kv_heads)
    length, sequences = spec.data.seq_len // spec.layout.cp * ulysses, spec.micro_batch
    keys = spec.data.seq_len if spec.layout.context_mode == "gather" else length
    seen = keys // 2 if spec.data.pack and spec.data.document_mask else keys
    groups = sequences * spec.layout.local_kv_heads(spec.model.kv_heads) // ulysses
    run = length if ring == 1 else length // 2
    rows, scores = part_tile(seen, run, groups, s.queries // s.keys)
    copies = 2 * (s.queries * rows // length + groups * keys) + s.keys * keys // length
    held = 2 if spec.model.attention_softcap is None else 3  # the cap's slope, too
    return b * (held * scores + copies) + max(b * s.keys, 3 * sequences * rows**2)
