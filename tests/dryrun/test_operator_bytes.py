"""The planner's memory-bound operators and attention, held to the operators that a dry run records."""

from __future__ import annotations

from collections import defaultdict
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from covering import some
from meshwright import api
from meshwright.dryrun.rank_step import rehearse
from meshwright.dryrun.timeline import kind_of
from meshwright.dryrun.trace import Trace
from meshwright.fake_cuda import library
from meshwright.fake_cuda.process import FakeCudaProcess
from meshwright.fake_cuda.runtime import set_capability
from meshwright.hardware.find import cluster
from meshwright.planner.cost.host import counted_host_seconds
from meshwright.planner.cost.operator_bytes import (
    block_bytes,
    block_kernels,
    embedding_bytes,
    head_bytes,
    unit_copies,
)
from meshwright.planner.cost.software import Hosting
from meshwright.planner.plan import estimate
from meshwright.spec import RunSpec, load

pytestmark = pytest.mark.skipif(
    library.torch_build().toolkit is not None, reason="a GPU is faked for torch's build for CPUs only"
)
RUN: dict[str, object] = {
    "model.preset": "llama3-8b", "model.layers": 8, "data.corpus": "synthetic", "data.seq_len": 8192,
    "train.batch_tokens": 131072, "layout.micro_batch": 1, "precision.compute": "bf16", "layout.dp": 8,
    "layout.zero": 3,
}  # fmt: skip
TENSOR: dict[str, object] = {
    "layout__dp": 1, "layout__zero": 0, "layout__tp": 8, "train__batch_tokens": 16384,
}  # fmt: skip
WITHIN = 0.1


def run(**flags: object) -> RunSpec:
    keys = RUN | {key.replace("__", "."): value for key, value in flags.items()}
    return load(None, [(key, str(value)) for key, value in keys.items()])


def recorded(spec: RunSpec) -> dict[str, float]:
    """Bytes of memory-bound operators of rank 0 in a step, by part; in the process of the faked GPU."""
    set_capability((9, 0))
    device = torch.device("cuda", 0)
    trace, found = Trace(device), defaultdict[str, float](float)
    rehearse(spec, 0, device, trace)
    for event in trace.events:
        if event.kind not in ("kernel", "copy"):
            continue
        kind, unit = kind_of(event), event.module.partition(".")[0] or "embed"
        if kind == "elementwise" and event.name.startswith("aten::add_.") and event.phase == "backward":
            found["sums"] += event.bytes
        elif kind in ("loss", "elementwise", "copies"):
            found[{"loss": "head", "copies": f"{unit} copies"}.get(kind, unit)] += event.bytes
    return dict(found)


def launched(spec: RunSpec) -> dict[str, float]:
    """Operators that the host launches for a block and microbatch, by phase; in the process of the faked
    GPU."""
    set_capability((9, 0))
    device = torch.device("cuda", 0)
    trace, found = Trace(device), defaultdict[str, float](float)
    rehearse(spec, 0, device, trace)
    for event in trace.events:
        if event.module.startswith("blocks") and event.host in ("operator", "compiled"):
            found[event.phase] += 1 / spec.model.layers / spec.microbatches
    return found


def counted(spec: RunSpec) -> dict[str, float]:
    """Bytes of these parts by the planner's numbers, of a dense model without a pipeline."""
    costs = estimate(spec, cluster("h100", spec.layout.world_size)).costs
    blocks = costs.blocks(spec)
    (kind,) = spec.model.kinds
    layers, count, copies = spec.model.layers, spec.microbatches, unit_copies(spec)
    shards = spec.layout.dp
    block, end = layers * blocks.held(kind)[0], blocks.rows * spec.model.hidden
    sharded = spec.layout.zero == 3

    def of_unit(parameters: float, passes: float, packed: float) -> float:
        """Bytes of the copies of units that `passes` of a microbatch need."""
        gathers = passes * count if sharded else 1
        packs = count if sharded else 1
        gathered = gathers * (copies.unpacked + copies.cast / shards)
        return parameters * (gathered + packed * packs)

    head = of_unit(end, 1, copies.packed)
    sums = (block + end) * copies.summed / shards  # the embedding's follow the backward
    if not sharded:
        later = copies.packed + copies.added
        of_blocks = block * (copies.packed_block + copies.added_block)
        head, sums = head + (count - 1) * end * later, end * later + of_blocks
    again = block_bytes(spec, blocks.shape, kind).forward * (spec.recompute.policy != "none")
    return {
        "blocks": layers * count * (sum(block_bytes(spec, blocks.shape, kind)) + again),
        "embed": count * sum(embedding_bytes(spec, blocks.shape)),
        "head": count * sum(head_bytes(spec, blocks.shape)) + head,
        "blocks copies": of_unit(block, 2 - 1 / layers, copies.packed_block),  # the last one stays
        "embed copies": of_unit(end, 1, copies.packed),
        "sums": (count - 1) * sums,
    }


