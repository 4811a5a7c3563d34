"""Bytes that the routed experts of one block keep of a microbatch on one rank, where the router is even.

For N tokens of this rank with k of E experts each, R rows of D channels at the experts that are here (each
expert's padded to a multiple of 16), and F channels of one expert on this rank, with b bytes to compute in
and a of sums:

    rows        R (b (D + 2 F) + a)                  x, its products with gate and up, and its weight
    router      N (a (E + k + 1) + 8 k)              scores, weights before they are divided by their sum
    indices     8 (2 R + 2 N k), or across ranks 8 (R + C + 3 N k t)    C copies come, t slices of an expert

The router's losses add some numbers a token. Selective recomputation keeps the products and what came for
them; every policy keeps the indices, and what ranks tell each other.
"""

from __future__ import annotations

from math import ceil

from meshwright.planner.rank_view import recomputed, widths
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


def _copies(spec: RunSpec, moe: MoeSpec, tokens: int) -> float:
    """Copies that come to each expert that is here, of a part of so many tokens on each rank."""
    ranks = spec.layout.ep * spec.layout.etp
    return tokens * moe.top_k * admitted(spec, moe) * ranks / moe.experts


def _rows(spec: RunSpec, moe: MoeSpec) -> int:
    """Rows of the experts that are here, over all parts, padding included."""
    here = moe.experts // spec.layout.ep
    return sum(here * ceil(_copies(spec, moe, part) / ALIGN) * ALIGN for part in _parts(spec))


def _indices(spec: RunSpec, moe: MoeSpec) -> int:
    """Bytes of what tells where copies come from and go to."""
    layout, tokens, rows = spec.layout, routed_tokens(spec), _rows(spec, moe)
    leaving = tokens * moe.top_k * layout.etp
    coming = round(leaving * admitted(spec, moe))
    if layout.ep * layout.etp == 1:
        return INDEX * (2 * rows + coming + leaving)
    return INDEX * (rows + 3 * coming + leaving)


def _router(spec: RunSpec, moe: MoeSpec) -> int:
    """Bytes of what the router and its losses keep, the tokens themselves left out."""
    tokens, exact = routed_tokens(spec), widths(spec).exact
    found = tokens * (moe.experts * exact + moe.top_k * INDEX)
    if moe.renormalise:
        found += tokens * (moe.top_k + 1) * exact
    if moe.aux_loss:
        found += tokens * (INDEX + (moe.experts + 1) * exact) + 2 * spec.micro_batch * moe.experts * exact
    if moe.z_loss:
        found += tokens * (moe.experts + 1) * exact
    if moe.capacity_factor is not None:
        found += tokens * spec.layout.tp * moe.top_k  # of all tensor ranks: which copies find room
    return found


def routed_everything(spec: RunSpec, moe: MoeSpec) -> int:
    """What they keep without recomputation, beside the router's input."""
    width, rows = widths(spec), _rows(spec, moe)
    channels = spec.model.hidden + 2 * moe.ffn // spec.layout.etp
    return rows * (width.compute * channels + width.exact) + _router(spec, moe) + _indices(spec, moe)


def routed_saved(spec: RunSpec, moe: MoeSpec) -> int:
    """What they keep for a second forward."""
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
    rows = _rows(spec, moe)
    found += rows * 2 * moe.ffn // layout.etp * width.compute
    found += routed_tokens(spec) * moe.experts * width.exact
    return found + (rows * (spec.model.hidden * width.compute + width.exact) if ranks > 1 else 0)


def routed_put_off(spec: RunSpec, moe: MoeSpec) -> int:
    """What the gradients of their weights need, where these are put off: rows, and gradients of rows."""
    width, channels = widths(spec), moe.ffn // spec.layout.etp
    return _rows(spec, moe) * (width.compute * (2 * spec.model.hidden + 4 * channels) + width.exact)


def routed_backward(spec: RunSpec, moe: MoeSpec) -> int:
    """The most beyond what they keep in their backward: gradients of rows, and of all three weights."""
    layout, hidden, channels = spec.layout, spec.model.hidden, moe.ffn // spec.layout.etp
    rows = _rows(spec, moe) // len(_parts(spec))
    weights = 3 * (moe.experts // layout.ep) * hidden * channels
    return widths(spec).compute * (rows * (2 * hidden + 5 * channels) + weights)


def routed_packed(spec: RunSpec, moe: MoeSpec) -> int:
    """The same when what they kept is gone, and the weights' gradients are taken over."""
    layout, hidden, channels = spec.layout, spec.model.hidden, moe.ffn // spec.layout.etp
    weights = 3 * (moe.experts // layout.ep) * hidden * channels
    return widths(spec).compute * (weights - 2 * channels * _rows(spec, moe))
