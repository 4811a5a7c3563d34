"""Bytes of states by formula, beside what was measured of real ranks; `test_dryrun.py` has random layouts."""

from __future__ import annotations

import pytest

from meshwright.planner.memory.states import states
from meshwright.spec import load

MEASURED = {0: 575_824_972, 1: 287_912_524, 2: 191_941_708, 3: 127_961_164}
"""Stage of ZeRO -> bytes of live tensors on one of 4 ranks, by `bench/memory.py` (docs/memory.md)."""


def small(**flags: object) -> list[tuple[str, str]]:
    given: dict[str, object] = {
        "model.preset": "small", "data.corpus": "synthetic", "data.seq_len": 64, "layout.micro_batch": 1,
        "train.batch_tokens": 64 * 2 * 4, "layout.dp": 4, "precision.compute": "bf16",
    }  # fmt: skip
    given |= {key.replace("__", "."): value for key, value in flags.items()}
    return [(key, str(value)) for key, value in given.items()]


@pytest.mark.parametrize("zero", MEASURED)
def test_states_are_what_was_measured(zero: int) -> None:
    assert states(load(None, small(layout__zero=zero))).total == MEASURED[zero]


@pytest.mark.parametrize("zero", MEASURED)
def test_lion_has_one_moment(zero: int) -> None:
    two, one = (
        states(load(None, small(layout__zero=zero, train__optimiser=each))) for each in ("adamw", "lion")
    )
    assert one.optimiser == pytest.approx(two.optimiser / 2, abs=1000)  # AdamW's counts of steps
    assert one.total - two.total == one.optimiser - two.optimiser


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_whole_gradients_wait_for_other_microbatches_in_stage_1_and_in_pipelines(zero: int) -> None:
    one, two = (64 * 4, 64 * 2 * 4)
    for pp in (1, 2):
        held = [
            states(load(None, small(layout__zero=zero, layout__pp=pp, train__batch_tokens=tokens))).gradients
            for tokens in (one, two)
        ]
        assert held[1] == (4 * held[0] if zero == 1 or pp == 2 else held[0])


def test_the_stages_of_a_pipeline_hold_all_of_the_model() -> None:
    spec = load(None, small(layout__pp=2, layout__zero=0))
    assert not spec.model.tied
    assert sum(states(spec, rank).masters for rank in range(2)) == 4 * spec.model.parameters


def test_delayed_scaling_keeps_its_history_on_every_rank() -> None:
    """24 bytes of a matrix, and 12 for each step of the history: 3 operands of 7 matrices in 8 blocks."""
    flags = {"precision__compute": "fp8", "precision__amax_history": 16, "layout__zero": 3}
    held, usual = states(load(None, small(**flags))), states(load(None, small(layout__zero=3)))
    assert held.scaling == held.total - usual.total == 7 * 8 * (24 + 12 * 16)
    assert usual.scaling == 0
