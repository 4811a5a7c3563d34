"""Dry runs on a faked GPU launch the kernels that a GPU of its compute capability would."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml

from covering import some
from faked_gpu import dryrun_on, kernels, tiny, work_of
from meshwright.fake_cuda import library
from meshwright.fake_cuda.process import FakeCudaProcess
from meshwright.hardware.find import cluster
from meshwright.planner.cost.model import CostModel
from meshwright.spec import RunSpec

pytestmark = pytest.mark.skipif(
    library.torch_build().toolkit is not None, reason="a GPU is faked for torch's build for CPUs only"
)

SDPA = "_scaled_dot_product_{}_attention"
CUDNN, FLASH, EFFICIENT = map(SDPA.format, ("cudnn", "flash", "efficient"))


def attention_of(
    process: FakeCudaProcess, spec: RunSpec, **options: object
) -> tuple[dict[str, int], dict[str, Any]]:
    """The numbers of kernels of attention of rank 0, and what the dry run says of them."""
    result = dryrun_on(process, spec, **options)
    found = kernels(result["ranks"][0]["device_work"])
    named = {name: count for name, count in found.items() if "attention" in name or name == "_safe_softmax"}
    return named, result["attention"]


ATTENTION: list[tuple[str, dict[str, object], str]] = [
    ("8.0", {}, FLASH),
    ("9.0", {}, CUDNN),
    ("10.0", {}, CUDNN),
    ("9.0", {"model__head_dim": 192}, CUDNN),
    ("10.0", {"model__head_dim": 192}, FLASH),
    ("9.0", {"train__attention_backend": "FA2"}, FLASH),
    ("9.0", {"train__attention_backend": "FA3"}, FLASH),
    ("10.0", {"train__attention_backend": "FA4"}, FLASH),
    ("8.0", {"train__attention_backend": "cudnn"}, CUDNN),
    ("10.0", {"train__attention_backend": "cudnn", "model__head_dim": 192}, FLASH),
    ("9.0", {"model__kv_heads": 4, "precision__compute": "fp32"}, EFFICIENT),
    ("9.0", {"precision__compute": "fp64"}, "_safe_softmax"),
    ("9.0", {"model__attention_sinks": "true"}, "varlen_attention"),
    ("9.0", {"model__sliding_window": 32}, "varlen_attention"),
]
QUICK = [ATTENTION[number] for number in (0, 1, 4, 10, 11, 12)]
"""Each kernel, by the device, by the width of heads and by the precision."""


@pytest.mark.parametrize(("capability", "flags", "expected"), some(ATTENTION, QUICK))
def test_attention_of_whole_sequences_is_that_of_device_and_key(
    process: FakeCudaProcess, capability: str, flags: dict[str, object], expected: str
) -> None:
    """Torch's dispatcher takes what was chosen, and the dry run says it."""
    spec = tiny(data__document_mask="false", model__heads=4, **flags)
    attention, told = attention_of(process, spec, capability=capability)
    layers = spec.model.layers * spec.microbatches
    assert attention[expected] == layers, attention
    if expected != "_safe_softmax":
        assert attention[f"{expected}_backward"] == layers
    assert {name for name in attention if "dot_product" in name} <= {expected, f"{expected}_backward"}
    operators = {"cudnn": CUDNN, "efficient": EFFICIENT, "math": "_safe_softmax"}
    taken = told[told["path"]]
    assert operators.get(taken, FLASH if told["path"] == "plain" else "varlen_attention") == expected
    if (chosen := spec.train.attention_backend).startswith("FA"):
        assert taken == chosen


PACKED: list[tuple[str, dict[str, object]]] = [
    (capability, flags)
    for flags in ({}, {"train__attention_backend": "cudnn"}, {"layout__cp": 2, "layout__dp": 1})
    for capability in ("8.0", "9.0", "10.0")
]


@pytest.mark.parametrize(("capability", "flags"), some(PACKED, PACKED[::4]))
def test_attention_of_packed_documents_is_flash(
    process: FakeCudaProcess, capability: str, flags: dict[str, object]
) -> None:
    attention, told = attention_of(process, tiny(**flags), capability=capability)
    assert set(attention) == {"varlen_attention", "varlen_attention_backward"}
    assert (told["path"], told["packed"]) == ("packed", "FA2")


@pytest.mark.parametrize(
    ("capability", "flags", "operator"),
    [
        ("8.0", {"data__document_mask": "false"}, FLASH),
        ("9.0", {"data__document_mask": "false"}, CUDNN),
        ("9.0", {"data__document_mask": "false", "model__heads": 4, "precision__compute": "fp32"}, EFFICIENT),
        ("9.0", {}, "varlen_attention"),
    ],
)
@pytest.mark.parametrize("saved", ["attention", "matmul"])
def test_selective_recomputation_saves_every_kernel_of_attention(
    process: FakeCudaProcess, capability: str, flags: dict[str, object], operator: str, saved: str
) -> None:
    spec = tiny(recompute__policy="selective", recompute__save=saved, **{"model__kv_heads": 4} | flags)
    attention, _ = attention_of(process, spec, capability=capability)
    forwards = spec.model.layers * spec.microbatches
    assert attention[operator] == (forwards if saved == "attention" else 2 * forwards)
    assert attention[f"{operator}_backward"] == forwards


