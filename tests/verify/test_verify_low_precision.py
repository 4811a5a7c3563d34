"""Products in 8 and 4 bits under every layout equal one device, with operands computed in float64."""

from __future__ import annotations

import pytest
import torch

from covering import marked, name
from equality import Counted, equal_to_one_device, verify_and_count
from low_precision_cases import BASE, EXPERTS, MLA, RECIPES, losses, losses_and_norms
from low_precision_products import run_by_kernels
from meshwright.comm.mesh import Mesh
from meshwright.spec import RunSpec
from meshwright.spec.errors import UserError
from meshwright.verify.narrow import narrow
from meshwright.verify.reference.data import batches
from meshwright.verify.reference.steps import reference_steps
from meshwright.verify.reference.weights import initial_weights
from meshwright.verify.verify import exact
from ranks import Ranks
from small import spec_of

SHORT: dict[str, object] = {"data__seq_len": 128, "train__batch_tokens": 2 * 128}
LAYOUTS: list[dict[str, object]] = [
    SHORT,
    {"layout__dp": 2, "layout__zero": 3, "recompute__policy": "selective", **SHORT},
    {"layout__tp": 2, "layout__cp": 2, "recompute__policy": "full"},
    {"layout__pp": 2, "layout__tp": 2, "layout__schedule": "zb-h1", **SHORT},
    {"layout__dp": 2, "layout__ep": 2, "layout__zero": 1, **EXPERTS},
    {"layout__dp": 2, "layout__etp": 2, "layout__expert_parts": 2, **EXPERTS},
    {"layout__tp": 2, **MLA, "data__seq_len": 256, "train__batch_tokens": 2 * 256},
]
CASES = [{"precision__compute": recipe, **layout} for recipe in RECIPES for layout in LAYOUTS]
QUICK = [CASES[number % 5 * len(LAYOUTS) + number] for number in range(len(LAYOUTS))]
"""Each layout with one recipe, and each recipe on some layouts."""


@pytest.mark.parametrize("case", marked(CASES, QUICK), ids=name)
def test_every_recipe_equals_one_device(ranks: Ranks, case: dict[str, object]) -> None:
    if case["precision__compute"] == "fp8-blockwise" and "model__mla__kv_rank" in case:
        case = case | {"model__mla__rope_dim": 32, "model__head_dim": 96}  # 128 channels of two heads
    kinds = equal_to_one_device(ranks, spec_of(BASE, **case), 1e-9)
    assert "step 2 parameter" in kinds


GATHERED: list[dict[str, object]] = [
    {"precision__compute": "fp8", "layout__dp": 4, "layout__zero": 3, "layout__replicate": 2},
    {"precision__compute": "fp8", "layout__dp": 2, "layout__zero": 1, "layout__pp": 2},
    {"precision__compute": "fp8-blockwise", "layout__dp": 2, "layout__zero": 3, "model__hidden": 256},
    {"precision__compute": "fp8", "layout__dp": 4, "layout__ep": 2, "layout__zero": 2} | EXPERTS,
]


@pytest.mark.parametrize("case", marked(GATHERED, GATHERED[2:3]))
def test_weights_may_be_gathered_in_8_bits(ranks: Ranks, case: dict[str, object]) -> None:
    """Bytes of the second step: in the first one `fp8` knows no scales."""
    sizes = {"data__seq_len": 128, "train__batch_tokens": 8 * 128, "precision__fp8_gather": "true"}
    spec = spec_of(BASE, **(case | sizes))
    equal_to_one_device(ranks, spec, 1e-9, run=verify_and_count_second)


def verify_and_count_second(mesh: Mesh, spec: RunSpec) -> Counted:
    """`verify_and_count`, where the bytes of the first step are those of the second."""
    result, stage, (first, second) = verify_and_count(mesh, spec)
    assert spec.precision.compute != "fp8" or first != second
    return result, stage, [second, second]


@pytest.mark.parametrize("recipe", ["fp8", "fp8-blockwise"])
def test_a_gather_in_8_bits_changes_no_bit(ranks: Ranks, recipe: str) -> None:
    base = BASE | {"data.corpus": "synthetic", "train.lr": 0.05, "train.warmup_steps": 0, "model.hidden": 256}
    found = []
    for gather in ("true", "false"):
        spec = spec_of(
            base,
            **SHORT,
            precision__compute=recipe,
            layout__dp=2,
            layout__zero=3,
            precision__fp8_gather=gather,
        )
        found.append(ranks.run(spec.layout, losses, spec))
    assert found[0] == found[1]


def test_gradients_may_have_either_format(ranks: Ranks) -> None:
    for form in ("e4m3", "e5m2"):
        formats = {"precision__compute": "fp8-rowwise", "precision__fp8_gradients": form}
        spec = spec_of(BASE, **SHORT, **formats, layout__dp=2)
        equal_to_one_device(ranks, spec, 1e-9)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("preset", ["llama3-8b", "qwen3-30b-a3b", "deepseek-v3"])