@pytest.fixture(scope="module")
def process() -> Any:
    with FakeCudaProcess() as found:
        yield found


PARTS: list[dict[str, object]] = [
    {}, {"layout__zero": 1}, {"recompute__policy": "full"}, {"data__document_mask": "false"},
]  # fmt: skip


@pytest.mark.parametrize("flags", some(PARTS, PARTS[2:3]))
def test_each_part_moves_the_bytes_that_plans_count(
    process: FakeCudaProcess, flags: dict[str, object]
) -> None:
    spec = run(**flags)
    found, expected = process.call(recorded, spec), counted(spec)
    assert set(expected) == set(found)
    apart = {
        part: (size, found[part]) for part, size in expected.items() if abs(size / found[part] - 1) > WITHIN
    }
    assert not apart, f"bytes that plans count, and those recorded: {apart}"


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("h100", {"model__layers": 32}),
        pytest.param("h100", {"model__layers": 32, "data__document_mask": "false"}, marks=pytest.mark.full),
        pytest.param("a100", {"model__layers": 32}, marks=pytest.mark.full),
        pytest.param("b200", {"model__layers": 32, "data__document_mask": "false"}, marks=pytest.mark.full),
        pytest.param("h100", {"model__layers": 32, "precision__compute": "fp8"}, marks=pytest.mark.full),
        ("h100", TENSOR | {"model__layers": 32}),
        pytest.param(
            "h100",
            TENSOR | {"model__layers": 32, "train__compile": "true"},
            marks=[
                pytest.mark.full,
                pytest.mark.skipif(find_spec("triton") is None, reason="no Triton for this platform"),
            ],
        ),
    ],
)
def test_terms_of_plans_are_those_of_the_clocks(
    process: FakeCudaProcess, name: str, flags: dict[str, object]
) -> None:
    """Plans and the clocks of the recorded step agree within a tenth on what a GPU computes, and on tensor
    ranks on what it waits for."""
    result = process.call(api.dryrun, run(**flags), device="cuda", cluster=name)
    rows = result["ranks"][0]["timeline"]["planner"]["terms"]
    terms = {row["term"]: row["ratio"] for row in rows}
    waits = ("messages exposed",) if "layout__tp" in flags else ()
    for term in ("products", "attention", "memory-bound", "optimiser", *waits):
        assert terms[term] == pytest.approx(1.0, abs=WITHIN), (term, terms[term])


@pytest.mark.parametrize(
    ("flags", "within"),
    [
        ({}, 0.06),
        (TENSOR, 0.06),
        ({"recompute__policy": "full"}, 0.06),
        ({"model.preset": "mixtral-8x7b", "layout__ep": 8}, 0.06),
        pytest.param(
            {"train__compile": "true"},
            0.15,
            marks=pytest.mark.skipif(find_spec("triton") is None, reason="no Triton for this platform"),
        ),
    ],
)
def test_the_host_launches_the_operators_that_plans_count(
    process: FakeCudaProcess, flags: dict[str, object], within: float
) -> None:
    spec = run(**flags)
    blocks = estimate(spec, cluster("h100", spec.layout.world_size)).costs.blocks(spec)
    (kind,) = spec.model.kinds
    each: dict[Hosting, float] = {"eager": 1.0, "compiled": 1.0}
    again = spec.recompute.policy == "full"
    repeated = ("attention", "matmul") if again else ()
    count = counted_host_seconds(spec, kind, len(blocks.separate_products(kind)), each, repeated).ahead
    found = process.call(launched, spec)
    assert count[0] == pytest.approx(found["forward"], rel=within)
    assert sum(count[1:3]) + again * count[3] == pytest.approx(found["backward"], rel=within)


def test_the_term_of_plans_is_the_sum_of_the_parts() -> None:
    """At the rate of the device's memory."""
    spec = run(recompute__policy="none")
    plan = estimate(spec, cluster("h100", 8))
    end = plan.costs.blocks(spec).rows * spec.model.hidden
    of_embedding = (spec.microbatches - 1) * unit_copies(spec).summed / 8 * end
    (kind,) = spec.model.kinds
    kernels = spec.model.layers * spec.microbatches * sum(block_kernels(spec, kind))
    total = plan.costs.kernels.moved(sum(counted(spec).values()) + of_embedding, kernels)
    assert plan.parts["memory-bound"] == pytest.approx(total, rel=0.01)
