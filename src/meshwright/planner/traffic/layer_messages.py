"""Messages inside a layer and around the ends of the model, in one microbatch, call by call."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from meshwright.planner.group_shapes import GroupShape
from meshwright.planner.rank_view import share
from meshwright.planner.traffic.adapters import adapter_messages
from meshwright.planner.traffic.layer_shape import LayerShape
from meshwright.planner.traffic.message import Message, Overlap, Phase, Where
from meshwright.spec.tiling import loss_pieces

COUNT = 8
"""Bytes of an int64 count or a float64 sum."""
_SMALL = 4
"""Bytes of a number of the router's: counts in fp32, chosen experts in int32."""


class Copies(NamedTuple):
    """Copies of tokens that a rank sends to the experts of other ranks in one dispatch, and receives."""

    sent: float
    received: float


def layer_messages(shape: LayerShape, routed: bool) -> list[Message]:
    """Messages inside one layer, dense or with routed experts; the router is even."""
    where: Where = "moe" if routed else "dense"
    listed = [*_tensor_messages(shape, where), *_context_messages(shape, where)]
    return [*listed, *expert_messages(shape), *_balance_messages(shape)] if routed else listed


def _tensor_messages(shape: LayerShape, where: Where) -> Iterator[Message]:
    """Around the column- and row-parallel maps (`parallel/tensor_linears.py`).

    With latent attention the latents enter, and the part of the keys that all heads share. That part is not
    gathered again, since no weight's gradient needs it.
    """
    if shape.layout.tp == 1:
        return
    call = partial(Message, "tensor", width=shape.width, group=shape.groups.tensor, where=where)
    hidden = partial(call, elements=shape.stream)
    training, outputs = shape.training, shape.maps(where == "moe")
    again = [Phase.RECOMPUTE] * ("matmul" in shape.repeated and training.feed_forward)
    for elements, weights, backward in _entered(shape, outputs):
        if shape.layout.sequence_parallel:
            yield from (call("all_gather", elements, phase=phase) for phase in (Phase.FORWARD, *again))
        if shape.layout.sequence_parallel and weights and backward:
            yield call("all_gather", elements, phase=Phase.WEIGHT, overlaps=Overlap.PRODUCT)
        if backward:
            yield call(shape.reduction, elements, phase=Phase.INPUT)
    if shape.model.qk_norm and shape.model.qk_norm_over == "all":
        repeated = [Phase.RECOMPUTE] * ("exchange" in shape.repeated and training.feed_forward)
        back = training.attention_input or training.trains("attn.q", "attn.k")
        for phase in (Phase.FORWARD, *repeated, *[Phase.INPUT] * back):
            yield call("all_reduce", 2 * shape.tokens, width=shape.exact, phase=phase)
    yield from adapter_messages(shape, where, again)
    yield hidden(shape.reduction, phase=Phase.FORWARD, count=outputs)
    rescaled = training.rescales("mlp.down", "mlp.shared.down")
    read = outputs if shape.model.rereads_outputs or rescaled else 1  # else not of the layer's last map
    yield from (hidden(shape.reduction, phase=phase, count=read) for phase in again)
    if shape.layout.sequence_parallel:
        yield hidden("all_gather", phase=Phase.INPUT, count=_left(shape, where, outputs))
    elif where == "moe":  # each tensor rank routes its own tokens
        phases = Phase.FORWARD, *[Phase.INPUT] * training.feed_forward
        yield from (hidden("all_gather", phase=phase) for phase in phases)


def _left(shape: LayerShape, where: Where, maps: int) -> int:
    """Row-parallel maps whose backward is computed."""
    training, inner = shape.training, "mlp.shared." if where == "moe" else "mlp."
    attention = training.mixed or training.trains_layer("attn.o")
    inside = shape.feed_forward_input or training.trains(f"{inner}gate.", f"{inner}up.")
    return attention + (maps - 1) * (inside or training.trains_layer(f"{inner}down"))


def _entered(shape: LayerShape, maps: int) -> Iterator[tuple[float, bool, bool]]:
    """(elements, whether gradients of weights are computed of them, whether there is a backward) of the
    inputs of column-parallel maps."""
    mla, training = shape.model.mla, shape.training
    given = training.attention_input
    if mla is None:
        weights = training.trains_layer("attn.q", "attn.k", "attn.v")
        yield shape.stream, weights, given or weights
    else:
        weights = training.trains_layer("attn.q")
        latent = given or (mla.q_rank is not None and training.trains("attn.q_a"))
        yield shape.tokens * (mla.q_rank or shape.model.hidden), weights, latent or weights
        weights, latent = training.trains_layer("attn.kv"), given or training.trains("attn.kv_a")
        yield shape.tokens * mla.kv_rank, weights, latent or weights
        yield shape.tokens * mla.rope_dim, False, given or training.trains("attn.kv_a.")
    layers = [f"mlp.{inner}{name}" for inner in ("", "shared.") for name in ("gate", "up")]
    weights = training.trains_layer(*layers)
    yield from [(shape.stream, weights, shape.feed_forward_input or weights)] * (maps - 1)


