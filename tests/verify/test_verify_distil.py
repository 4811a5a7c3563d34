"""Distillation: every layout of student and teacher equals one device, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from covering import marked, name
from equality import STEPS
from meshwright.comm.mesh import Mesh
from meshwright.spec import RunSpec
from meshwright.verify.verify import verify
from ranks import Ranks
from small import spec_of

BASE: dict[str, object] = {
    "model.hidden": 32, "model.ffn": 48, "model.heads": 4, "model.kv_heads": 2, "model.vocab_size": 61,
    "data.corpus": "synthetic", "data.seq_len": 32, "train.steps": 3, "train.warmup_steps": 1,
    "train.batch_tokens": 4 * 32, "layout.micro_batch": 1,
}  # fmt: skip
BIGGER: dict[str, object] = {
    "model__layers": 3, "model__hidden": 48, "model__ffn": 64, "model__heads": 4, "model__kv_heads": 4,
    "model__norm": "layernorm",
}  # fmt: skip
EXPERTS: dict[str, object] = {"model__moe__experts": 4, "model__moe__top_k": 2, "model__moe__ffn": 16}
TOP: dict[str, object] = {"distil__top_k": 5}
HIDDEN: dict[str, object] = {"distil__hidden": 0.7}
REVERSE: dict[str, object] = {"distil__loss": "reverse_kl"}
WARM: dict[str, object] = {"distil__temperature": 2.0, "distil__weight": 0.8}
ROUNDED: dict[str, object] = {
    "precision__qat": "int4", "model__hidden": 64, "model__ffn": 128, "model__head_dim": 16,
}  # fmt: skip
CASES: list[dict[str, object]] = [
    {},
    {**REVERSE, **WARM},
    {**TOP, **WARM},
    {**TOP, **REVERSE},
    {"layout__tp": 2, **WARM},
    {"layout__tp": 2, **TOP, **HIDDEN},
    {"layout__tp": 2, **TOP, **REVERSE, "distil__tp": 2},
    {"layout__tp": 2, **REVERSE, **HIDDEN, "layout__sequence_parallel": "false"},
    {"layout__dp": 2, "layout__zero": 3, "distil__tp": 2, **TOP},
    {"layout__dp": 4, "layout__zero": 1, "distil__tp": 2, "distil__pp": 2, **REVERSE},
    {"layout__pp": 2, "layout__tp": 2, "distil__zero": 3, "distil__weight": 1.0},
    {"layout__pp": 2, "layout__schedule": "zb-h1", "distil__cp": 2, **TOP, **HIDDEN},
    {"layout__cp": 2, "layout__tp": 2, "distil__tp": 4, **TOP},
    {"layout__cp": 2, "layout__dp": 2, "distil__cp": 2, "distil__pp": 2, **HIDDEN, **REVERSE},
    {"layout__replicate": 2, "layout__zero": 2, "layout__dp": 2, "distil__pp": 2, **TOP, **REVERSE, **WARM},
    {"layout__dp": 2, "layout__ep": 2, "distil__tp": 2, **EXPERTS, **TOP},
    {"layout__tp": 2, "layout__pp": 2, "distil__tp": 2, **ROUNDED, **TOP, **WARM},
    {"layout__dp": 2, "layout__zero": 3, "distil__pp": 2, **ROUNDED, "precision__qat": "int8-dynamic"},
]  # fmt: skip


def teacher_of_kind(folder: Path, **model: object) -> Path:
    """The folder of a run that has a record and no checkpoint: all that `verify` reads."""
    spec = spec_of(BASE, **model)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.json").write_text(json.dumps({"spec": spec.to_json()}))
    return folder


def compared(mesh: Mesh, spec: RunSpec) -> dict[str, object] | None:
    return verify(spec, mesh, STEPS)


QUICK = [CASES[number] for number in (7, 11)]
"""Tensor and pipeline ranks of the student, context ranks of the teacher, and each loss."""


@pytest.mark.parametrize("case", marked(CASES, QUICK), ids=name)
def test_distilled_steps_equal_one_device(ranks: Ranks, tmp_path: Path, case: dict[str, object]) -> None:
    kind = {**BIGGER, **({"model__hidden": 32} if "distil__hidden" in case else {})}
    teacher = teacher_of_kind(tmp_path / "teacher", **kind)
    spec = spec_of(BASE, distil__teacher=teacher, **case)
    found = ranks.run(spec.layout, compared, spec, rules="nccl")[0]
    assert found["equal"], found["first"]["sentence"]
    assert found["worst_relative"] <= 1e-10, found["worst_name"]
    assert "step 2 parameter" in {row["kind"] for row in found["rows"]}
