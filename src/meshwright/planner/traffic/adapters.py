"""Messages of adapters of low rank within a layer (`parallel/tensor_lora.py`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from meshwright.planner.traffic.layer_shape import LayerShape
from meshwright.planner.traffic.message import Message, Phase, Where


def adapter_messages(shape: LayerShape, where: Where, again: Sequence[Phase]) -> Iterator[Message]:
    """Products with A, which enter or leave the parallel regions; those that the backward recomputes are
    sent in the phases `again`, too."""
    call = partial(Message, "tensor", width=shape.width, group=shape.groups.tensor, where=where)
    training, each, sequence = shape.training, shape.tokens * shape.rank, shape.layout.sequence_parallel
    prefix = "mlp.shared." if where == "moe" else "mlp."
    attention = ("q", "k", "v") if shape.model.mla is None else ("q",)
    entering = [[f"attn.{name}" for name in attention], ["attn.kv"], [f"{prefix}gate", f"{prefix}up"]]
    for layers in entering:
        if elements := each * training.adapters(*layers):
            if sequence:
                yield from (call("all_gather", elements, phase=phase) for phase in (Phase.FORWARD, *again))
            yield call(shape.reduction, elements, phase=Phase.INPUT)
    for layer in ("attn.o", f"{prefix}down"):
        if elements := each * training.adapters(layer):
            yield from (call(shape.reduction, elements, phase=phase) for phase in (Phase.FORWARD, *again))
            if sequence:
                yield call("all_gather", elements, phase=Phase.INPUT)
        if not training.rescales(layer):
            continue
        for phase in (Phase.FORWARD, *again):
            yield call("all_reduce", shape.model.hidden, width=shape.exact, phase=phase)
        if shape.drops:  # the product with what is left of the input
            yield from (call(shape.reduction, shape.stream, phase=phase) for phase in (Phase.FORWARD, *again))
            if sequence:
                yield call("all_gather", shape.stream, phase=Phase.INPUT)
