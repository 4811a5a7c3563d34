"""Sizes that a layer's messages depend on: tokens, channels, element sizes and process groups of one rank."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import inf

from meshwright.planner.group_shapes import Axes, GroupShape, axes
from meshwright.planner.rank_view import ALL_TRAINED, BlockTraining, loss_by_kernel, recomputed, widths
from meshwright.spec import Layout, ModelSpec, MoeSpec, RunSpec

ROW_KEY = 8
"""Bytes of a token's key."""


@dataclass(frozen=True)
class LayerShape:
    """One rank's share of a layer, for one microbatch."""

    model: ModelSpec
    layout: Layout
    sequences: int
    """Sequences of a microbatch."""
    length: int
    """Tokens of a sequence, over all context ranks."""
    width: float
    """Bytes of an element in the compute format."""
    exact: int
    """Bytes of an element that is accumulated: log-sum-exps, router weights, gradients of keys and values."""
    repeated: frozenset[str] = frozenset()
    """Operators that the backward runs again: 'matmul', 'attention', 'exchange' (Ulysses)."""
    on_cpu: bool = False
    """True if the layer runs on processors, where the loss is computed in smaller chunks."""
    training: BlockTraining = ALL_TRAINED
    """Parameters of the layer that are trained."""
    rank: int = 0
    """Rank of the adapters of a run that has any."""
    drops: bool = False
    """True if numbers of their inputs are dropped."""
    row_key: int = 0
    """Bytes of the key of a row's token, by which adapters of routed experts drop some of what it brings."""
    log_probs: bool = False
    """True if the head gives log-probabilities of targets to a loss of whole answers."""
    loss_by_kernel: bool = False
    """True if kernels take the loss of all logits of a chunk at once."""
    admitted: float = 1.0
    """Copies that the experts' capacity admits, or that padding makes of them, over those of all tokens."""
    busiest: float = 1.0
    """Rows of the expert ranks that others wait for, over those that an even router deals out."""

    @cached_property
    def groups(self) -> Axes:
        """The process groups of the layout."""
        return axes(self.layout)

    @cached_property
    def tokens(self) -> int:
        """Tokens of a microbatch on one context rank."""
        return self.sequences * self.length // self.layout.cp

    @cached_property
    def own(self) -> int:
        """Tokens of the residual stream that one tensor rank holds."""
        return self.tokens // (self.layout.tp if self.layout.sequence_parallel else 1)

    @cached_property
    def stream(self) -> int:
        """Elements of the residual stream, over all tensor ranks."""
        return self.tokens * self.model.hidden

    @cached_property
    def q(self) -> int:
        """Channels of the queries on one tensor rank."""
        return self.model.heads * self.model.head_dim // self.layout.tp

    @cached_property
    def kv(self) -> int:
        """Channels of the keys on one tensor rank, and as many of the values."""
        return self.layout.local_kv_heads(self.model.kv_heads) * self.model.head_dim

    @cached_property
    def rows(self) -> int:
        """Rows of the vocabulary on one tensor rank, padding included."""
        return -(-self.model.vocab_size // self.layout.tp)

    @cached_property
    def moe(self) -> MoeSpec:
        """The mixture of experts of a model that has one."""
        assert self.model.moe is not None
        return self.model.moe

    @cached_property
    def copies(self) -> float:
        """Rows that a rank sends to the experts, or receives: top_k for each token, and each slice, less what
        is dropped."""
        every = self.tokens / self.layout.tp * self.moe.top_k * self.layout.etp
        return every * self.admitted * self.busiest

    def sent(self, parts: int = 1) -> list[float]:
        """Rows in the message of each of the `parts` of a microbatch to the experts, and in that back, with
        those that stay: as many as there are copies, or as there is room for."""
        layout, tokens = self.layout, self.tokens // self.layout.tp
        factor, count = layout.expert_buffer_factor, min(parts, tokens)
        if factor is None or not layout.bounds_dispatch:
            return [self.copies / count] * count
        sizes = [tokens // count + (part < tokens % count) for part in range(count)]
        return [
            float(layout.ep * layout.etp * self.moe.buffer_rows(size, layout.ep, factor)) for size in sizes
        ]

    @cached_property
    def ulysses(self) -> GroupShape:
        """Context ranks that exchange tokens for heads."""
        return GroupShape(self.layout.ulysses(self.model.kv_heads), self.groups.context.stride)

    @cached_property
    def ring(self) -> GroupShape:
        """Context ranks between which keys and values travel; with `context_mode` 'gather', all of them."""
        ranks, stride = self.ulysses
        return GroupShape(self.layout.cp // ranks, stride * ranks)

    @cached_property
    def reduction(self) -> str:
        """The operation that sums the outputs of a row-parallel map over tensor ranks."""
        return "reduce_scatter" if self.layout.sequence_parallel else "all_reduce"

    @property
    def feed_forward_input(self) -> bool:
        """True if the input of the feed-forward layer, after its norm, has a gradient."""
        training = self.training
        return (
            training.attention_input
            if self.model.parallel_block
            else (training.attention or training.trains("mlp_norm."))
        )

    def maps(self, routed: bool) -> int:
        """Parallel regions of a layer: attention, and a feed-forward network that all tokens take."""
        return 1 + (not routed or self.moe.shared_ffn > 0)


def layer_shape(spec: RunSpec, on_cpu: bool = False) -> LayerShape:
    """The shape of a run's layers, in the formats that the program computes and accumulates in."""
    width = widths(spec)
    again = {kind for kind in ("matmul", "attention") if recomputed(spec, kind)}
    again |= set() if spec.recompute.policy == "none" else {"exchange"}
    size = spec.micro_batch, spec.data.seq_len, width.compute, width.exact
    shape = LayerShape(spec.model, spec.layout, *size, frozenset(again), on_cpu)
    if spec.model.moe is not None:
        shape = replace(shape, admitted=admitted(spec, spec.model.moe))
    if (lora := spec.lora) is not None:
        drops = lora.dropout > 0
        shape = replace(shape, rank=lora.rank, drops=drops, row_key=ROW_KEY * drops)
    by_kernel = loss_by_kernel(spec, on_cpu)
    return replace(shape, log_probs=spec.preference is not None, loss_by_kernel=by_kernel)


def routed_tokens(spec: RunSpec) -> int:
    """Tokens of a microbatch that one rank routes: its own, even if every tensor rank holds all of them."""
    return spec.micro_batch * spec.data.seq_len // (spec.layout.cp * spec.layout.tp)


def admitted(spec: RunSpec, moe: MoeSpec) -> float:
    """The share of a token's copies that the experts' capacity admits, under an even router."""
    return min(1.0, expert_room(spec, moe))


def expert_room(spec: RunSpec, moe: MoeSpec) -> float:
    """Most copies of a sequence in one expert, over an even share of them; infinite without a capacity."""
    length = spec.data.seq_len
    capacity = moe.capacity(length)
    return inf if capacity is None else capacity * moe.experts / (moe.top_k * length)


def balance_counts(model: ModelSpec, moe: MoeSpec) -> int:
    """Numbers that a step sums over all ranks to report the balance of every layer with experts."""
    layers = (*range(model.layers), *model.mtp_layers)
    return sum(map(model.has_experts, layers)) * (moe.experts + 4)
