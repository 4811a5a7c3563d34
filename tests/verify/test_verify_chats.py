"""Chats, of which some tokens are trained on: each layout equals one device, and packed equals unpacked."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from covering import marked, name
from equality import equal_to_one_device
from expert_cases import BASE, ROUTERS
from meshwright.comm.mesh import Mesh
from meshwright.data.corpus import open_corpus
from meshwright.data.loader import TENSORS, Batch, SplitReader
from meshwright.parallel.loss_normalization import count_targets
from meshwright.spec import RunSpec
from meshwright.train.step import Trainer
from ranks import Ranks
from small import spec_of

CHATS = {"data__format": "chat", "data__seq_len": 32}
DENSE = {key: value for key, value in BASE.items() if not key.startswith("model.moe")}
LAYOUTS: list[dict[str, object]] = [
    {"dp": 2, "zero": 3},
    {"dp": 2, "zero": 2, "data__pack": "false"},
    {"tp": 2},
    {"cp": 2},
    {"cp": 2, "context_mode": "ulysses"},
    {"pp": 2, "schedule": "zb-h1"},
    {"dp": 2, "zero": 3, "tp": 2},
    {"pp": 2, "schedule": "1f1b", "cp": 2, "model__mtp_num_layers": 1},
    {"cp": 2, "tp": 2, "recompute__policy": "full"},
]


def flags(case: dict[str, object]) -> dict[str, object]:
    """Flags of a case, whose names without a section are of the layout."""
    return {key if "__" in key else f"layout__{key}": value for key, value in case.items()}


@pytest.mark.parametrize("case", marked(LAYOUTS, [LAYOUTS[n] for n in (2, 5)]), ids=name)
def test_every_axis_equals_one_device(ranks: Ranks, case: dict[str, object]) -> None:
    spec = spec_of(DENSE, **CHATS | flags(case), train__batch_tokens=32 * 8)
    equal_to_one_device(ranks, spec, 1e-9)


def test_experts_equal_one_device(ranks: Ranks) -> None:
    case = {"layout__ep": 2, "layout__dp": 2, "layout__zero": 2}
    spec = spec_of(BASE, **CHATS, **ROUTERS["qwen3"], **case, train__batch_tokens=32 * 8)
    equal_to_one_device(ranks, spec, 1e-9)


def of_held_out_chats(mesh: Mesh, spec: RunSpec) -> tuple[int, float, dict[str, Tensor]]:
    """Targets, loss and gradients of all held-out chats in one batch."""
    trainer = Trainer(spec, mesh)
    trainer.initialise()
    batches = list(SplitReader(open_corpus(spec).validation, spec, 0, 1).batches())
    batch = Batch(*(torch.cat([getattr(each, field) for each in batches]) for field in TENSORS))
    loss = trainer.gradients(batch)
    trainer.sums(loss)
    gradients = {key: value * trainer.applied_factor for key, value in trainer.states.gradients()}
    return count_targets(batch.targets), float(loss), gradients


def test_packed_equals_unpacked(ranks: Ranks) -> None:
    """Packing changes neither loss nor gradients."""
    base = DENSE | {"data.corpus": "synthetic", "data.val_fraction": 0.02, "train.batch_tokens": 32 * 8}
    found = []
    for pack in ("true", "false"):
        spec = spec_of(base, **CHATS, data__pack=pack, precision__compute="fp64", layout__dp=1)
        found.append(ranks.run(spec.layout, of_held_out_chats, spec)[0])
    (targets, loss, gradients), (other_targets, other_loss, others) = found
    assert targets == other_targets > 200
    assert loss == pytest.approx(other_loss, rel=1e-12)
    assert gradients.keys() == others.keys() != set()
    for key, gradient in gradients.items():
        assert float((gradient - others[key]).abs().max()) <= 1e-12 * float(others[key].abs().max()), key
