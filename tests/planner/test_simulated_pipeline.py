"""A timed step does the model's FLOPs and holds the formulas' bytes, in any cut and on any layout."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.planner.activations import activations
from meshwright.planner.simulated_pipeline import Machine, PipelineStep, message_bytes, step
from meshwright.schedule import NAMES, ScheduleError, StageCost, StageLink, make, simulate
from meshwright.spec import RunSpec
from meshwright.spec.load import from_tree
from meshwright.spec.stages import stages

FREE = Machine(1e9, 0.0, 1e30)


def spec_of(*flags: tuple[str, str], **layout: Any) -> RunSpec:
    tree = {"model": {"layers": 6}, "train": {"batch_tokens": 2**15}, "layout": {"micro_batch": 2, **layout}}
    return from_tree(tree, flags)


def flops(timed: PipelineStep, spec: RunSpec) -> float:
    """FLOPs that all devices of one replica's pipeline computed."""
    return sum(timed.simulation.busy) * FREE.flops * spec.layout.tp * spec.layout.cp


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("cut", ["even", "balanced"])
def test_a_step_does_the_models_flops(name: str, cut: str) -> None:
    spec = spec_of(pp=3, schedule=name, stages=cut, tp=2, dp=2)
    tokens = spec.train.batch_tokens / spec.layout.data_ranks
    expected = spec.model.flops_per_token(spec.data.seq_len) * tokens
    assert flops(step(spec, FREE), spec) == pytest.approx(expected)


def test_further_tokens_are_work_of_the_last_stage() -> None:
    spec, alone = spec_of(("model.mtp_num_layers", "1"), pp=3, stages="even"), spec_of(pp=3, stages="even")
    tokens = spec.train.batch_tokens / spec.layout.data_ranks
    expected = spec.model.flops_per_token(spec.data.seq_len) * tokens
    assert flops(step(spec, FREE), spec) == pytest.approx(expected)
    busy, without = (step(each, FREE).simulation.busy for each in (spec, alone))
    assert busy[:2] == pytest.approx(without[:2])
    model, length = spec.model, spec.data.seq_len
    more = model.block_flops(length, model.kinds[-1]) + model.head_flops + 4 * model.hidden**2
    assert (busy[2] - without[2]) * FREE.flops == pytest.approx(3 * more * tokens)


@given(st.permutations([0, 1, 2, 3]), st.sampled_from([1, 2]), st.sampled_from([1, 4]))
def test_neither_the_cut_nor_the_other_axes_change_the_flops(blocks: list[int], tp: int, cp: int) -> None:
    spec = spec_of(pp=4, stages=blocks, tp=tp, cp=cp)
    alone = spec_of()
    assert flops(step(spec, FREE), spec) == pytest.approx(flops(step(alone, FREE), alone))


def test_what_is_recomputed_is_done_once_more() -> None:
    kept = spec_of(pp=2)
    (kind,) = kept.model.kinds
    forward = kept.model.layers * kept.model.block_flops(kept.data.seq_len, kind) * kept.train.batch_tokens
    full = spec_of(("recompute.policy", "full"), pp=2)
    assert flops(step(full, FREE), full) - flops(step(kept, FREE), kept) == pytest.approx(forward)


def test_one_rank_keeps_what_a_run_without_a_pipeline_keeps() -> None:
    spec = spec_of(schedule="zb-v")
    timed = step(spec, Machine()).simulation
    assert timed.schedule.stages == 1 and timed.bubble == 0
    assert timed.peak_bytes == (activations(spec).kept,)


def test_a_rank_keeps_its_blocks_of_each_microbatch_in_flight() -> None:
    spec = spec_of(pp=3, stages=[3, 2, 1], schedule="1f1b")
    held, timed = activations(spec), step(spec, Machine()).simulation
    assert timed.peak == (3, 2, 1)
    block = held.by_block[0]
    expected = (3 * (3 * block + held.shared), 2 * (2 * block + held.shared))
    assert timed.peak_bytes == (*expected, block + held.shared + held.head)


