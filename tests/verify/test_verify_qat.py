"""Quantisation-aware training: every layout equals one device, and what is refused."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torchao.quantization import quant_primitives as primitives

from covering import marked, name
from equality import equal_to_one_device
from low_precision_cases import EXPERTS, MLA, losses
from meshwright.comm.mesh import Mesh
from meshwright.model import low_precision_linear
from meshwright.model.quantisation import fake_quantise, fake_quantise_tokens, quantise
from meshwright.spec import RunSpec, load
from meshwright.spec.errors import UserError
from meshwright.spec.precision import Quantised
from meshwright.verify.narrow import narrow
from meshwright.verify.verify import verify
from ranks import Ranks
from small import spec_of

BASE: dict[str, object] = {
    "model.hidden": 64, "model.ffn": 128, "model.heads": 8, "model.kv_heads": 4, "model.head_dim": 16,
    "model.vocab_size": 61, "data.seq_len": 32, "train.steps": 3, "train.warmup_steps": 1,
    "train.batch_tokens": 4 * 32, "layout.micro_batch": 1,
}  # fmt: skip
SMALL_EXPERTS = EXPERTS | {"model__moe__ffn": 64, "data__seq_len": 32, "train__batch_tokens": 4 * 32}
ANY: list[dict[str, object]] = [
    {},
    {"layout__dp": 2, "layout__zero": 3, "recompute__policy": "selective"},
    {"layout__pp": 2, "layout__cp": 2, "layout__schedule": "zb-h1"},
    {"layout__dp": 2, "layout__ep": 2, "layout__zero": 1, **SMALL_EXPERTS},
]
CUT: list[dict[str, object]] = [
    {"layout__tp": 2, "layout__cp": 2, "recompute__policy": "full"},
    {"layout__dp": 2, "layout__etp": 2, **SMALL_EXPERTS},
    {"layout__tp": 2, **MLA, "model__mla__q_rank": 64},
]
RECIPES = ("int8", "int4", "int8-dynamic", "fp8")
CASES = [
    {"precision__qat": recipe, **layout}
    for recipe in RECIPES
    for layout in (ANY + CUT if recipe == "int4" else ANY)
]
QUICK = [CASES[number] for number in (8, 12, 17)]
"""Each recipe but int8."""


@pytest.mark.parametrize("case", marked(CASES, QUICK), ids=name)
def test_quantisation_aware_steps_equal_one_device(ranks: Ranks, case: dict[str, object]) -> None:
    kinds = equal_to_one_device(ranks, spec_of(BASE, **case), 1e-9)
    assert "step 2 parameter" in kinds


@pytest.mark.parametrize("recipe", RECIPES)
def test_codes_are_torchaos(recipe: Quantised) -> None:
    """But for the scales' format, which here is that of a checkpoint's."""
    weight = torch.randn(8, 128, generator=torch.Generator().manual_seed(0))
    weight[3] = 0
    group = 32 if recipe == "int4" else 128
    found = quantise(weight, recipe, group, scales=torch.float32)
    if recipe == "fp8":
        scale = primitives._choose_scale_float8(weight, [1, 128])
        codes = primitives._quantize_affine_float8(weight, scale)
        kept = weight.any(1)
        assert torch.equal(found.scales[kept], scale[kept])
        assert torch.equal(found.codes.float()[kept], codes.float()[kept])
        return
    half = 8 if recipe == "int4" else 128
    scale, zero = primitives.choose_qparams_affine(
        weight, primitives.MappingType.SYMMETRIC, (1, group), torch.int8, -half, half - 1,
        scale_dtype=torch.float32, zero_point_dtype=torch.int32,
    )  # fmt: skip
    codes = primitives.quantize_affine(weight, (1, group), scale, zero, torch.int8, -half, half - 1)
    assert not zero.any()
    kept = weight.any(1)
    assert torch.equal(found.scales[kept], scale.view(8, -1)[kept])
    assert torch.equal(found.codes, codes)


def test_tokens_have_a_scale_each_in_dynamic_recipes_only() -> None:
    x = torch.tensor([[1.0, 0.3], [100.0, 30.0]])
    assert fake_quantise_tokens(x, "int4") is x
    rounded = fake_quantise_tokens(x, "int8-dynamic")
    assert torch.allclose(rounded[1], rounded[0] * 100)
    assert not torch.equal(rounded, x)
    assert torch.equal(fake_quantise(rounded, "fp8", 0), fake_quantise(rounded, "fp8", 32))


def test_training_learns_with_rounded_weights(ranks: Ranks) -> None:
    """Steps with and without differ, so the rounding is there."""
    base = BASE | {"data.corpus": "synthetic", "train.lr": 0.01, "train.warmup_steps": 0}
    spec = spec_of(base)
    plain = ranks.run(spec.layout, losses, spec)[0]
    for recipe in RECIPES:
        spec = spec_of(base, precision__qat=recipe)
        assert ranks.run(spec.layout, losses, spec)[0] != plain


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"precision__qat": "fp8", "layout__tp": 2}, r"layout.tp: 2 ranks cut the rows of .*attn.o.*int4"),
        (
            {"precision__qat": "int4", "precision__qat_group": 128},
            r"qat_group: 128 columns .* has 64 columns; try precision.qat_group = 64",
        ),
        ({"precision__qat": "int4", "model__hidden": 48}, r"has 48 columns; try precision.qat = 'int8'"),
        (
            {"precision__qat": "int4", "layout__tp": 8, "model__heads": 8, "model__kv_heads": 8},
            r"attn.o.weight has 128 / 8 ranks = 16 columns; try layout.tp = 4",
        ),
        ({"precision__qat": "int8", "precision__qat_group": 64}, r"qat_group: 64 has no effect"),
        ({"precision__qat": "fp8", "precision__compute": "mxfp8"}, r"qat: 'fp8' does not go with"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_one_sentence(flags: dict[str, object], words: str) -> None:
    with pytest.raises(UserError, match=words):
        spec_of(BASE, **flags)


def test_a_narrowed_copy_has_whole_groups() -> None:
    given = {
        "model.preset": "llama3-8b", "precision.qat": "int4", "precision.qat_group": 128, "layout.tp": 4,
        "layout.dp": 2, "data.seq_len": 4096, "train.batch_tokens": 65536,
    }  # fmt: skip
    spec = load(None, [(key, str(value)) for key, value in given.items()])
    small, note = narrow(spec)
    assert note is not None and small.precision == spec.precision


def test_groups_of_another_size_are_caught(ranks: Ranks) -> None:
    spec = spec_of(BASE, precision__qat="int4", layout__tp=2)
    found = ranks.run(spec.layout, with_groups_of_twice_the_size, spec)[0]
    assert found is not None
    assert not found["equal"]


def with_groups_of_twice_the_size(mesh: Mesh, spec: RunSpec) -> dict[str, Any] | None:
    def wide(weight: Tensor, recipe: Quantised, group: int) -> Tensor:
        return fake_quantise(weight, recipe, 2 * group)

    with patch.object(low_precision_linear, "fake_quantise", wide):
        return verify(spec, mesh, 1)
