"""Bytes of activations on one rank: what a microbatch keeps for its backward, and the most that is there.

The terms of a block follow Korthikanti et al. 2022 (§4, table 2), tensor by tensor, for this decoder: it has
no dropout, so no masks of it; its attention keeps no scores (Dao et al. 2022), which is what that paper's
selective recomputation achieves; and its norms keep the residual stream and one or two numbers a token. For N
tokens of D channels of b bytes, Q and K channels of queries and of keys, F of the feed-forward layer, t
tensor ranks, s = t where tokens are shared between the layers (sequence parallelism) and 1 elsewhere:

    none        N b (4 D / s + (2 Q + 2 K + 3 F) / t)     2 F where the layer is not gated
    selective   N b (2 D / s + (2 Q + 2 K + 2 F) / t)     1 F where the layer is not gated; one device: 3 D
    full        N b D / s

Attention over latents (DeepSeek-AI 2024) of L channels together, of which P more turn with the position and
are shared by all H heads, with V channels of values: for 2 Q + 2 K none has Q + K + 2 V, and (2 L + P) / s
more; selective Q + K - H P + 2 V, and (L + P) / s more, and P where s > 1.

Temporaries of single operators count where they make the peak: in the head's forward, whose logits are in
chunks, at the head's backward, and at those of the last block's layers and of its norm between them. Of
attention over context ranks they are those of tiles, as on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from math import ceil

from meshwright.planner.memory.activations_moe import routed_backward, routed_everything, routed_saved
from meshwright.planner.rank_view import widths
from meshwright.schedule import schedule_of
from meshwright.spec import MoeSpec, RunSpec
from meshwright.spec.sections import SelectiveRecompute
from meshwright.spec.stages import Stage
from meshwright.spec.tiling import loss_rows, part_tile, query_rows


@dataclass(frozen=True)
class Activations:
    """Bytes on one rank for one microbatch in flight."""

    by_block: tuple[int, ...]
    """What each block keeps."""
    shared: int
    """Kept once for all blocks: rotary tables, which keys are seen."""
    embed: int
    """Kept for the embedding: which tokens' rows are here."""
    host: int
    """Kept on the host, once for all blocks: which keys are seen, where context ranks plan by it."""
    head: int
    """What the head keeps: its input, and the gradients that its forward computed."""
    in_block: int
    """The most beyond what is kept in the last block's backward."""
    at_head: int
    """The most beyond what is kept in the head, forward and backward."""

    @property
    def peak(self) -> int:
        """The most at any time of forward and backward, temporaries included, without a pipeline."""
        return self.kept - self.head + max(self.head + self.at_head, self.in_block)

    @property
    def blocks(self) -> int:
        """What all blocks keep."""
        return sum(self.by_block)

    def of(self, stage: Stage) -> int:
        """What one microbatch keeps on the device for the backward of a stage of a pipeline."""
        found = sum(self.by_block[layer] for layer in stage.blocks) + (self.shared if stage.blocks else 0)
        return found + (self.embed if stage.embed else 0) + (self.head if stage.head else 0)

    @property
    def kept(self) -> int:
        """Between forward and backward."""
        return self.blocks + self.shared + self.embed + self.host + self.head


class Sizes:
    """Elements on one rank of what activations are made of."""

    def __init__(self, spec: RunSpec) -> None:
        layout, model = spec.layout, spec.model
        self.spec, self.width = spec, widths(spec)
        self.tokens = spec.micro_batch * spec.data.seq_len // layout.cp
        shared = layout.tp if layout.sequence_parallel else 1
        self.own = self.tokens // shared
        self.stream = self.own * model.hidden
        self.whole = self.tokens * model.hidden
        self.heads = model.heads // layout.tp
        self.queries = self.tokens * self.heads * model.head_dim
        self.keys = self.tokens * layout.local_kv_heads(model.kv_heads) * model.head_dim
        # Over context ranks values travel, and come out, as wide as keys.
        v_dim = model.v_dim if layout.cp == 1 else model.head_dim
        self.values, self.out = self.keys * v_dim // model.head_dim, self.queries * v_dim // model.head_dim
        self.gates = 2 if model.activation == "swiglu" else 1
        self.rows = ceil(model.vocab_size / layout.tp)

    @cached_property
    def splits_backward(self) -> bool:
        """Whether the schedule puts gradients of weights off; asked late, as large schedules take a while."""
        layout = self.spec.layout
        return layout.pp > 1 and schedule_of(layout, self.spec.microbatches).splits_backward

    def inner(self, layer: int) -> int:
        """Inside the feed-forward layer that all tokens take, which may be shared experts or none."""
        return self.tokens * self.channels(layer) // self.spec.layout.tp

    def channels(self, layer: int) -> int:
        """Channels of that layer, over all tensor ranks."""
        model = self.spec.model
        return model.moe.shared_ffn if model.moe and model.has_experts(layer) else model.ffn

    def numbers(self, norms: int, tokens: int) -> int:
        """Bytes of what norms keep beside their input: a scale, or a mean and a scale."""
        model, width = self.spec.model, self.width
        return norms * tokens * width.exact * (1 if model.norm == "rmsnorm" else 2)