MOE = {"model.moe.experts": 8, "model.moe.top_k": 2, "model.moe.ffn": 96, "model.moe.dense_first": 2}


@pytest.mark.parametrize("policy", ["none", "selective", "full"])
def test_blocks_with_experts_count_as_what_they_are(policy: str) -> None:
    flags = [(key, str(value)) for key, value in MOE.items()] + [("recompute.policy", policy)]
    spec = spec_of(*flags, pp=3, stages=[3, 1, 2], schedule="1f1b")
    held, timed = activations(spec), step(spec, FREE)
    dense, routed = held.by_block[1], held.by_block[2]
    assert held.by_block == (dense, dense, *[routed] * 4) and dense != routed
    expected = (3 * (2 * dense + routed + held.shared), 2 * (routed + held.shared))
    assert timed.simulation.peak_bytes == (*expected, 2 * routed + held.shared + held.head)
    if policy == "none":
        tokens = spec.train.batch_tokens
        assert flops(timed, spec) == pytest.approx(spec.model.flops_per_token(spec.data.seq_len) * tokens)


@pytest.mark.parametrize("name", NAMES)
def test_given_durations_are_those_of_every_stage(name: str) -> None:
    spec = spec_of(pp=2, schedule=name)
    timed = step(spec, Machine(latency=1e-3, bandwidth=1e9), StageCost(0.02, 0.03, 0.01)).simulation
    cost = StageCost(0.02, 0.03, 0.01, output=message_bytes(spec))
    made = make(name, 2, spec.layout.chunks, spec.microbatches)
    assert timed.start == simulate(made, cost, StageLink(1e-3, 1e9)).start


def test_a_message_is_the_residual_stream_of_a_device() -> None:
    whole = 2 * 512 * 256 * 4  # 2 sequences of 512 tokens of 256 channels in fp32
    assert message_bytes(spec_of(pp=2)) == whole
    assert message_bytes(spec_of(pp=2, tp=4, cp=2)) == whole // 8
    assert message_bytes(spec_of(pp=2, tp=4, sequence_parallel=False)) == whole
    assert message_bytes(spec_of(("precision.compute", "bf16"), pp=2)) == whole // 2


@pytest.mark.parametrize("name", NAMES)
def test_the_formula_is_the_bubble_where_ranks_are_equal_and_links_free(name: str) -> None:
    timed = step(spec_of(pp=2, schedule=name), FREE, StageCost(0.01, 0.01, 0.01))
    assert timed.closed_form_bubble == pytest.approx(timed.simulation.bubble, abs=1e-6)


def test_the_json_names_every_rank() -> None:
    spec = spec_of(pp=3, schedule="v-half")
    found = step(spec, Machine()).to_json()
    cut = stages(spec.model, spec.layout, spec.data.seq_len)
    assert found["blocks"] == [len(cut[rank].blocks) + len(cut[5 - rank].blocks) for rank in range(3)]
    for name in ("bubbles", "peak_activations", "peak_activation_bytes"):
        assert len(found[name]) == 3


@pytest.mark.parametrize("machine", [(0, 0, 1), (-1, 0, 1), (float("inf"), 0, 1)])
def test_a_machine_that_cannot_be_is_refused(machine: tuple[float, float, float]) -> None:
    with pytest.raises(ScheduleError, match="flops is"):
        Machine(*machine)


def test_a_large_pipeline_is_timed_in_two_seconds() -> None:
    flags = {"model.layers": "128", "data.seq_len": "128", "train.batch_tokens": str(128 * 512)}
    spec = from_tree({"layout": {"pp": 64, "schedule": "zb-v", "micro_batch": 1}}, [*flags.items()])
    assert spec.microbatches == 512

    def taken() -> float:
        begin = time.process_time()  # others may be at work on this machine
        step(spec, Machine())
        return time.process_time() - begin

    assert any(taken() < 2 for _ in range(3))
