"""Products that overlap with their own messages, as what they launch and send on a faked GPU.

Torch's symmetric memory multiplies the rows of each rank as they arrive, and sends those of each as they are
done (`_pipelined_multi_all_gather_and_consume` and `_pipelined_produce_and_all2all` of torch 2.13). In a
trace they are these parts: products of one rank's rows, and messages of them on the stream of the group, so
that clocks fill the pipeline of both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory
from torch import Tensor

from meshwright.dryrun.trace import Trace

_group_of: Callable[[Any], dist.ProcessGroup] = dist.distributed_c10d._resolve_process_group  # type: ignore[attr-defined]
"""A process group by its name."""


def fused_products(trace: Trace) -> dict[Any, Callable[..., Any]]:
    """Operator -> a function that calls its parts, and tells `trace` of its messages."""

    def gather_matmul(
        part_ND: Tensor, maps_DF: list[Tensor], _dim: int, name: Any, *, return_A: bool = True
    ) -> tuple[Tensor | None, list[Tensor]]:
        group = _group_of(name)
        whole = part_ND.new_empty(group.size() * part_ND.shape[0], part_ND.shape[1])
        rows = whole.chunk(group.size())
        found = [part_ND.new_empty(len(whole), each.shape[1]) for each in maps_DF]
        rows[0].copy_(part_ND)  # to where the other ranks read it
        coming = [trace.sent("tensor", "shift", group, [part_ND], [each]) for each in rows[1:]]
        for place, own in enumerate(rows):
            if place:
                trace.waited(coming[place - 1])
            for product, each in zip(found, maps_DF, strict=True):
                torch.mm(own, each, out=product.chunk(group.size())[place])
        if return_A:
            rows[0].copy_(part_ND)
        return (whole if return_A else None), found

    def matmul_scatter(x_NF: Tensor, map_FD: Tensor, _reduction: str, _dim: int, name: Any) -> Tensor:
        group = _group_of(name)
        parts = x_NF.new_empty(group.size(), len(x_NF) // group.size(), map_FD.shape[1])
        coming = []
        for place, rows in reversed([*enumerate(x_NF.chunk(group.size()))]):  # this rank's own at the end
            part = parts[place]
            torch.mm(rows, map_FD, out=part)
            if place:
                coming.append(trace.sent("tensor", "shift", group, [part], [part]))
        for each in coming:
            trace.waited(each)
        return parts.sum(0)

    operators = torch.ops.symm_mem
    return {
        operators.fused_all_gather_matmul.default: gather_matmul,
        operators.fused_matmul_reduce_scatter.default: matmul_scatter,
    }