def _context_messages(shape: LayerShape, where: Where) -> Iterator[Message]:
    """Queries, keys and values (`parallel/ring_attention.py`, `parallel/ulysses.py`)."""
    keys, ring, call = 2 * shape.tokens * shape.kv, shape.ring, partial(Message, "context", where=where)
    training = shape.training
    again = [Phase.RECOMPUTE] * training.feed_forward
    forwards = [Phase.FORWARD, *again * ("attention" in shape.repeated)]
    back = [Phase.INPUT] * training.mixed
    if ring.ranks > 1 and shape.layout.context_mode == "gather":
        whole = partial(call, elements=keys * ring.ranks, group=ring)
        yield from (whole("all_gather", width=shape.width, phase=phase) for phase in forwards)
        yield from (whole("reduce_scatter", width=shape.exact, phase=phase) for phase in back)
    elif ring.ranks > 1:
        shift = partial(call, "shift", keys, group=ring, overlaps=Overlap.ATTENTION)
        for phase in (*forwards, *back):
            yield shift(width=shape.width, phase=phase, count=ring.ranks - 1)
        yield from (shift(width=shape.exact, phase=phase, count=ring.ranks) for phase in back)
    if shape.ulysses.ranks > 1:
        exchange = partial(call, "all_to_all", width=shape.width, group=shape.ulysses)
        for phase in (Phase.FORWARD, *back, *again * ("exchange" in shape.repeated)):
            yield exchange(shape.tokens * (shape.q + 2 * shape.kv), phase=phase)
            yield exchange(shape.tokens * shape.q, phase=phase)


def expert_messages(shape: LayerShape, copies: Copies | None = None) -> Iterator[Message]:
    """One dispatch to the experts and the way back (`parallel/expert_parallel.py`).

    By default each expert is chosen equally often, and takes what its capacity admits. A copy's weight, or
    the gradient of it, is sent in the message that its row is sent in.
    """
    group, hidden = shape.groups.expert, shape.model.hidden
    if group.ranks == 1:
        return
    sent, received = [n / share(group.ranks) for n in copies] if copies else shape.sent() * 2
    call = partial(Message, "expert", "all_to_all", group=group, where="moe")
    weighted = hidden + shape.exact / shape.width
    keyed = weighted + shape.row_key * shape.training.adapts_experts / shape.width
    yield call(shape.moe.experts * shape.layout.etp, COUNT, phase=Phase.FORWARD)
    again = [Phase.RECOMPUTE] * ("matmul" in shape.repeated and shape.training.feed_forward)
    for phase in (Phase.FORWARD, *again):
        yield call(sent * keyed, shape.width, phase=phase)
    yield call(received * hidden, shape.width, phase=Phase.FORWARD)
    if shape.training.feed_forward:
        yield call(sent * hidden, shape.width, phase=Phase.INPUT)
        if shape.feed_forward_input or shape.training.trains("mlp.router."):
            yield call(received * weighted, shape.width, phase=Phase.INPUT)


def _balance_messages(shape: LayerShape) -> Iterator[Message]:
    """Routing statistics of the ranks that share sequences (`parallel/router_balance.py`)."""
    group = GroupShape(shape.layout.cp * shape.layout.tp, shape.groups.tensor.stride)
    call = partial(Message, "sequence", width=_SMALL, group=group, phase=Phase.FORWARD, where="moe")
    if shape.moe.aux_loss:
        yield call("all_reduce", shape.sequences * shape.moe.experts)
    if shape.moe.capacity_factor is not None:
        yield call("all_gather", shape.sequences * shape.length * shape.moe.top_k)


def end_messages(shape: LayerShape, head: bool) -> list[Message]:
    """Messages around the vocabulary-parallel head, or around the embedding.

    Each piece of the head's loss gathers two numbers a token, and log-probabilities three of all tokens.
    """
    if shape.layout.tp == 1:
        return []
    call = partial(Message, "tensor", width=shape.width, group=shape.groups.tensor)
    around = partial(call, elements=shape.stream, where="head" if head else "embedding")
    summed, gathered = (Phase.INPUT, Phase.FORWARD) if head else (Phase.FORWARD, Phase.INPUT)
    listed = [around(shape.reduction, phase=summed)]
    listed += [around("all_gather", phase=gathered)] * shape.layout.sequence_parallel
    how = shape.on_cpu, shape.loss_by_kernel
    each, pieces = 2, loss_pieces(shape.tokens, shape.rows, *how) if head else {}
    if shape.log_probs and head:
        each, pieces = 3, {shape.tokens: 1}
    for tokens, count in pieces.items():
        numbers = replace(listed[0], operation="all_gather", elements=each * tokens * shape.layout.tp)
        listed.append(replace(numbers, width=shape.exact, phase=Phase.FORWARD, where="loss", count=count))
    return listed
