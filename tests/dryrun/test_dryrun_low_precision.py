"""A step in 8 and 4 bits on a faked GPU: its products have kernels, and what it keeps is what plans count."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from covering import some
from faked_gpu import tiny
from meshwright import api
from meshwright.fake_cuda import library
from meshwright.fake_cuda.process import FakeCudaProcess
from meshwright.planner.activations import activations
from meshwright.spec import RunSpec, load

pytestmark = pytest.mark.skipif(
    library.torch_build().toolkit is not None, reason="a GPU is faked for torch's build for CPUs only"
)
LLAMA: dict[str, object] = {
    "model.preset": "llama3-8b", "model.layers": 4, "data.corpus": "synthetic", "data.seq_len": 8192,
    "data.document_mask": "false", "train.batch_tokens": 65536, "layout.dp": 8, "layout.zero": 3,
    "layout.micro_batch": 1,
}  # fmt: skip
RECIPES = [
    ("fp8", "9.0"), ("fp8-rowwise", "9.0"), ("fp8-blockwise", "9.0"),
    ("fp8-blockwise", "10.0"), ("mxfp8", "10.0"), ("nvfp4", "10.0"),
]  # fmt: skip
SCALED = ("aten::_scaled_mm", "aten::_scaled_mm_v2")
ADDED = ("aten::mm.dtype_out", *(f"{name}.out" for name in SCALED))
"""Products in place, in fp32."""


def llama(recipe: str, **flags: object) -> RunSpec:
    given = (
        LLAMA
        | {"precision.compute": recipe}
        | {key.replace("__", "."): value for key, value in flags.items()}
    )
    return load(None, [(key, str(value)) for key, value in given.items()])


def row_of(process: FakeCudaProcess, spec: RunSpec, capability: str = "9.0") -> dict[str, Any]:
    row: dict[str, Any] = process.call(api.dryrun, spec, device="cuda", capability=capability)["ranks"][0]
    return row


def counts(row: dict[str, Any]) -> dict[str, int]:
    return {each["name"]: each["count"] for each in row["device_work"]["kernels"]}


def casts(row: dict[str, Any]) -> int:
    return sum(count for name, count in counts(row).items() if name.startswith("meshwright::cast_"))


def moved(row: dict[str, Any]) -> float:
    """Bytes of all that are no products, no attention and no copies."""
    work = row["device_work"]
    copied = sum(each["bytes"] for each in work["copies"])
    return sum(each["bytes"] for each in work["kernels"] if not each["flops"]) - copied


def cast_bytes(row: dict[str, Any]) -> float:
    """Bytes of the casts alone."""
    kernels = row["device_work"]["kernels"]
    return sum(each["bytes"] for each in kernels if each["name"].startswith("meshwright::cast_"))


@pytest.fixture(scope="module")
def plain(process: FakeCudaProcess) -> dict[str, Any]:
    return row_of(process, llama("bf16"))


@pytest.mark.parametrize(("recipe", "capability"), some(RECIPES, [RECIPES[2], RECIPES[5]]))
def test_products_have_kernels_and_operands_are_cast_once(
    process: FakeCudaProcess, plain: dict[str, Any], recipe: str, capability: str
) -> None:
    spec = llama(recipe)
    row = row_of(process, spec, capability)
    linears = 7 * spec.model.layers
    assert sum(counts(row).get(name, 0) for name in SCALED) == 2 * linears
    assert sum(counts(row).get(name, 0) for name in ADDED) == linears
    assert casts(row) == (4 + 3 * 7) * spec.model.layers  # 4 inputs; weights twice, and gradients
    assert row["device_work"]["launches"] < 1800
    assert 0 < cast_bytes(row) < 16e9 and moved(row) < 60e9
    kept = row["most"]["activations"]
    assert activations(spec, cpu=False).kept == pytest.approx(kept, rel=0.001)
    less = plain["most"]["activations"] - kept
    assert (less == 0) if recipe == "fp8-rowwise" else (less > 0.5e9)


KEPT: list[dict[str, object]] = [
    {"layout__tp": 2, "layout__dp": 4},
    {"recompute__policy": "selective"},
    {"model__preset": "tiny", "model__hidden": 512, "model__ffn": 1024, "model__heads": 4,
     "model__parallel_block": "true"},
]  # fmt: skip
KEPT_OF = [*product(KEPT, ("fp8", "fp8-blockwise"))]


@pytest.mark.parametrize(("flags", "recipe"), some(KEPT_OF, KEPT_OF[1::4] + KEPT_OF[2::4]), ids=str)
def test_what_is_kept_is_planned(process: FakeCudaProcess, recipe: str, flags: dict[str, object]) -> None:
    spec = llama(recipe, **flags)
    assert activations(spec, cpu=False).kept == pytest.approx(
        row_of(process, spec)["most"]["activations"], rel=0.01
    )


def test_a_gather_in_8_bits_is_cast_in_one_kernel_a_matrix(process: FakeCudaProcess) -> None:
    sizes = {"model__hidden": 256, "model__ffn": 512, "model__heads": 4, "model__kv_heads": 4}
    spec = tiny(precision__compute="fp8-blockwise", **sizes)
    gathered = tiny(precision__compute="fp8-blockwise", precision__fp8_gather="true", **sizes)
    more = casts(row_of(process, gathered)) - casts(row_of(process, spec))
    assert more >= 7 * spec.model.layers and more % 7 == 0  # some blocks are gathered once more


@pytest.mark.parametrize(("recipe", "products"), [("fp8-rowwise", 6), ("fp8", 3)])
def test_experts_have_kernels(process: FakeCudaProcess, recipe: str, products: int) -> None:
    """Three weights have one forward, and one backward where gradients are in e4m3."""
    spec = tiny(model__preset="moe-tiny", model__layers=2, precision__compute=recipe, layout__ep=2)
    assert spec.model.moe is not None
    layers = spec.model.layers - spec.model.moe.dense_first
    found = counts(row_of(process, spec))
    assert found["aten::_scaled_grouped_mm"] == products * layers * spec.microbatches


def test_flops_are_those_of_bf16(process: FakeCudaProcess, plain: dict[str, Any]) -> None:
    total = sum(each["flops"] for each in plain["device_work"]["kernels"])
    for recipe in ("mxfp8", "nvfp4"):
        row = row_of(process, llama(recipe), "10.0")
        assert sum(each["flops"] for each in row["device_work"]["kernels"]) == total
