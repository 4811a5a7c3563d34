"""Messages to experts of a fixed size: equal to one device, and to exact messages where some have no room."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from covering import marked
from equality import Counted, Run, equal_to_one_device, verify_and_count
from expert_cases import BASE, ROUTERS
from low_precision_cases import BASE as LOW
from low_precision_cases import EXPERTS
from meshwright.comm.mesh import Mesh
from meshwright.model.router import Router
from meshwright.parallel.expert_parallel import BoundedDispatcher
from meshwright.spec import RunSpec
from meshwright.train.step import Trainer
from ranks import Ranks
from small import first_batches, spec_of


@contextmanager
def bad_memory() -> Iterator[None]:
    """Let memory that is not written hold NaN."""
    before = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = before


def on_bad_memory(mesh: Mesh, spec: RunSpec) -> Counted:
    """Run `verify` with memory that holds NaN, and see that dispatches are bounded."""
    plans = []
    settle = BoundedDispatcher._plan

    def count(dispatcher: BoundedDispatcher, *args: Tensor) -> None:
        plans.append(dispatcher)
        settle(dispatcher, *args)

    with bad_memory(), patch.object(BoundedDispatcher, "_plan", count):
        assert torch.empty(3).isnan().all()
        found = verify_and_count(mesh, spec)
    assert plans
    return found


def check(ranks: Ranks, run: Run = on_bad_memory, **flags: object) -> None:
    spec = spec_of(BASE, **flags, layout__expert_buffer_factor=1)
    kinds = equal_to_one_device(ranks, spec, 1e-9, run=run)
    assert "step 2 balance" in kinds


CASES: list[dict[str, object]] = [
    {"router": "mixtral", "layout__dp": 4, "layout__ep": 4, "layout__zero": 3},
    {"router": "deepseek", "layout__dp": 2, "layout__ep": 2, "recompute__policy": "full"},
    {"router": "gpt-oss", "layout__dp": 2, "layout__tp": 2, "layout__ep": 2, "layout__etp": 2},
    {
        "router": "capacity", "layout__tp": 2, "layout__ep": 2, "layout__sequence_parallel": "false",
        "recompute__policy": "selective", "layout__expert_parts": 2,
    },
    {
        "router": "qwen3", "layout__pp": 2, "layout__dp": 2, "layout__ep": 2, "layout__schedule": "zb-v",
        "model__layers": 4, "layout__zero": 2,
    },
    {
        "router": "qwen2, deepseek-v2", "layout__dp": 2, "layout__cp": 2, "layout__ep": 4,
        "recompute__save": "attention",
    },
    {"router": "mixtral", "layout__dp": 2, "layout__etp": 2},
    {"router": "deepseek", "layout__dp": 2, "layout__ep": 2, "lora__rank": 2, "lora__dropout": 0.2},
]  # fmt: skip


@pytest.mark.parametrize("case", marked(CASES, [CASES[number] for number in (3, 4, 7)]))
def test_bounded_messages_equal_one_device(ranks: Ranks, case: dict[str, object]) -> None:
    flags = dict(case)
    check(ranks, **(ROUTERS[str(flags.pop("router"))] | flags))


@pytest.mark.parametrize("recipe", [pytest.param("fp8", marks=pytest.mark.full), "mxfp8"])
def test_bounded_messages_go_with_low_precision(ranks: Ranks, recipe: str) -> None:
    flags = {
        "layout__dp": 2,
        "layout__ep": 2,
        "layout__expert_buffer_factor": 1,
        "precision__compute": recipe,
    }
    equal_to_one_device(ranks, spec_of(LOW, **flags, **EXPERTS), 1e-9, run=on_bad_memory)


def losses_and_parameters(
    mesh: Mesh, spec: RunSpec, uneven: bool
) -> tuple[list[float], list[float], list[Tensor]]:
    """Losses of three steps, the factors that steps needed that were computed again, and this rank's
    parameters."""
    trainer = Trainer(spec, mesh)
    trainer.initialise()
    losses, needed = [], []
    batches = first_batches(spec, mesh, 3)
    with patch.object(Router, "_choose", to_one) if uneven else nullcontext():
        for number, batch in enumerate(batches, 1):
            following = batches[number] if number < len(batches) else None
            done = trainer.step(batch, number, following)
            assert done.applied
            losses.append(done.loss)
            needed.append(done.metrics.get("expert_buffer_needed", 0.0))
    return losses, needed, [each.full_tensor().clone() for _, each in trainer.states.parameters()]


def to_one(router: Router, scores: Tensor) -> Tensor:
    """Every token's first expert is the sixth."""
    others = torch.arange(router.moe.top_k, device=scores.device)
    return ((5 + others) % router.moe.experts).expand(len(scores), -1)


OVERFLOWING: list[dict[str, object]] = [
    {"layout__dp": 4, "layout__ep": 4, "layout__zero": 3},
    {
        "layout__dp": 2, "layout__tp": 2, "layout__ep": 4, "recompute__policy": "full",
        "train__optimiser": "muon",
    },
    {"layout__pp": 2, "layout__dp": 2, "layout__ep": 2, "layout__zero": 2, "train__clip_parameter": 1.0},
    {
        "layout__dp": 4, "layout__ep": 4, "layout__expert_parts": 2, "precision__compute": "fp8",
        "model__moe__ffn": 16, "model__ffn": 48,
    },
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:layout.expert_buffer_factor")
@pytest.mark.parametrize("case", marked(OVERFLOWING, OVERFLOWING[2:3]))
def test_a_step_whose_copies_lack_room_is_computed_again(ranks: Ranks, case: dict[str, object]) -> None:
    flags = {"data__corpus": "synthetic", "precision__compute": "fp64"} | case
    runs = [
        ranks.run(spec.layout, losses_and_parameters, spec, True)
        for spec in (
            spec_of(BASE, **flags), spec_of(BASE, **flags, layout__expert_buffer_factor=1.25),
        )
    ]  # fmt: skip
    for (losses, _, parameters), (again, needed, others) in zip(*runs, strict=True):
        assert losses == again
        assert all(torch.equal(*pair) for pair in zip(parameters, others, strict=True))
        ep = int(str(case["layout__ep"]))
        assert needed == [pytest.approx(ep, abs=0.5 + 0.03)] * 3 if ep == 2 else min(needed) > 2


def test_a_step_whose_copies_have_room_is_computed_once(ranks: Ranks) -> None:
    flags = {"layout__dp": 4, "layout__ep": 4, "precision__compute": "fp64", "data__corpus": "synthetic"}
    runs = [
        ranks.run(spec.layout, losses_and_parameters, spec, False)
        for spec in (spec_of(BASE, **flags), spec_of(BASE, **flags, layout__expert_buffer_factor=4))
    ]
    for (losses, _, parameters), (again, needed, others) in zip(*runs, strict=True):
        assert needed == [0.0] * 3
        assert losses == pytest.approx(again, rel=1e-13)
        for one, other in zip(parameters, others, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-13)