def test_a_narrowed_copy_has_whole_blocks(recipe: str, preset: str) -> None:
    given = {
        "model.preset": preset, "precision.compute": recipe, "precision.high": "fp64", "layout.tp": 2,
        "layout.dp": 2, "data.seq_len": 4096, "train.batch_tokens": 65536,
    }  # fmt: skip
    spec = RunSpec.model_validate(tree_of(given))
    small, note = narrow(spec)
    assert note is not None and small.precision == spec.precision
    assert small.model.parameters < 3e7


def tree_of(given: dict[str, object]) -> dict[str, dict[str, object]]:
    tree: dict[str, dict[str, object]] = {}
    for key, value in given.items():
        table, _, rest = key.partition(".")
        tree.setdefault(table, {})[rest] = value
    return tree


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"precision__compute": "fp8", "model__ffn": 40}, r"multiples of 16, and blocks.* has 40 rows; try"),
        (
            {"precision__compute": "fp8-blockwise", "layout__tp": 4},
            r"multiples of 128, and .*attn.k.weight has 256 / 4 ranks = 64 rows; try",
        ),
        ({"precision__compute": "mxfp8", "data__seq_len": 64, "layout__cp": 2}, "try data.seq_len = 128"),
        ({"precision__compute": "fp8-blockwise", "layout__cp": 4}, "or precision.compute = 'mxfp8'"),
        ({"precision__compute": "fp8", "layout__tp": 8}, "layout.tp: 8 ranks share .*; try layout.tp = 4"),
        ({"precision__compute": "nvfp4", "train__compile": "true"}, "or train.compile = false"),
        ({"precision__compute": "bf16", "precision__fp8_gradients": "e5m2"}, "has no effect with"),
        ({"precision__compute": "bf16", "precision__high": "fp32"}, "has no effect with"),
        (
            {
                "precision__compute": "fp8",
                "precision__fp8_gather": "true",
                "layout__dp": 2,
                "train__batch_tokens": 1024,
            },
            "layout.zero: 0 keeps whole weights on every rank, so .*; try layout.zero = 3",
        ),
    ],
)
def test_what_a_recipe_does_not_fit_is_told(flags: dict[str, object], words: str) -> None:
    base = BASE | {"train.batch_tokens": 512}
    with pytest.raises(UserError, match=words):
        spec_of(base, **flags)


@pytest.mark.parametrize("recipe", RECIPES)
def test_how_much_scales_of_a_row_depend_on_tensor_ranks(recipe: str) -> None:
    """fp8-rowwise alone: each of two tensor ranks has a scale for its part of a row that both sum.

    docs/low_precision.md states how much the gradients differ.
    """
    found = []
    for tp in (1, 2):
        sizes = {"model__layers": 1, "data__seq_len": 128, "train__batch_tokens": 256}
        spec = exact(spec_of(BASE, precision__compute=recipe, layout__tp=tp, **sizes), 2)
        steps = reference_steps(spec, initial_weights(spec.model, 0), batches(spec))
        found.append([next(steps), next(steps)][1]["gradient"])
    one, two = (torch.cat([grad.flatten() for grad in each.values()]) for each in found)
    assert one.norm() > 0
    off = float((one - two).norm() / one.norm())
    assert off == 0 if recipe != "fp8-rowwise" else 0 < off < 0.1


BY_KERNELS: list[tuple[dict[str, object], tuple[int, int]]] = [
    ({"precision__compute": "fp8", "layout__dp": 2, "layout__zero": 3}, (9, 0)),
    ({"precision__compute": "fp8-rowwise", "layout__tp": 2, "layout__sequence_parallel": "false"}, (9, 0)),
    ({"precision__compute": "fp8-blockwise", "recompute__policy": "selective"}, (9, 0)),
    ({"precision__compute": "fp8-blockwise", "layout__tp": 2}, (10, 0)),
    ({"precision__compute": "mxfp8", "layout__pp": 2, "layout__schedule": "zb-h1"}, (10, 0)),
    ({"precision__compute": "nvfp4", "recompute__policy": "full"}, (10, 0)),
]


@pytest.mark.parametrize(("case", "capability"), BY_KERNELS, ids=str)
def test_a_run_by_kernels_has_the_losses_and_norms_of_rounded_operands(
    ranks: Ranks, case: dict[str, object], capability: tuple[int, int]
) -> None:
    """Also through ZeRO, tensor ranks, recomputation, and gradients of weights that are put off."""
    base = BASE | {
        "data.corpus": "synthetic",
        "train.lr": 0.002,
        "train.warmup_steps": 0,
        "model.hidden": 256,
    }
    spec = spec_of(base, **SHORT, **case)
    emulated = ranks.run(spec.layout, losses_and_norms, spec)[0]
    found, calls = ranks.run(spec.layout, run_by_kernels, spec, capability)[0]
    assert calls > 0 and found != emulated
    assert found == pytest.approx(emulated, rel=5e-3)
