"""Messages of tensor ranks that this program's products hide on GPUs (`parallel/tensor_linears.py`).

In the backward of a column-parallel map its input is gathered again beside the product for the gradient of
the input, and that gradient is summed beside the product for the gradient of the weight. Compiled blocks on
ranks that read each other's memory cut the other products into the rows of each rank, too, which are
multiplied as they arrive, or sent as they are done (torch's symmetric memory, `dryrun/fused_products.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from meshwright.planner.cost.breakdown import Product
from meshwright.planner.cost.collectives import CollectiveCosts
from meshwright.planner.cost.operator_bytes import ForwardBackward
from meshwright.planner.traffic.layer_shape import LayerShape
from meshwright.spec import RunSpec
from meshwright.spec.layers import LayerKind


class ParallelMaps(NamedTuple):
    """The products of the column-parallel maps of a region, and that of the row-parallel one behind them."""

    columns: Sequence[Product]
    row: Product


def overlaps_sums(spec: RunSpec) -> bool:
    """True if backwards hide messages: with all weights trained, and their gradients not put off.

    Pipelines put them off by default, but those of compiled blocks.
    """
    return spec.layout.tp > 1 and spec.trains_all and (spec.layout.pp == 1 or spec.train.compile)


def fuses_products(spec: RunSpec, kind: LayerKind, links: CollectiveCosts, shape: LayerShape) -> bool:
    """True if products overlap with their own messages; low precision and latent attention have no such."""
    group, host = shape.groups.tensor, links.cluster.host
    near = not host or group.ranks * group.stride <= host
    plain = spec.model.mla is None and not kind.has_experts and not spec.precision.low and spec.trains_all
    return spec.train.compile and spec.layout.tp > 1 and spec.layout.sequence_parallel and near and plain


def in_parts(seconds: Callable[[Product], float], p: Product, ranks: int) -> float:
    """Seconds of a product that is cut into the rows of each rank."""
    return ranks * seconds(p._replace(m=max(1, p.m // ranks)))


def hidden_messages(
    maps: Sequence[ParallelMaps],
    seconds: Callable[[Product], float],
    links: CollectiveCosts,
    shape: LayerShape,
    fused: bool,
) -> ForwardBackward:
    """Seconds of a layer's messages that are hidden in its forward, and in its backward."""
    group, size, forward, backward = shape.groups.tensor, shape.stream * shape.width, 0.0, 0.0
    gather = links.collective("all_gather", size, group) if shape.layout.sequence_parallel else 0.0
    total = links.collective(shape.reduction, size, group)
    one = links.to_next("shift", size / group.ranks, group)

    def left(products: Sequence[Product]) -> float:
        """Seconds that remain of the messages of the parts of products, all but one of which travel."""
        part = sum(seconds(p._replace(m=max(1, p.m // group.ranks))) for p in products)
        return (group.ranks - 1) * max(0.0, one - part)

    for columns, row in maps:
        backward += min(gather, sum(seconds(_of_input(p)) for p in columns))
        backward += min(total, sum(seconds(_of_weight(p)) for p in columns))
        if fused:
            forward += max(0.0, gather - left(columns)) + max(0.0, total - left([row]))
            backward += max(0.0, gather - left([_of_input(row)]))
    return ForwardBackward(forward, backward)


def fused_passes(shape: LayerShape, maps: int) -> ForwardBackward:
    """Bytes of a layer's fused products besides: a rank's part is copied to where others read it; parts that
    have come from all ranks are read, and their sum is written; the whole input is copied for gradients of
    weights. Source: counted (tests/dryrun/test_operator_bytes.py)."""
    part, ranks = shape.own * shape.model.hidden * shape.width * maps, shape.layout.tp
    return ForwardBackward((2 + ranks + 1) * part, 2 * ranks * part)


def _of_input(p: Product) -> Product:
    return p._replace(n=p.k, k=p.n)


def _of_weight(p: Product) -> Product:
    return p._replace(m=p.n, n=p.k, k=p.m)