def activations(spec: RunSpec) -> Activations:
    """What one rank of a run without a pipeline needs."""
    sizes, last = Sizes(spec), spec.model.layers - 1
    by_block = tuple(_block(sizes, layer) for layer in range(spec.model.layers))
    shared, embed, host, head = _shared(sizes), _embed(sizes), _host(sizes), _head(sizes)
    in_block = max(at(sizes, last) for at in (at_feed_forward, at_experts, at_norm, at_attention))
    in_block += everything(sizes, last) - by_block[last]
    return Activations(by_block, shared, embed, host, head, in_block, _at_head(sizes))


def everything(s: Sizes, layer: int) -> int:
    """What a block keeps without recomputation."""
    spec, b = s.spec, s.width.compute
    found = 4 * s.stream + s.queries + s.keys + s.values + s.out + (1 + s.gates) * s.inner(layer)
    numbers = s.numbers(2, s.own)
    if (mla := spec.model.mla) is not None:  # both latents before their norms and after
        latents = 2 * (mla.q_rank or 0) + 2 * mla.kv_rank + mla.rope_dim
        found += s.own * latents
        numbers += s.numbers(2 if mla.q_rank else 1, s.own)
    if spec.model.qk_norm:
        found += s.queries + s.keys
        numbers += s.tokens * (s.heads + s.keys // s.tokens // spec.model.head_dim) * s.width.exact
    return b * found + numbers + _attention_extra(s) + of_experts(s, layer, routed_everything)


def of_experts(s: Sizes, layer: int, count: Callable[[RunSpec, MoeSpec], int]) -> int:
    """What `count` finds for a block's routed experts, if it has any."""
    model = s.spec.model
    return count(s.spec, model.moe) if model.moe and model.has_experts(layer) else 0


def _attention_extra(s: Sizes) -> int:
    """What attention over context ranks keeps beside its inputs and its output."""
    layout, b = s.spec.layout, s.width.compute
    if layout.cp == 1:
        return 0
    found = s.tokens * s.heads * s.width.exact  # the log-sum-exp
    if layout.context_mode == "gather":
        found += b * (2 * layout.cp - 1) * s.keys
    return found + b * _output_again(s)


def _output_again(s: Sizes) -> int:
    """Elements of the output once more: exchanged over context ranks, or cut to narrow values."""
    layout, model = s.spec.layout, s.spec.model
    again = layout.cp > 1 and (layout.ulysses(model.kv_heads) > 1 or model.v_dim < model.head_dim)
    return s.tokens * s.heads * model.v_dim if again else 0


def _block(s: Sizes, layer: int) -> int:
    """What a block keeps under the run's policy."""
    recompute, layout, b = s.spec.recompute, s.spec.layout, s.width.compute
    if recompute.policy == "none":
        return everything(s, layer)
    found = b * s.stream + of_experts(s, layer, routed_saved)
    if not isinstance(recompute, SelectiveRecompute):
        return found
    messages = layout.tp * layout.cp > 1
    if "matmul" in recompute.save:
        # One rank's operators are saved whether they are read or not.
        outputs = 2 if layout.tp == 1 and s.channels(layer) and not s.splits_backward else 1
        found += b * (_attention_maps(s) + outputs * s.stream + s.gates * s.inner(layer))
    if "attention" in recompute.save:
        found += b * s.out
        if messages and layout.cp > 1:
            found += s.tokens * s.heads * s.width.exact
            if layout.context_mode == "gather":
                found += b * 2 * layout.cp * s.keys
    return found


def _attention_maps(s: Sizes) -> int:
    """Elements of what an attention layer's maps give, without the last."""
    model = s.spec.model
    if (mla := model.mla) is None:
        return s.queries + 2 * s.keys
    latents = s.own * ((mla.q_rank or 0) + mla.kv_rank + mla.rope_dim)
    shared = s.tokens * mla.rope_dim if s.own < s.tokens else 0
    return s.queries + s.tokens * s.heads * (model.head_dim - mla.rope_dim + mla.v_dim) + latents + shared


def _shared(s: Sizes) -> int:
    spec = s.spec
    tables = s.tokens * spec.model.rope_dim * 3 // 2 if spec.model.position == "rope" else 0
    return s.width.compute * (tables + _mask(spec))


def _mask(spec: RunSpec) -> int:
    """Elements of the mask of scores; several documents in a sample have one each, a window is for all."""
    if spec.layout.cp > 1:
        return 0
    length, window = spec.data.seq_len, spec.model.sliding_window
    if spec.data.pack and spec.data.document_mask:
        return spec.micro_batch * length**2
    return length**2 if window is not None and window < length else 0


def at_mask(s: Sizes) -> int:
    """Bytes beside the mask while it is made: which keys are seen, and which are not."""
    return 2 * _mask(s.spec)


def _embed(s: Sizes) -> int:
    return 9 * s.tokens if s.spec.layout.tp > 1 else 0


def _host(s: Sizes) -> int:
    length, ranks = s.spec.data.seq_len, s.spec.layout.cp
    return 8 * s.spec.micro_batch * (length + length // ranks) if ranks > 1 else 0


def _head(s: Sizes) -> int:
    b, exact = s.width.compute, s.width.exact
    return b * (s.stream + s.whole) + s.numbers(1, s.own) + exact * s.rows * s.spec.model.hidden


def _at_head(s: Sizes) -> int:
    """The most beyond what is kept, while the loss and its gradients are computed and used."""
    return max(head_moments(s, casts=True))


def head_moments(s: Sizes, casts: bool) -> tuple[int, int, int]:
    """The most beyond what is kept: in the forward, with the weight's gradient in two formats, in the norm.

    `casts`: whether to add numbers of one format to another's takes a copy of them, as on a CPU.
    """
    b, exact, model = s.width.compute, s.width.exact, s.spec.model
    logits = min(s.tokens, loss_rows(s.rows, cpu=True)) * s.rows
    weight, mixed = s.rows * model.hidden, b != exact
    inputs = b * (s.stream + (s.whole if s.own < s.tokens else 0))
    softmax = logits * (b + (2 * exact if mixed else exact))
    added = b * logits + (weight * (b + (exact if casts else 0)) if mixed else 0)
    backward = weight * b if mixed else 0
    return (
        inputs + max(softmax, added),
        backward,
        _in_norm(s) - exact * weight,
    )  # the weight's gradient is gone


def _in_norm(s: Sizes) -> int:
    """What a norm's backward makes."""
    b, exact = s.width.compute, s.width.exact
    if b != exact:  # in wider numbers
        return s.stream * (3 * exact + b)
    return s.stream * exact * (2 if s.spec.model.norm == "rmsnorm" else 1)


def at_feed_forward(s: Sizes, layer: int) -> int:
    """The most beyond what the last block keeps, in the backward of its feed-forward layer."""
    model, layout, inner = s.spec.model, s.spec.layout, s.inner(layer)
    gathered = s.whole if s.own < s.tokens else 0
    at_down = gathered + inner + model.hidden * s.channels(layer) // layout.tp  # of its input, of its weight
    return s.width.compute * (s.stream + max(s.gates * inner, at_down))


def at_experts(s: Sizes, layer: int) -> int:
    """The most beyond that in the backward of its routed experts."""
    return s.width.compute * s.stream + of_experts(s, layer, routed_backward)


def at_norm(s: Sizes, layer: int) -> int:
    """The most beyond that in the backward of the norm before it, when its own are gone."""
    gone = s.width.compute * (1 + s.gates) * s.inner(layer) + of_experts(s, layer, routed_everything)
    return s.width.compute * s.stream + _in_norm(s) - gone


def at_attention(s: Sizes, layer: int) -> int:
    """The most beyond that in the backward of its attention, when the feed-forward layer's are gone."""
    spec, b = s.spec, s.width.compute
    gone = b * (2 * s.stream + (1 + s.gates) * s.inner(layer)) + s.numbers(1, s.own)
    gone += of_experts(s, layer, routed_everything)
    if spec.layout.cp > 1:
        return _across_ranks(s) - gone - b * _output_again(s)
    heads = 2 * (s.queries + s.out) + s.keys + s.values
    there = b * (s.stream + heads) + s.width.exact * (s.keys + s.values)
    keys, sequences = spec.data.seq_len, spec.micro_batch
    rows = min(keys, query_rows(sequences, s.heads, keys, b))
    tile = b * sequences * s.heads * rows * keys
    return there - gone + 3 * tile + 2 * b * s.queries * rows // keys


def _across_ranks(s: Sizes) -> int:
    """What is there in the backward of attention over context ranks (`parallel/ring_attention.py`) beyond
    what is kept.

    Queries and their gradients are laid out by key heads, and sums are in wider numbers. In a ring the sums
    for keys and values go home as the next ones come; where all are gathered, so are the sums.
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
    return held + (1 if ring == 2 else 2) * pair + 3 * sums + tiles  # what leaves, what comes, what is added


def _of_tiles(s: Sizes, ring: int) -> int:
    """Two tiles of scores; copies of their queries, of all values; what hides scores, or gradients of keys.

    Where documents are told apart, they are taken to be halves of a sample.
    """
    spec, b = s.spec, s.width.compute
    ulysses = spec.layout.ulysses(spec.model.kv_heads)
    length, sequences = spec.data.seq_len // spec.layout.cp * ulysses, spec.micro_batch
    seen = length // 2 if spec.data.pack and spec.data.document_mask else length
    groups = sequences * spec.layout.local_kv_heads(spec.model.kv_heads) // ulysses
    run = length if ring == 1 else length // 2
    rows, scores = part_tile(seen, run, groups, s.queries // s.keys)
    copies = 2 * (s.queries * rows // length + groups * length) + s.keys
    return b * (2 * scores + copies) + max(b * s.keys, 3 * sequences * rows**2)
