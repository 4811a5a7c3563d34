"""Whole runs with adapters: what checkpoints hold, resume on other layouts, and what reads them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from covering import some
from meshwright import api
from meshwright.checkpoint.manifest import Manifest
from meshwright.planner.memory.states import checkpoint_bytes
from meshwright.spec import UserError
from meshwright.spec.lora import is_adapter
from meshwright.weights.load import load_run
from meshwright.weights.saved_weights import SavedWeights
from ranks import Ranks
from training_runs import HALF, STEPS, recorded, spec_of, start

LORA = {"lora__rank": 4, "lora__alpha": 16.0}
LAYOUTS: list[dict[str, object]] = [
    {"layout__dp": 2, "layout__zero": 3, "precision__compute": "bf16"},
    {"layout__tp": 2, "train__optimiser": "adamw8bit", "train__ema": 0.9},
    {
        "layout__pp": 2,
        "lora__dropout": 0.2,
        "recompute__policy": "full",
        "precision__compute": "bf16",
        "precision__master": "bf16",
    },
]  # fmt: skip


@pytest.mark.parametrize("layout", some(LAYOUTS, LAYOUTS[1:]))
def test_stop_and_resume_are_bitwise_equal(
    ranks: Ranks, corpus: Path, tmp_path: Path, layout: dict[str, object]
) -> None:
    flags = LORA | layout
    whole, _ = start(ranks, spec_of(corpus, **flags), tmp_path / "whole")
    half, _ = start(ranks, spec_of(corpus, **flags, train__stop_at=HALF), tmp_path / "halves")
    both, _ = start(ranks, spec_of(corpus, **flags), tmp_path / "halves", "auto")
    assert half["steps"] == HALF and both["steps"] == STEPS
    assert both["parameters_sha256"] == whole["parameters_sha256"] != half["parameters_sha256"]
    assert both["final_loss"] == whole["final_loss"] < half["final_loss"]


EXPERTS: dict[str, object] = {
    "model__moe__experts": 4, "model__moe__top_k": 2, "model__moe__ffn": 16, "model__moe__dense_first": 0,
    "lora__targets": "*.experts.*",
}  # fmt: skip


@pytest.mark.parametrize(
    ("model", "first", "then"),
    [
        ({}, {"layout__dp": 2, "layout__zero": 3}, {"layout__tp": 2}),
        (EXPERTS, {"layout__dp": 4, "layout__ep": 2, "layout__zero": 3}, {"layout__tp": 2, "layout__ep": 2}),
    ],
    ids=["dense", "experts"],
)
def test_a_resume_on_another_layout_goes_on_from_the_same_adapters(
    ranks: Ranks,
    corpus: Path,
    tmp_path: Path,
    model: dict[str, object],
    first: dict[str, object],
    then: dict[str, object],
) -> None:
    exact = LORA | {"precision__compute": "fp64"} | model
    before = spec_of(corpus, **exact, **first, train__stop_at=HALF)
    start(ranks, before, tmp_path)
    both, found = start(ranks, spec_of(corpus, **exact, **then), tmp_path, "auto")
    alone, wanted = start(ranks, spec_of(corpus, **exact), tmp_path / "alone")
    assert both["final_loss"] == pytest.approx(alone["final_loss"], rel=1e-12)
    assert any(is_adapter(name) and bool(tensor.any()) for name, tensor in wanted.items())
    for name in filter(is_adapter, wanted):
        torch.testing.assert_close(found[name], wanted[name], rtol=1e-10, atol=1e-13)


def test_checkpoints_hold_adapters_alone(ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    spec = spec_of(corpus, **LORA, layout__dp=2, layout__zero=3, checkpoint__every=5, checkpoint__keep=9)
    _, tensors = start(ranks, spec, tmp_path)
    folder = tmp_path / "checkpoints"
    (apart,) = folder.glob("frozen-*")
    base = sum(tensor.numel() for name, tensor in tensors.items() if not is_adapter(name))
    assert sum(file.stat().st_size for file in apart.glob("*.bin")) == 4 * base
    steps = sorted(folder.glob("step-*"))
    assert len(steps) == STEPS // 5
    sizes = {sum(file.stat().st_size for file in step.glob("*.bin")) for step in steps}
    adapters = sum(tensor.numel() for name, tensor in tensors.items() if is_adapter(name))
    assert sizes == {checkpoint_bytes(spec)} == {3 * 4 * adapters}
    manifest = Manifest.parse((steps[-1] / "manifest.json").read_text())
    changed = [name for name in manifest.tensors if name.startswith("optim")]
    assert changed and all(is_adapter(name) for name in changed)


def test_readers_merge_the_adapters(ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    spec = spec_of(corpus, **LORA, train__ema=0.5, layout__tp=2, precision__compute="bf16")
    _, tensors = start(ranks, spec, tmp_path)
    recorded(tmp_path, spec)
    for average in (False, True):
        read = dict(load_run(tmp_path, average=average).named_parameters())
        saved = SavedWeights(tmp_path, average=average)
        for name, value in read.items():
            assert torch.equal(saved.read(name).float(), value), name
            layer = name.removesuffix("weight")
            if f"{layer}lora_a.weight" not in tensors:
                assert torch.equal(value, tensors[name].float())
                continue
            a, b = tensors[f"{layer}lora_a.weight"], tensors[f"{layer}lora_b.weight"]
            wanted = tensors[name].float() + 4 * b @ a
            assert torch.allclose(value, wanted, rtol=0, atol=1e-6) == (not average)
    assert SavedWeights(tmp_path).dtype == torch.bfloat16


def test_a_record_or_a_resume_with_other_adapters_is_refused(
    ranks: Ranks, corpus: Path, tmp_path: Path
) -> None:
    spec = spec_of(corpus, **LORA, train__stop_at=HALF)
    start(ranks, spec, tmp_path)
    other = spec_of(corpus, **LORA | {"lora__alpha": 8.0})
    with pytest.raises(Exception, match=r"lora\.alpha was 16\.0 and is 8\.0"):
        start(ranks, other, tmp_path, "auto")
    recorded(tmp_path, other)
    with pytest.raises(UserError, match=r"lora\.alpha was 16\.0 and is 8\.0; put run\.json back"):
        load_run(tmp_path)
    with pytest.raises(UserError, match=r"lora\.alpha was 16\.0"):
        api.export(tmp_path, tmp_path / "hf")
