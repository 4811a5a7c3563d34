"""A layer that predicts further tokens equals one device on every axis, and sends the bytes planned."""

from __future__ import annotations

from unittest.mock import patch

import pytest

from covering import marked, name
from equality import Counted, Run, equal_to_one_device, verify_and_count
from expert_cases import BASE, ROUTERS
from meshwright.comm.mesh import Mesh
from meshwright.data.loader import Batch
from meshwright.model.multi_token_prediction import FurtherTokens, further_tokens
from meshwright.parallel import multi_token_prediction as subject
from meshwright.parallel.context_parallel import share
from meshwright.spec import RunSpec
from ranks import Ranks
from small import spec_of

FURTHER = {"model__mtp_num_layers": 1, "train__mtp_loss_scaling_factor": 0.3}
DENSE = {key: value for key, value in BASE.items() if not key.startswith("model.moe")}

LAYOUTS: list[dict[str, object]] = [
    {"dp": 2, "zero": 3, "model__tied": "true"},
    {"dp": 2, "zero": 3, "recompute__policy": "selective"},
    {"dp": 2, "zero": 2, "recompute__policy": "full", "data__pack": "false"},
    {"tp": 2, "sequence_parallel": "false", "recompute__policy": "selective"},
    {"tp": 2, "dp": 2, "zero": 1, "train__optimiser": "muon"},
    {"tp": 2, "cp": 2, "recompute__policy": "selective", "data__document_mask": "false"},
    {"cp": 2, "dp": 2, "zero": 3, "context_mode": "ulysses"},
    {"pp": 2, "schedule": "1f1b", "dp": 2, "zero": 2},
    {"pp": 2, "schedule": "zb-v", "tp": 2, "model__tied": "true"},
    {"pp": 2, "schedule": "zb-h1", "cp": 2, "tp": 2},
    {"pp": 2, "schedule": "gpipe", "cp": 2, "zero": 1, "train__optimiser": "adamw8bit"},
    {"pp": 2, "schedule": "interleaved", "tp": 2, "zero": 3, "dp": 2, "model__layers": 4},
]


def flags(case: dict[str, object]) -> dict[str, object]:
    """Flags of a case, whose names without a section are of the layout."""
    return {key if "__" in key else f"layout__{key}": value for key, value in case.items()}


@pytest.mark.parametrize("case", marked(LAYOUTS, [LAYOUTS[n] for n in (1, 8)]), ids=name)
def test_every_axis_equals_one_device(ranks: Ranks, case: dict[str, object]) -> None:
    kinds = equal_to_one_device(ranks, spec_of(DENSE, **FURTHER, **flags(case)), 1e-9)
    assert {"step 1 further loss", "step 2 further loss"} <= set(kinds)


EXPERTS: list[dict[str, object]] = [
    {"dp": 2, "ep": 2, "tp": 2, "zero": 3, "recompute__policy": "selective"},
    {"cp": 2, "dp": 2, "ep": 4, "recompute__policy": "full"},
    {"pp": 2, "dp": 2, "ep": 2, "tp": 2, "schedule": "dualpipe-v", "zero": 3, "model__layers": 4},
]


@pytest.mark.parametrize("case", marked(EXPERTS, EXPERTS[1:2]), ids=name)
def test_experts_of_the_layer_equal_one_device(ranks: Ranks, case: dict[str, object]) -> None:
    kinds = equal_to_one_device(ranks, spec_of(BASE, **FURTHER, **ROUTERS["deepseek"], **flags(case)), 1e-9)
    assert {"step 2 further loss", "step 2 balance", "step 2 router bias"} <= set(kinds)


def test_the_layer_alone_may_be_trained(ranks: Ranks) -> None:
    frozen = "embed.*,blocks.[0-2].*,head.weight,head.norm.*"
    spec = spec_of(DENSE, **FURTHER, layout__dp=2, layout__zero=3, train__frozen=frozen)
    equal_to_one_device(ranks, spec, 1e-9)


def of_own_tokens(part: subject.MultiTokenPrediction, batch: Batch) -> FurtherTokens:
    """A mistake: further tokens are taken of the tokens that a context rank holds."""
    own = (share(x, part._mesh.context) for x in (batch.tokens, batch.targets, batch.documents))
    return further_tokens(*own)


def with_own_tokens(mesh: Mesh, spec: RunSpec) -> Counted:
    with patch.object(subject.MultiTokenPrediction, "_own", of_own_tokens):
        return verify_and_count(mesh, spec, known=False)


def with_another_mean(mesh: Mesh, spec: RunSpec) -> Counted:
    """A mistake: the loss is a mean over one target more than there are."""
    with patch.object(subject, "weight_of_a_target", lambda targets: 1 / (targets + 1)):
        return verify_and_count(mesh, spec, known=False)


@pytest.mark.parametrize("mistake", [with_own_tokens, with_another_mean])
def test_mistakes_are_found(ranks: Ranks, mistake: Run) -> None:
    spec = spec_of(DENSE, **FURTHER, layout__cp=2)
    (found, _, _), *_ = ranks.run(spec.layout, mistake, spec)
    assert found is not None
    assert not found["equal"]
    assert "step 1" in found["first"]["sentence"]
