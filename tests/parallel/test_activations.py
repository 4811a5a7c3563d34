"""Activations that a rank really holds, against the planner's formulas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor

from allocations import measure, measure_as_run
from covering import marked
from meshwright.comm.mesh import Mesh
from meshwright.model.router import Router
from meshwright.parallel.activation_offload import HostMemory
from meshwright.planner.activations import Activations, activations
from meshwright.spec import RunSpec
from meshwright.spec.tiling import Tiling, tiled
from ranks import Ranks
from small import spec_of

BASE = {
    "model.layers": 4, "model.hidden": 64, "model.ffn": 192, "model.heads": 8, "model.kv_heads": 4,
    "data.corpus": "synthetic", "data.seq_len": 128, "train.batch_tokens": 128 * 4,
    "layout.micro_batch": 2, "precision.compute": "bf16", "train.seed": 5,
}  # fmt: skip
"""By this seed a sequence of either microbatch holds several documents, and so has a mask of its own."""
GPT = {
    "model__family": "gpt2", "model__norm": "layernorm", "model__activation": "gelu_tanh",
    "model__position": "learned", "model__kv_heads": 8, "model__ffn": 256,
}  # fmt: skip
LATENTS = {
    "model__head_dim": 24, "model__kv_heads": 8, "model__mla__q_rank": 64, "model__mla__kv_rank": 32,
    "model__mla__rope_dim": 8, "model__mla__v_dim": 16,
}  # fmt: skip
WINDOWS = {
    "model__layer_types": "sliding_attention,full_attention", "model__sliding_window": 48,
    "model__rope_local_base_freq": 100,
}  # fmt: skip
CAPS = {"model__attention_softcap": 20, "model__logit_softcap": 10, "model__attention_sinks": "true"}
LARGER = {"model__hidden": 128, "model__ffn": 384, "data__seq_len": 256, "train__batch_tokens": 256 * 4}
"""By these sizes the last block holds the peak, and not the head."""
LAYOUTS: list[dict[str, object]] = [
    {},
    LARGER | {"precision__compute": "fp32"},
    {"layout__tp": 2, "layout__sequence_parallel": "false"},
    LARGER | {"layout__tp": 2, "precision__compute": "fp64", "model__qk_norm": "true"},
    GPT | {"layout__tp": 4},
    {"layout__cp": 2},
    {"layout__cp": 4, "layout__context_mode": "gather"},
    {"layout__cp": 2, "layout__context_mode": "ulysses"},
    {"layout__tp": 2, "layout__cp": 2},
    LATENTS,
    LATENTS | LARGER | {"model__mla__q_rank": "none", "precision__compute": "fp32"},
    LATENTS | {"layout__tp": 2},
    LATENTS | {"layout__tp": 2, "layout__sequence_parallel": "false", "model__mla__q_rank": "none"},
    LATENTS | {"layout__cp": 2},
    LATENTS | {"layout__cp": 2, "layout__context_mode": "gather"},
    LATENTS | {"layout__cp": 2, "layout__context_mode": "ulysses"},
    WINDOWS,
    WINDOWS | {"layout__cp": 2},
    CAPS,
    CAPS | LARGER | {"precision__compute": "fp32"},
    CAPS | LARGER | {"layout__cp": 2},
    CAPS | {"layout__cp": 2, "layout__context_mode": "gather"},
]


POLICIES = ["none", "selective", "full"]
CASES: list[dict[str, object]] = [
    {**layout, "recompute__policy": policy} for layout in LAYOUTS for policy in POLICIES
]
QUICK = [case for number, case in enumerate(CASES) if number < 3 or number % 3 == number // 3 % 3]
"""Each layout with one policy, and one device with all; the modes of an axis have different ones."""


def measured(
    ranks: Ranks, spec: RunSpec, expected: Activations, function: Callable[..., Any] = measure
) -> list[tuple[int, int]]:
    """(bytes kept, most bytes) of each rank, measured again with longer pauses where they are too many.

    On a busy machine gloo's threads may free what they sent too late for the first measurements.
    """
    found: list[tuple[int, int]] = []
    for pause in (0.003, 0.1, 0.3):
        found = ranks.run(spec.layout, function, spec, pause)
        if all(kept <= 1.01 * expected.kept and peak <= 1.05 * expected.peak for kept, peak in found):
            break
    return found


@pytest.mark.parametrize("layout", marked(CASES, QUICK))
def test_formulas_hold(ranks: Ranks, layout: dict[str, object]) -> None:
    spec = spec_of(BASE, **layout)
    expected = activations(spec)
    for kept, peak in measured(ranks, spec, expected):
        assert kept == pytest.approx(expected.kept, rel=0.01)
        assert peak == pytest.approx(expected.peak, rel=0.05)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("layout", [{}, {"layout__tp": 2}, LATENTS, {"layout__cp": 2}], ids=str)
def test_kernels_keep_the_same_and_take_no_more(
    ranks: Ranks, layout: dict[str, object], precision: str
) -> None:
    """As a run computes: temporaries of kernels are smaller than those of operators."""
    spec = spec_of(BASE, **layout, precision__compute=precision)
    expected = activations(spec)
    for kept, peak in measured(ranks, spec, expected, measure_as_run):
        assert kept == pytest.approx(expected.kept, rel=0.01)
        assert kept <= peak <= 1.05 * expected.peak


@pytest.mark.parametrize("save", ["attention", "matmul"])
@pytest.mark.parametrize("axis", [{}, {"layout__tp": 2}, {"layout__cp": 2}], ids=str)
def test_formulas_hold_for_each_saved_operator(ranks: Ranks, axis: dict[str, object], save: str) -> None:
    spec = spec_of(BASE, **axis, recompute__save=save)
    expected = activations(spec)
    for kept, _ in measured(ranks, spec, expected):
        assert kept == pytest.approx(expected.kept, rel=0.01)


def outside_torch(_host: HostMemory, here: Tensor) -> Tensor:
    """Room that the profiler does not see, as if the host were not the device."""
    return torch.from_numpy(np.empty(here.nbytes, np.uint8)).view(here.dtype)


def measure_offloading(mesh: Mesh, spec: RunSpec, pause: float) -> tuple[int, int]:
    with tiled(LARGE_ONLY), patch.object(HostMemory, "_allocate", outside_torch):
        return measure(mesh, spec, pause)


LARGE_ONLY = Tiling(offload_bytes=2**12)
"""By which numbers of norms stay."""
OFFLOADING: list[dict[str, object]] = [
    *({"recompute__policy": policy} for policy in POLICIES),
    {"layout__tp": 2, "recompute__policy": "selective"},
    {"layout__cp": 2},
    LATENTS | {"layout__tp": 2},
]


@pytest.mark.parametrize("case", OFFLOADING, ids=str)
def test_formulas_hold_of_offloaded_activations(ranks: Ranks, case: dict[str, object]) -> None:
    """The last of four blocks keeps its own, and those of one more pass by."""
    spec, stay = (spec_of(BASE, **case, train__offload_activations=kind) for kind in ("host", "none"))
    with tiled(LARGE_ONLY):
        expected = activations(spec)
    assert 0 < sum(expected.moved) < activations(stay).kept - expected.kept + 1
    for kept, peak in measured(ranks, spec, expected, measure_offloading):
        assert kept == pytest.approx(expected.kept, rel=0.01)
        assert peak == pytest.approx(expected.peak, rel=0.05)


MOE = BASE | {
    "model.layers": 3, "data.seq_len": 256, "model.moe.experts": 8, "model.moe.top_k": 2,
    "model.moe.ffn": 96, "model.moe.shared_ffn": 64, "model.moe.aux_loss": 0.01,
    "train.batch_tokens": 256 * 8,
}  # fmt: skip
LARGE = {"model__moe__ffn": 512, "model__moe__top_k": 4, "model__vocab_size": 256}
EXPERTS: list[dict[str, object]] = [
    {},
    LARGE,
    LARGE | {"layout__dp": 2, "layout__ep": 2, "model__moe__shared_ffn": 0, "model__moe__dense_first": 1},
    {"layout__tp": 2, "layout__etp": 2, "layout__sequence_parallel": "false"},
    LARGE | {"model__moe__activation": "clamped_swiglu", "model__moe__expert_bias": "true"},
    {"layout__tp": 2, "layout__ep": 2, "model__moe__shared_gate": "true", "model__moe__shared_ffn": 256},
    LARGE | {"layout__dp": 2, "layout__ep": 2, "layout__expert_buffer_factor": 1.5},
    {
        "layout__dp": 2, "layout__ep": 2, "layout__expert_parts": 2, "precision__compute": "fp32",
        "model__moe__z_loss": 0.1, "model__moe__capacity_factor": 1.0, "model__moe__aux_loss": 0.0,
    },
]  # fmt: skip


def choose_evenly(router: Router, scores_NE: Tensor) -> Tensor:
    copies = torch.arange(len(scores_NE) * router.moe.top_k)
    return copies.view(len(scores_NE), -1) % router.moe.experts


def measure_evenly(mesh: Mesh, spec: RunSpec, pause: float) -> tuple[int, int]:
    with patch.object(Router, "_choose", choose_evenly):
        return measure(mesh, spec, pause)


EXPERT_CASES: list[dict[str, object]] = [
    {**layout, "recompute__policy": policy} for layout in EXPERTS for policy in POLICIES
]
QUICK_EXPERTS = [
    case for number, case in enumerate(EXPERT_CASES) if number // 3 == 1 or number % 3 == number // 3 % 3
]
"""Each layout with one policy, and large experts on one device with all."""


@pytest.mark.parametrize("case", marked(EXPERT_CASES, QUICK_EXPERTS))
def test_formulas_hold_for_experts(ranks: Ranks, case: dict[str, object]) -> None:
    spec = spec_of(MOE, **case)
    expected = activations(spec)
    for kept, peak in measured(ranks, spec, expected, measure_evenly):
        assert kept == pytest.approx(expected.kept, rel=0.01)
        assert peak == pytest.approx(expected.peak, rel=0.05)
