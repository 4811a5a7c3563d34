"""Runs that go on: stopped and resumed, on another layout, and checkpoints that any layout loads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from covering import marked
from meshwright import api
from meshwright.spec import RunSpec
from ranks import Ranks
from training_runs import (
    EXPERTS,
    HALF,
    STEPS,
    TrainedOnce,
    digests,
    go_on,
    loaded,
    spec_of,
    start,
    trained,
)

RESUMED: list[dict[str, object]] = [
    {**{f"layout__{key}": size for key, size in axes.items()}, "precision__compute": compute}
    for axes in (
        {"dp": 1},
        {"dp": 2},
        {"dp": 2, "zero": 1},
        {"dp": 4, "zero": 3},
        {"pp": 2, "dp": 2, "zero": 2},
    )
    for compute in ("fp32", "bf16")
]
ROUNDED: list[dict[str, object]] = [
    {
        "precision__compute": "bf16",
        "precision__master": "bf16",
        "layout__dp": 2,
        "layout__zero": zero,
        "train__optimiser": kind,
    }
    for kind, zero in (("adamw", 1), ("lion", 0), ("muon", 3))
]
LOW: list[dict[str, object]] = [
    {
        "precision__compute": compute,
        "model__ffn": 48,
        "train__eval_every": 2,
        **layout,
    }
    for compute, layout in (
        ("fp8", {"precision__amax_history": 3, "layout__dp": 2, "layout__zero": 3}),
        ("nvfp4", {"precision__amax_history": 3, "layout__tp": 2, "model__kv_heads": 4, "model__ffn": 64}),
        ("fp8-rowwise", {"layout__pp": 2}),
    )
]
GROUPED = [
    {
        "model__mup_base_hidden": 8,
        "train__lr_factors__blocks.1.attn.?.weight": 0.5,
        "train__weight_decays__*norm*": 0.1,
        "layout__dp": 2,
        "layout__zero": 2,
        "train__optimiser": kind,
    }
    for kind in ("adamw", "adamw8bit", "muon")
]
EIGHT_BIT: list[dict[str, object]] = [
    {"train__optimiser": "adamw8bit", "precision__compute": "bf16", **layout}
    for layout in (
        {"layout__dp": 2, "layout__zero": 3, "layout__tp": 2},
        {"layout__dp": 2, "layout__ep": 2, **EXPERTS},
        {"layout__dp": 2, "layout__zero": 2, "precision__master": "bf16"},
    )
]
QUANTISED: list[dict[str, object]] = [
    {"precision__qat": "int4", "model__hidden": 64, "model__ffn": 64, "layout__tp": 2, "layout__dp": 2}
]
QUICK = [RESUMED[7], RESUMED[8], LOW[0], ROUNDED[2], GROUPED[0], EIGHT_BIT[1]]
"""Each format, optimiser, level of ZeRO and axis, and experts."""
RESUMED += LOW + ROUNDED + GROUPED + EIGHT_BIT + QUANTISED


@pytest.mark.parametrize("flags", marked(RESUMED, QUICK))
def test_stop_and_resume_are_bitwise_equal(
    ranks: Ranks, corpus: Path, tmp_path: Path, trained_once: TrainedOnce, flags: dict[str, object]
) -> None:
    spec = spec_of(corpus, **flags, checkpoint__every=HALF)
    whole, _ = trained_once(spec, tmp_path / "run")
    again, _ = go_on(ranks, spec, tmp_path / "run")
    assert again["steps"] == whole["steps"] == STEPS
    for what in ("parameters_sha256", "samples_sha256", "final_loss"):
        assert again[what] == whole[what], what


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"dp": 4, "zero": 3}, {"dp": 2, "zero": 1}),
        pytest.param({"dp": 2, "zero": 1}, {"dp": 1}, marks=pytest.mark.full),
        pytest.param({"dp": 1}, {"dp": 2, "replicate": 2, "zero": 2}, marks=pytest.mark.full),
        pytest.param({"dp": 2, "replicate": 2, "zero": 3}, {"dp": 4}, marks=pytest.mark.full),
        ({"dp": 2, "zero": 1}, {"pp": 2, "dp": 2}),
        pytest.param(
            {"dp": 2, "zero": 3, "pp": 2},
            {"dp": 2, "zero": 1, "pp": 2, "order": "replicate-dp-pp-tp"},
            marks=pytest.mark.full,
        ),
    ],
)
def test_resume_on_another_layout(
    ranks: Ranks,
    corpus: Path,
    tmp_path: Path,
    trained_once: TrainedOnce,
    before: dict[str, object],
    after: dict[str, object],
) -> None:
    def flags(layout: dict[str, object]) -> dict[str, object]:
        return {f"layout__{key}": value for key, value in layout.items()}

    first = spec_of(corpus, **flags(before), checkpoint__every=HALF)
    whole, wanted = trained_once(first, tmp_path / "moved")
    moved, found = go_on(ranks, spec_of(corpus, **flags(after)), tmp_path / "moved")
    assert moved["steps"] == STEPS
    assert moved["samples_sha256"] == whole["samples_sha256"]
    for name, tensor in found.items():  # the first rank's: all of them but in a pipeline
        torch.testing.assert_close(tensor, wanted[name], rtol=0, atol=1e-5, msg=name)


def test_quantisation_aware_training_begins_and_ends_at_any_checkpoint(
    ranks: Ranks, corpus: Path, tmp_path: Path, trained_once: TrainedOnce
) -> None:
    digests = []
    for name, second in (("plain", {}), ("aware", {"precision__qat": "fp8"})):
        out = tmp_path / name
        trained_once(spec_of(corpus, train__stop_at=HALF), out)
        done, _ = start(ranks, spec_of(corpus, train__stop_at=HALF + 1, **second), out, "auto")
        digests.append(done["parameters_sha256"])
        done, _ = start(ranks, spec_of(corpus), out, "auto")
        assert done["steps"] == STEPS
    assert digests[0] != digests[1]


@pytest.mark.parametrize("tied", ["false", pytest.param("true", marks=pytest.mark.full)])
def test_a_checkpoint_of_tensor_and_context_ranks_loads_anywhere(
    ranks: Ranks, corpus: Path, tmp_path: Path, tied: str
) -> None:
    def at(**layout: object) -> RunSpec:
        flags = {f"layout__{key}": value for key, value in layout.items()}
        model = {"model__vocab_size": 301, "model__kv_heads": 2, "model__tied": tied}  # 2 and 4 leave a rest
        return spec_of(corpus, **flags, **model, train__steps=2)

    wanted = ranks.run((spec := at(tp=2, cp=2, zero=2)).layout, trained, spec, tmp_path)[0]
    for spec in (at(dp=4, zero=3), at(tp=4), at()):
        for found in ranks.run(spec.layout, loaded, spec, tmp_path):
            assert found == digests(wanted)


@pytest.mark.parametrize("tied", ["true", pytest.param("false", marks=pytest.mark.full)])
def test_a_checkpoint_of_a_pipeline_loads_anywhere(
    ranks: Ranks, corpus: Path, tmp_path: Path, tied: str
) -> None:
    def at(**layout: object) -> RunSpec:
        flags = {f"layout__{key}": value for key, value in layout.items()}
        model = {"model__vocab_size": 301, "model__layers": 3, "model__tied": tied}
        return spec_of(corpus, **flags, **model, train__steps=2, layout__micro_batch=1)

    spec = at(pp=2, tp=2, dp=2, zero=2, schedule="1f1b")
    wanted = {k: v for found in ranks.run(spec.layout, trained, spec, tmp_path) for k, v in found.items()}
    for spec in (at(), at(dp=4, zero=3), at(pp=4, tp=2, stages="0,1,2,0"), at(pp=2, schedule="zb-v")):
        found = {k: v for held in ranks.run(spec.layout, loaded, spec, tmp_path) for k, v in held.items()}
        assert found == digests(wanted)


def test_an_export_does_not_know_the_layout(ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    """A run of two tensor ranks and a run of one device, both with the initial weights."""
    for name, tp in (("split", 2), ("alone", 1)):
        spec = spec_of(corpus, layout__tp=tp, train__steps=1, train__lr=1e-30, train__weight_decay=0)
        ranks.run(spec.layout, trained, spec, tmp_path / name)
        record = json.dumps({"spec": spec.to_json()})
        (tmp_path / name / "run.json").write_text(record, encoding="utf-8")
        api.export(tmp_path / name, tmp_path / f"{name}-hf")
    files = sorted(path.name for path in (tmp_path / "alone-hf").iterdir())
    assert "model.safetensors" in files and "README.md" in files
    for file in files:
        split, alone = ((tmp_path / f"{name}-hf" / file).read_bytes() for name in ("split", "alone"))
        if file == "README.md":  # it shows the run file, and the folder's name
            split = split.replace(b"split-hf", b"alone-hf").replace(b"tp = 2\n", b"")
        assert split == alone, file