def test_operators_are_whole_as_a_gpu_has_kernels_for_them(process: FakeCudaProcess) -> None:
    spec = tiny()
    layers, norms = spec.model.layers * spec.microbatches, (2 * spec.model.layers + 1) * spec.microbatches
    found = kernels(work_of(process, spec))
    assert found["_fused_rms_norm"] == found["_fused_rms_norm_backward"] == norms
    assert found["silu_backward"] == found["varlen_attention"] == layers
    assert "sigmoid" not in found and "rsqrt" not in found
    fp8 = kernels(work_of(process, tiny(precision__compute="fp8", model__ffn=512)))
    assert fp8["_scaled_mm"] == 2 * 7 * layers and fp8["_scaled_mm.out"] == 7 * layers
    experts = tiny(model__preset="moe-tiny", layout__ep=2)
    assert kernels(work_of(process, experts))["_grouped_mm"] > 0


@pytest.mark.parametrize(
    ("zero", "compiled"),
    some(product(range(4), ("false", "true")), [(0, "false"), (1, "true"), (2, "false"), (3, "true")]),
)
def test_blocks_copy_no_parameters_and_no_gradients(
    process: FakeCudaProcess, zero: int, compiled: str
) -> None:
    """Parameters are gathered where they are read; products write gradients where they are sent, in fp32."""
    flags: dict[str, object] = {
        "layout__zero": zero, "layout__micro_batch": 1, "model__tied": "false", "train__compile": compiled,
    }  # fmt: skip
    less, more = (work_of(process, tiny(**flags, model__layers=layers)) for layers in (2, 4))
    microbatches, found, before = tiny(**flags).microbatches, kernels(more), kernels(less)
    assert microbatches == 2
    casts = 0 if zero else 1  # of a unit that is not gathered
    norms = 2 if zero < 2 else 0  # of the second microbatch
    sums = 1 if zero >= 2 else 0  # of what the reduce-scatters of both microbatches found
    for name, each in (("copy_", casts), ("zero_", 0), ("add_.Tensor", norms + sums)):
        assert found.get(name, 0) - before.get(name, 0) == 2 * each, name
    alone = 1 if zero < 2 else microbatches  # others add to the first
    assert found["mm.dtype_out"] - before["mm.dtype_out"] == 7 * 2 * alone
    added = found.get("addmm.dtype_out", 0) - before.get("addmm.dtype_out", 0)
    assert added == 7 * 2 * (microbatches - alone)
    assert not [row for row in more["empty"] if row["name"] == "aten::zero_"]


def test_the_operators_that_stand_in_are_all_that_torch_lacks() -> None:
    """By torch's own list: those with a kernel for CUDA that decompose in a build without it."""
    import torchgen

    file = Path(torchgen.__file__).parent / "packaged/ATen/native/native_functions.yaml"
    lacking = set()
    for function in yaml.load(file.read_text(), Loader=yaml.CSafeLoader):
        name = function["func"].partition("(")[0]
        keys = {key.strip() for keys in function.get("dispatch", {}) for key in keys.split(",")}
        structured = "structured_delegate" in function  # its kernels are those of the variant with `out`
        if "CompositeImplicitAutograd" in keys and ("CUDA" in keys or structured):
            lacking.add(name)
    source = Path(library.__file__).with_name("device.cpp").read_text()
    named = source.partition("for (const char* name : {")[2].partition("}")[0]
    assert lacking == {each.strip(' "') for each in named.split(",")}


def test_flops_are_those_of_the_operators_on_a_cpu(process: FakeCudaProcess) -> None:
    """Products of a dense model and of experts in one kernel: two for each weight and token, three times."""
    spec = tiny(
        model__preset="moe-tiny", model__layers=2, layout__dp=1, layout__zero=0, recompute__policy="none"
    )
    moe = spec.model.moe
    assert moe is not None
    work = work_of(process, spec)
    found = {row["name"].partition("::")[2]: row["flops"] for row in work["kernels"]}
    tokens = spec.data.seq_len * spec.micro_batch * spec.microbatches
    layers = spec.model.layers - moe.dense_first
    weights = 3 * spec.model.hidden * moe.ffn * moe.top_k
    assert found["_grouped_mm"] >= 6 * tokens * weights * layers  # padding rows come on top
    assert found["_grouped_mm"] < 1.5 * 6 * tokens * weights * layers


@pytest.mark.parametrize("capacity", ["none", 0.5, 2.0])
def test_flops_of_experts_are_those_that_plans_count(process: FakeCudaProcess, capacity: object) -> None:
    """An expert multiplies what its capacity admits; its rows are whole words as they are."""
    spec = tiny(
        model__preset="moe-tiny", model__layers=2, layout__ep=2, data__seq_len=1024, train__batch_tokens=8192,
        recompute__policy="none", model__moe__capacity_factor=capacity,
    )  # fmt: skip
    found = {row["name"].partition("::")[2]: row["flops"] for row in work_of(process, spec)["kernels"]}
    blocks = CostModel(cluster("h100", spec.layout.world_size)).blocks(spec)
    blocks.shape = replace(blocks.shape, busiest=1.0)  # a dry run deals rows out evenly
    counted = sum(
        2 * p.batch * p.m * p.n * p.k for kind in spec.model.kinds for p in blocks.products(kind) if p.experts
    )
    assert spec.model.moe is not None
    layers = spec.model.layers - spec.model.moe.dense_first
    assert found["_grouped_mm"] == 3 * counted * layers * spec.microbatches
