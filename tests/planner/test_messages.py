"""The tables of bytes in docs/parallelism.md are sums over the messages that the planner lists."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from meshwright.hardware.cluster import AttentionTime, ProfiledTimes
from meshwright.hardware.find import cluster
from meshwright.planner.cost.model import CostModel
from meshwright.planner.cost.step import step_time
from meshwright.planner.explain.link_load import communication
from meshwright.planner.rank_view import share
from meshwright.planner.traffic.layer_messages import (
    Copies,
    end_messages,
    expert_messages,
    layer_messages,
)
from meshwright.planner.traffic.layer_shape import LayerShape, layer_shape
from meshwright.planner.traffic.message import Message, Phase
from meshwright.planner.traffic.messages import messages
from meshwright.spec import RunSpec
from meshwright.spec.parameters import block_parameters
from small import spec_of

DOCUMENT = (Path(__file__).parents[2] / "docs" / "parallelism.md").read_text()
BASE = {
    "model.vocab_size": 64, "model.heads": 8, "model.kv_heads": 4, "data.corpus": "synthetic",
    "data.seq_len": 16, "layout.micro_batch": 2, "precision.compute": "bf16",
}  # fmt: skip
BACKWARD = (Phase.INPUT, Phase.WEIGHT)


def rows(header: str) -> list[list[str]]:
    """The cells of the table whose header starts so."""
    after = DOCUMENT[DOCUMENT.index(header) :].splitlines()[2:]
    lines = after[: next(place for place, line in enumerate(after) if not line.startswith("|"))]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def value(formula: str, **names: float) -> float:
    """A formula as the documents write it: factors side by side, ' x ' for a product."""
    tokens = re.findall(r"[A-Za-z]+'?|\d+|[()+*/-]", formula.replace(" x ", " * "))
    code = " ".join(
        f"* {token}"
        if place and re.match(r"[\w(]", token) and re.match(r"[\w)]", tokens[place - 1])
        else token
        for place, token in enumerate(tokens)
    )
    result: float = eval(code.replace("M'", "received"), {}, {**names, "received": names.get("R", 0)})
    return result


def sent(listed: Iterable[Message], *phases: Phase, axis: str = "") -> float:
    return sum(m.count * m.sent for m in listed if m.phase in (phases or Phase) and axis in ("", m.axis))


def calls(listed: Iterable[Message], operation: str, *phases: Phase) -> float:
    return sum(m.count for m in listed if m.operation == operation and m.phase in (phases or Phase))


def shape_of(**flags: object) -> tuple[RunSpec, LayerShape]:
    spec = spec_of(BASE, **flags)
    return spec, layer_shape(spec)


@pytest.mark.parametrize("cells", rows("| stage | collectives | bytes |"), ids=str)
def test_bytes_of_each_stage_of_zero(cells: list[str]) -> None:
    flags = {"layout__dp": 4, "layout__zero": cells[0], "train__batch_tokens": 16 * 2 * 4 * 3}
    deep, shallow = (spec_of(BASE, **flags, model__layers=layers) for layers in (6, 5))
    block = sum(parameter.size for parameter in block_parameters(deep.model, 2))
    found = sent(messages(deep)) - sent(messages(shallow))  # of a block in the middle
    assert found == value(cells[2], P=block, a=deep.microbatches, b=2, r=4, f=share(4))


@pytest.mark.parametrize("cells", rows("| `layout.context_mode` |")[:3], ids=str)
def test_bytes_of_each_context_mode(cells: list[str]) -> None:
    spec, shape = shape_of(layout__cp=4, layout__context_mode=cells[0].strip("`"), recompute__policy="full")
    model, listed = spec.model, layer_messages(shape, False)
    names = {"N": shape.tokens, "H": model.heads, "K": model.kv_heads, "d": model.head_dim, "a": 4, "b": 2}
    names |= {"n": 4, "f": share(4)}
    parts = re.fullmatch("(?:forward )?(.*), (?:backward (.*)|forward and backward each)", cells[2])
    assert parts is not None
    assert sent(listed, Phase.FORWARD) == sent(listed, Phase.RECOMPUTE) == value(parts[1], **names)
    assert sent(listed, *BACKWARD) == value(parts[2] or parts[1], **names)


@pytest.mark.parametrize("sequence", ["true", "false"])
def test_calls_around_a_block_and_the_ends(sequence: str) -> None:
    _, shape = shape_of(layout__tp=2, layout__sequence_parallel=sequence, recompute__policy="full")
    listed = layer_messages(shape, False)
    ends = [m for head in (False, True) for m in end_messages(shape, head) if m.where != "loss"]
    shared, whole, again, ends_shared, ends_whole = rows("| | all-gathers | reduce-scatters | all-reduces |")
    assert {m.size for m in (*listed, *ends)} == {shape.tokens * shape.model.hidden * 2}
    for place, operation in enumerate(("all_gather", "reduce_scatter", "all_reduce"), 1):
        found = [calls(listed, operation, Phase.FORWARD), calls(listed, operation, *BACKWARD)]
        told = [int(n) for n in re.findall(r"\d+", (shared if sequence == "true" else whole)[place])]
        assert ([sum(found), *found] if any(found) else []) == told
        told = [
            int(n) for n in re.findall(r"\d+", (ends_shared if sequence == "true" else ends_whole)[place])
        ]
        assert calls(ends, operation) == sum(told)
        repeated = int(re.findall(r"\d+", again[place])[0])
        assert calls(listed, operation, Phase.RECOMPUTE) == (
            repeated if (operation == "all_reduce") == (sequence == "false") else 0
        )


def test_bytes_of_experts() -> None:
    flags = {
        "layout__tp": 2, "layout__dp": 4, "layout__ep": 4, "layout__etp": 2,
        "layout__sequence_parallel": "false", "recompute__policy": "full", "model__moe__experts": 8,
        "model__moe__top_k": 2, "model__moe__ffn": 8, "model__moe__capacity_factor": 1.0,
        "model__moe__aux_loss": 0.1,
    }  # fmt: skip
    spec, shape = shape_of(**flags)
    trip, layer = list(expert_messages(shape, Copies(30, 20))), layer_messages(shape, True)
    counts = [m for m in trip if m.width == 8]
    formulas = [cells[2].partition(",")[0] for cells in rows("| axis, collective | when | bytes |")]
    world = next(m for m in messages(spec) if m.axis == "world")
    layers = [
        sent(counts),
        sent(trip, Phase.FORWARD) - sent(counts),
        sent(trip, *BACKWARD),
        sent(trip, Phase.RECOMPUTE),
        sent((m for m in layer if m.operation == "all_reduce"), axis="sequence"),
        sent((m for m in layer if m.operation == "all_gather"), axis="sequence"),
        (world.elements - 5) / spec.model.layers * 8 * 2 * share(world.group.ranks),
        sent((m for m in layer if m.operation == "all_gather"), axis="tensor"),
    ]
    names = {"M": 30, "R": 20, "n": 8, "E": 8, "ep": 4, "B": 2, "T": 16, "k": 2, "a": 4, "b": 2}
    names |= {"D": spec.model.hidden, "N": shape.tokens}
    ranks = [8, 8, 8, 8, 2, 2, 8, 2]
    assert layers == [value(text, **names, f=share(n)) for text, n in zip(formulas, ranks, strict=True)]


@pytest.mark.parametrize("seconds", [1e-7, 1e-2])
def test_seconds_by_themselves_do_not_depend_on_compute(seconds: float) -> None:
    """Attention that was measured hides a ring's transfers; how long these take does not change."""
    spec = spec_of(BASE, layout__cp=2, data__seq_len=128, layout__micro_batch=1)
    model = spec.model
    measured = tuple(
        AttentionTime("bf16", batch, model.heads, model.kv_heads, model.head_dim, length, seconds, seconds)
        for batch, length in product((1, 2), (32, 64, 128))
    )
    known = ProfiledTimes(attention=measured, collective_compute={"shift": 0.0})
    on = CostModel(replace(cluster("cpu", 2), measured=known))
    (ring,) = (load for load in communication(spec, on, step_time(spec, on)) if load.axis == "context")
    calls = layer_messages(layer_shape(spec, on_cpu=True), False)
    alone = sum(m.count * on.links.seconds(m) for m in calls)
    assert ring.seconds == pytest.approx(spec.microbatches * model.layers * alone)
    assert ring.hidden == pytest.approx(1.0 if seconds > 1e-3 else 0.0, abs=0.1)
