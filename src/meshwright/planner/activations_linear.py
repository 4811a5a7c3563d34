"""Bytes that a block's linear layers keep of a microbatch: inputs, rounded in low precision."""

from __future__ import annotations

from meshwright.planner.activations_sizes import Sizes


def linear_inputs(s: Sizes, layer: int) -> list[int]:
    """Bytes of the inputs of a block's linear layers that are kept for nothing else.

    Those in low precision have fewer bits where tensor ranks do not gather them, beside attention's output,
    which it keeps itself, and what a router and its experts take.
    """
    model, tp, b = s.spec.model, s.spec.layout.tp, s.width.compute
    hidden, channels, out = model.hidden, s.channels(layer) // tp, s.heads * model.v_dim
    queries, keys = s.queries // s.tokens, s.keys // s.tokens
    feed, whole = feed_forward_input(s, layer), b * s.stream
    if (mla := model.mla) is None:
        found = [whole if s.gathers else s.input(s.stream, hidden, queries, keys)]
    else:
        latents = [mla.q_rank or queries, mla.kv_rank + mla.rope_dim]
        found = [s.input(s.stream, hidden, *latents)]
        for rank, width in ((mla.q_rank or 0, queries), (mla.kv_rank, keys)):
            found.append(b * s.own * rank if s.gathers else s.input(s.own * rank, rank, width))
    if model.parallel_block and (s.gathers or found[0] == whole):
        found[0] = 0  # both layers keep one tensor
    inner = s.input(s.inner(layer), hidden, channels)
    kept = s.input(s.tokens * out, hidden, out) if output_again(s) or s.takes(hidden, out) else 0
    return [*found, *([feed] if feed else []), inner, *([kept] if kept else [])]


def feed_forward_input(s: Sizes, layer: int) -> int:
    """Bytes that are kept of the input of a block's feed-forward layer, that of a router included."""
    model, whole = s.spec.model, s.width.compute * s.stream
    rounded = s.input(s.stream, model.hidden, s.channels(layer) // s.spec.layout.tp)
    if s.gathers or rounded == whole:
        return whole
    if not model.has_experts(layer):
        return rounded
    return whole + (rounded if s.channels(layer) else 0)


def inside(s: Sizes, layer: int) -> int:
    """Bytes that a feed-forward layer keeps between its products."""
    inner, channels = s.inner(layer), s.channels(layer) // s.spec.layout.tp
    return s.width.compute * s.gates * inner + s.input(inner, s.spec.model.hidden, channels)


def at_rounded_gradients(s: Sizes, layer: int) -> int:
    """Bytes while gates' gradients are multiplied: these, rounded for both dims, and a weight."""
    assert s.rounded is not None
    b, gradients = s.width.compute, s.gates * s.inner(layer)
    weight = s.spec.model.hidden * s.channels(layer) // s.spec.layout.tp
    return round(b * (s.stream + gradients) + s.rounded * (2 * gradients + weight))


def output_again(s: Sizes) -> int:
    """Elements of a copy of attention's output: exchanged over context ranks, or cut to narrow values."""
    layout, model = s.spec.layout, s.spec.model
    again = layout.cp > 1 and (layout.ulysses(model.kv_heads) > 1 or model.v_dim < model.head_dim)
    return s.tokens * s.heads * model.v_dim if again else 0
