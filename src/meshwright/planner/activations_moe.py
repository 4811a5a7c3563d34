"""Bytes that one block's routed experts keep of a microbatch on one rank, where the router is even.

For N tokens of this rank with k of E experts each, R rows of D channels at the experts of this rank (each
expert's padded to a multiple of 16), and F channels of one expert on this rank, with b bytes to compute in
and a of sums:

    rows        R (b (D + 2 F) + a)                  x, its products with gate and up, and its weight
    router      N (a (E + k + 1) + 8 k)              scores, weights before they are divided by their sum
    indices     8 (2 R + 2 N k), or across ranks 8 (R + C + 3 N k t)    C copies arrive, t slices of an expert

The router's losses add some numbers a token. Selective recomputation keeps the products and the rows that
arrived for them; every policy keeps the indices and the counts that ranks exchange.
"""

from __future__ import annotations

from math import ceil

from meshwright.planner.rank_view import added_by_products, recomputed, sum_width, widths
from meshwright.planner.traffic.layer_shape import admitted, routed_tokens
from meshwright.spec import MoeSpec, RunSpec
from meshwright.spec.tiling import ALIGN

INDEX = 8
"""Bytes of an index."""


def _parts(spec: RunSpec) -> list[int]:
    """Tokens of each part of a microbatch."""
    tokens = routed_tokens(spec)
    count = min(spec.layout.expert_parts, tokens)
    return [tokens // count + (part < tokens % count) for part in range(count)]


def routed_rows(spec: RunSpec, moe: MoeSpec) -> int:
    """Rows of the experts of this rank, over all parts, padding included."""
    here, ranks = moe.experts // spec.layout.ep, spec.layout.ep * spec.layout.etp
    if spec.layout.bounds_dispatch:
        return sum((rows + here * (ALIGN - 1)) // ALIGN * ALIGN for rows in _bounded(spec, moe))
    copies = [part * moe.top_k * admitted(spec, moe) * ranks / moe.experts for part in _parts(spec)]
    return sum(here * ceil(each / ALIGN) * ALIGN for each in copies)


def _bounded(spec: RunSpec, moe: MoeSpec) -> list[int]:
    """Rows that arrive in each part of messages that are bounded, and that leave."""
    ranks, factor = spec.layout.ep * spec.layout.etp, spec.layout.expert_buffer_factor
    assert factor is not None
    return [ranks * moe.buffer_rows(part, spec.layout.ep, factor) for part in _parts(spec)]


def _indices(spec: RunSpec, moe: MoeSpec) -> int:
    """Bytes of the indices by which copies are sent and returned."""
    layout, tokens, rows = spec.layout, routed_tokens(spec), routed_rows(spec, moe)
    leaving = tokens * moe.top_k * layout.etp
    arriving = round(leaving * admitted(spec, moe))
    if layout.ep * layout.etp == 1:
        return INDEX * (2 * rows + arriving + leaving)
    if layout.bounds_dispatch:
        arriving = sum(_bounded(spec, moe))
    return INDEX * (rows + 3 * arriving + leaving)


def _router(spec: RunSpec, moe: MoeSpec) -> int:
    """Bytes that the router and its losses keep, without the tokens themselves."""
    tokens, exact = routed_tokens(spec), widths(spec).exact
    found = tokens * (moe.experts * exact + moe.top_k * INDEX)
    if moe.renormalise:
        found += tokens * (moe.top_k + 1) * exact
    if moe.aux_loss:
        found += tokens * (INDEX + (moe.experts + 1) * exact) + 2 * spec.micro_batch * moe.experts * exact
    if moe.z_loss:
        found += tokens * (moe.experts + 1) * exact
    if moe.capacity_factor is not None:
        found += tokens * spec.layout.tp * moe.top_k  # admitted copies of all tensor ranks
    return found


def routed_everything(spec: RunSpec, moe: MoeSpec) -> int:
    """Bytes kept without recomputation, besides the router's input."""
    width, rows = widths(spec), routed_rows(spec, moe)
    channels = spec.model.hidden + 2 * moe.ffn // spec.layout.etp
    return rows * (width.compute * channels + width.exact) + _router(spec, moe) + _indices(spec, moe)


def routed_saved(spec: RunSpec, moe: MoeSpec) -> int:
    """Bytes kept for a second forward."""
    layout, width, found = spec.layout, widths(spec), _indices(spec, moe)
    ranks = layout.ep * layout.etp
    if ranks > 1:
        found += len(_parts(spec)) * ranks * (moe.experts // layout.ep) * INDEX
    if moe.aux_loss:
        found += spec.micro_batch * moe.experts * 4
    if moe.capacity_factor is not None:
        found += spec.micro_batch * spec.data.seq_len * moe.top_k * 4
    if recomputed(spec, "matmul"):
        return found
    rows = routed_rows(spec, moe)
    found += rows * 2 * moe.ffn // layout.etp * width.compute
    found += routed_tokens(spec) * moe.experts * width.exact
    return found + (rows * (spec.model.hidden * width.compute + width.exact) if ranks > 1 else 0)


def routed_deferred(spec: RunSpec, moe: MoeSpec) -> int:
    """Bytes that deferred weight gradients need: rows, and gradients of rows."""
    width, channels = widths(spec), moe.ffn // spec.layout.etp
    return routed_rows(spec, moe) * (width.compute * (2 * spec.model.hidden + 4 * channels) + width.exact)


def _weights(spec: RunSpec, moe: MoeSpec) -> int:
    """Elements of all three weights of the experts of this rank."""
    return 3 * (moe.experts // spec.layout.ep) * spec.model.hidden * (moe.ffn // spec.layout.etp)


def routed_backward(spec: RunSpec, moe: MoeSpec, cpu: bool) -> int:
    """Peak bytes beyond kept ones in the backward, before any weight's gradient is packed."""
    width, rows = widths(spec), routed_rows(spec, moe) // len(_parts(spec))
    # A CPU sums the gradients of rows' weights in a wider copy.
    times = (4 if moe.activation == "swiglu" else 7) + (2 if cpu and width.compute < width.exact else 0)
    activation = rows * (spec.model.hidden + times * (moe.ffn // spec.layout.etp))
    if added_by_products(spec, routed=True):
        return width.compute * activation
    return width.compute * max(activation, _row_gradients(spec, moe) + _weights(spec, moe))


def routed_packed(spec: RunSpec, moe: MoeSpec, cpu: bool) -> int:
    """Bytes beyond kept ones while weight gradients are packed: by products, or after saved activations were
    freed."""
    width, weights = widths(spec), _weights(spec, moe)
    if not added_by_products(spec, routed=True):
        return width.compute * (weights - 2 * (moe.ffn // spec.layout.etp) * routed_rows(spec, moe))
    found = width.compute * _row_gradients(spec, moe)
    if sum_width(spec) == width.compute:
        return found
    one_kernel = not cpu and spec.precision.base == "bf16"
    product = weights // (3 if one_kernel else 3 * (moe.experts // spec.layout.ep))
    return found + product * (width.compute + (width.exact if cpu else 0))


def _row_gradients(spec: RunSpec, moe: MoeSpec) -> int:
    """Elements of the gradients of a part's rows, from those of its outputs to those of its inputs."""
    rows = routed_rows(spec, moe) // len(_parts(spec))
    return rows * (2 * spec.model.hidden + 4 * (moe.ffn // spec.layout.etp))
