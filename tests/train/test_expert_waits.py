"""How often the host waits for the device because of a layer with experts, in dry runs of one rank."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from covering import marked
from meshwright.dryrun.rank_step import rehearse
from meshwright.spec import load

LAYERS, MICROBATCHES, SEQ_LEN = 2, 2, 16
MOE: dict[str, object] = {
    "model.preset": "moe-tiny", "model.layers": LAYERS, "model.moe.dense_first": 0,
    "model.moe.aux_loss": 0.01, "model.moe.z_loss": 0.1, "model.moe.bias": "true",
    "data.corpus": "synthetic", "data.seq_len": SEQ_LEN, "layout.micro_batch": 1, "precision.compute": "bf16",
}  # fmt: skip
POLICIES = ["none", "full", "selective"]


def waits(**flags: object) -> float:
    """Waits of a step but for the one that reads its numbers at the end."""
    keys = MOE | {key.replace("__", "."): value for key, value in flags.items()}
    ranks = int(str(keys.get("layout.dp", 1)))
    keys["train.batch_tokens"] = MICROBATCHES * ranks * SEQ_LEN
    spec = load(None, [(key, str(value)) for key, value in keys.items()])
    assert spec.microbatches == MICROBATCHES
    return rehearse(spec, 0, torch.device("cpu")).counts["step"]["device_waits"] - 1


ROUTED: list[dict[str, object]] = [
    *({"recompute__policy": policy} for policy in POLICIES),
    {"recompute__policy": "none", "model__moe__capacity_factor": 1.0},
    *(
        {"recompute__policy": policy, "layout__dp": 2, "layout__ep": 2, "layout__expert_buffer_factor": 1.5}
        for policy in POLICIES
    ),
    {
        "recompute__policy": "full", "layout__dp": 4, "layout__ep": 2, "layout__etp": 2,
        "layout__expert_parts": 2, "layout__expert_buffer_factor": 2, "model__moe__capacity_factor": 1.0,
    },
]  # fmt: skip


@pytest.mark.parametrize("flags", marked(ROUTED, [ROUTED[number] for number in (2, 3, 4, 7)]))
def test_experts_of_one_kernel_wait_for_nothing(
    flags: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CPU's kernel stands in for CUDA's: both take the groups' ends from the device."""

    def always(_x: Tensor) -> bool:
        return True

    monkeypatch.setattr("meshwright.model.moe.one_kernel", always)
    monkeypatch.setattr("meshwright.model.grouped_mm.one_kernel", always)
    assert waits(**flags) == 0


@pytest.mark.parametrize(
    ("parts", "policy"),
    [
        (1, "full"),
        (2, "selective"),
        *(pytest.param(*each, marks=pytest.mark.full) for each in ((1, "none"), (1, "selective"))),
        *(pytest.param(2, policy, marks=pytest.mark.full) for policy in ("none", "full")),
    ],
)
def test_a_dispatch_over_ranks_waits_once_to_learn_its_splits(parts: int, policy: str) -> None:
    found = waits(layout__dp=2, layout__ep=2, layout__expert_parts=parts, recompute__policy=policy)
    assert found == LAYERS * MICROBATCHES * parts


def test_experts_computed_one_by_one_are_waited_for_once() -> None:
    assert waits(recompute__policy="none") == LAYERS * MICROBATCHES


def test_admission_by_capacity_waits_for_nothing_more() -> None:
    flags = {"layout__dp": 2, "layout__ep": 2, "model__moe__capacity_factor": 1.0}
    assert waits(recompute__policy="none", **flags) == LAYERS * MICROBATCHES
