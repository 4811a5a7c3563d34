"""Kinds of programs and precisions in the cost model: what each changes in seconds, bytes and messages."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from meshwright.hardware.find import cluster
from meshwright.planner.cost.breakdown import PassSeconds
from meshwright.planner.cost.expert_balance import busiest
from meshwright.planner.cost.layer import LayerCost
from meshwright.planner.cost.model import CostModel
from meshwright.planner.cost.published_messages import merged_share
from meshwright.planner.cost.software import STACKS, SoftwareStack
from meshwright.planner.cost.step import step_time
from meshwright.planner.memory.generic import Generic
from meshwright.planner.traffic.layer_shape import layer_shape
from meshwright.spec import RunSpec
from meshwright.spec.sections import NoRecompute

NEMO = STACKS["nemo"]


def run(preset: str, length: int = 4096, **layout: object) -> RunSpec:
    """A run of eight sequences for each data rank."""
    sequences = 8 * int(str(layout.get("dp", 1)))
    return RunSpec.model_validate(
        {
            "model": {"preset": preset},
            "layout": layout,
            "data": {"seq_len": length},
            "train": {"batch_tokens": sequences * length},
            "precision": {"compute": "bf16"},
        }
    )


def layer(spec: RunSpec, stack: SoftwareStack, format: str | None = None, name: str = "h100") -> LayerCost:
    return CostModel(cluster(name, spec.layout.world_size), stack, format).blocks(spec)


def first_kind(blocks: LayerCost) -> PassSeconds:
    """Seconds of a block, without experts where the model has such blocks."""
    return blocks.seconds(blocks.kinds[0])


def last_kind(blocks: LayerCost) -> PassSeconds:
    """Seconds of a block, with experts where the model has such blocks."""
    return blocks.seconds(blocks.kinds[-1])


def test_a_device_with_less_power_for_its_peak_attains_less_of_it() -> None:
    full, limited = cluster("h100").device, cluster("h100-96").device
    assert limited.peak == full.peak and limited.attained("bf16") < full.attained("bf16")
    assert full.attained("fp8") < full.attained("bf16") < 0.9  # twice the peak at the same power
    blackwell = cluster("gb200").device
    assert blackwell.attained("fp4") < blackwell.attained("fp8") < blackwell.attained("bf16")


@pytest.mark.parametrize("format", ["fp8", "mxfp8", "nvfp4"])
def test_low_precision_speeds_up_products_alone(format: str) -> None:
    spec = run("llama3-70b", dp=8)
    wide, low = (first_kind(layer(spec, NEMO, each, "gb200")) for each in (None, format))
    assert low.forward.matmul < 0.8 * wide.forward.matmul
    assert low.forward.attention == wide.forward.attention and low.forward.moved == wide.forward.moved


def test_fp8_by_rows_pays_for_its_casts() -> None:
    spec = run("llama3-70b", dp=8)
    by_tensor, by_row = (
        first_kind(layer(spec, NEMO, each)).forward.matmul for each in ("fp8", "fp8-rowwise")
    )
    assert by_row > 1.1 * by_tensor


def test_what_transformer_engine_keeps_and_gathers_in_fp8() -> None:
    spec = run("llama3-70b", dp=8, tp=4, pp=2, zero=1, schedule="1f1b")
    found = {}
    for stack in (NEMO, replace(NEMO, low_states=False)):
        costs = CostModel(cluster("h100", 64), stack, "fp8")
        sent = step_time(spec, costs).ranks[0].data.sent["shard"]
        found[stack.low_states] = Generic(costs).peak(spec).activations, sent
    assert found[True][0] < 0.9 * found[False][0] and found[True][1] < found[False][1]


def test_attention_by_kernel() -> None:
    spec = run("llama3-8b", 8192, dp=8)
    seconds = {}
    for name in ("a100", "h100"):
        for kernel in ("flash1", "flash2", "flash3", "cudnn"):
            passes = first_kind(layer(spec, replace(NEMO, attention=kernel), None, name))
            seconds[name, kernel] = passes.forward.attention
    assert seconds["a100", "flash1"] == pytest.approx(seconds["a100", "flash2"] / 0.55)
    assert seconds["a100", "flash2"] == seconds["a100", "cudnn"]
    ported = cluster("h100").device.rates.attention_ported
    assert seconds["h100", "flash1"] == pytest.approx(seconds["h100", "flash2"] / 0.55)
    assert seconds["h100", "flash2"] == pytest.approx(seconds["h100", "flash3"] / ported) and ported < 0.6
    assert seconds["h100", "flash3"] == seconds["h100", "cudnn"]


def test_collectives_beside_compute_slow_it_by_device() -> None:
    """A program's contention is from runs on NVIDIA GPUs; MI300X were measured to lose more."""
    spec = run("llama3-8b", 8192, dp=8, zero=3)
    lost = {}
    for name in ("h100", "mi300x", "mi355x"):
        costs = CostModel(cluster(name, 8), NEMO)
        data = step_time(spec, costs).ranks[0].data
        lost[name] = data.slowed / (sum(data.sent.values()) - data.exposed)
    assert lost["h100"] == pytest.approx(NEMO.numbers.contention)
    assert lost["mi355x"] == pytest.approx(NEMO.numbers.contention)
    assert lost["mi300x"] == pytest.approx(0.79)


def test_a_token_is_sent_once_to_each_node() -> None:
    """8 of 64 experts on 2 nodes of 8: on average 2 (1 - 2^-8) nodes instead of 8 copies."""
    spec = run("deepseek-v3", dp=16, ep=16, zero=1)
    assert spec.model.moe is not None
    links = CostModel(cluster("h100", 16), NEMO).links
    rates = links.cluster.device.rates
    once = 2 * (1 - 2**-8) / 8 * rates.network / 0.9
    assert merged_share(layer_shape(spec), links) == pytest.approx(once)
    inside = run("deepseek-v3", dp=8, ep=8, zero=1)  # within a node, once to each rank
    alone = CostModel(cluster("h100", 8), NEMO).links
    assert merged_share(layer_shape(inside), alone) == pytest.approx(min(4, 8 * (1 - (7 / 8) ** 8)) / 8)
    merged, copied = (
        step_time(spec, CostModel(cluster("h100", 16), replace(NEMO, merged_copies=each))).parts[
            "expert axis"
        ]
        for each in (True, False)
    )
    assert merged < 0.4 * copied


def test_experts_take_longer_where_one_rank_has_more_of_their_rows() -> None:
    spec, on = run("mixtral-8x7b", dp=8, ep=8, zero=1), cluster("h100", 8)
    even, uneven = (CostModel(on, NEMO, violation=each).blocks(spec) for each in (0.0, 0.72))
    more = busiest(spec, 0.72) / busiest(spec, 0.0)
    assert more > 1.3 and uneven.shape.copies == pytest.approx(more * even.shape.copies)
    one, other = (last_kind(each).forward for each in (even, uneven))
    assert other.expert == pytest.approx(more * one.expert, rel=0.05) and other.attention == one.attention
    experts = [sum(map(each._product, each._routed_products()[1:])) for each in (even, uneven)]
    assert other.matmul - one.matmul == pytest.approx(experts[1] - experts[0])
    assert other.matmul > 1.2 * one.matmul


def test_a_host_that_waits_for_the_counts_of_experts_cannot_launch_ahead() -> None:
    spec = run("qwen3-30b-a3b", dp=8, ep=8, zero=1)
    blocking = last_kind(layer(spec, NEMO, "fp8"))
    ahead = last_kind(layer(spec, replace(NEMO, blocking_experts=False), "fp8"))
    graphs = last_kind(layer(spec, STACKS["nemo-graphs"], "fp8"))
    assert blocking.forward.host > ahead.forward.host >= graphs.forward.host == 0.0
    dense = first_kind(layer(run("llama3-8b", dp=8, zero=1), NEMO, "fp8"))
    assert dense.forward.host == 0.0  # which launches while it computes


def test_a_run_with_graphs_waits_for_no_launch() -> None:
    spec = run("tiny", length=512)
    graphs = spec.model_copy(update={"train": spec.train.model_copy(update={"cuda_graphs": True})})
    model = CostModel(cluster("h100", 1), STACKS["meshwright"], None)  # which keeps the two apart
    plain, captured = (first_kind(model.blocks(each)).forward for each in (spec, graphs))
    assert plain.host > captured.host == 0.0
    assert captured._replace(host=plain.host) == plain


def test_messages_of_tensor_ranks_are_hidden_within_a_host_alone() -> None:
    near, far = run("llama3-70b", dp=2, tp=4, zero=1), run("llama3-70b", dp=1, tp=8)
    hidden = [layer(spec, NEMO, None, "gb200")._hidden for spec in (near, far)]
    shares = []
    for spec, share in zip((near, far), hidden, strict=True):
        messages = layer(spec, NEMO, None, "gb200").messages(False)
        shares.append({share(message) for message in messages if message.axis == "tensor"})
    assert max(shares[0]) == NEMO.overlap("tensor") > 0 and shares[1] == {0.0}


def test_selective_recomputation_of_latents_frees_what_they_are_widened_to() -> None:
    spec = run("deepseek-v3", dp=8, ep=8, zero=1)
    selective = RunSpec.model_validate(spec.to_json() | {"recompute": {"policy": "selective"}})
    need = {}
    for kind in ("latents", "elementwise"):
        costs = CostModel(cluster("b200", 8), replace(NEMO, selective=kind), "mxfp8")
        need[kind] = (
            Generic(costs).peak(selective).activations,
            step_time(selective, costs).parts["recomputation"],
        )
    assert need["latents"][0] < 0.8 * need["elementwise"][0]
    assert need["latents"][1] > 0


def test_hosts_of_tensor_ranks_wait_for_each_other_where_stages_are_on_several_nodes() -> None:
    """Nanotron's runs: by a share for each rank of a tensor group, and not in one node or without stages."""
    nanotron = STACKS["nanotron"]
    plain = layer(run("llama3-8b", tp=4, dp=4), nanotron).launch
    assert plain == nanotron.launch
    assert layer(run("llama3-8b", tp=4, pp=2, dp=2), nanotron).launch == pytest.approx(
        plain * (1 + 4 * nanotron.staged_launch)
    )
    assert layer(run("llama3-8b", tp=4, pp=2), nanotron).launch == plain
    assert layer(run("llama3-8b", tp=4, pp=2, dp=2), NEMO).launch == NEMO.launch


def test_gradients_that_are_added_up_apart_move_ten_bytes_each() -> None:
    """2 bytes of a gradient are read, 4 of the sum, and 4 written, of each parameter and microbatch."""
    spec, nanotron = run("llama3-8b", dp=8), STACKS["nanotron"]
    apart, inside = (layer(spec, replace(nanotron, accumulates=each)) for each in (True, False))
    more = first_kind(apart).weight.moved - first_kind(inside).weight.moved
    kind = apart.kinds[0]
    assert more == pytest.approx(apart.kernels.moved(10.0 * sum(apart.held(kind))))


@pytest.mark.parametrize("tp", [1, 4])
@pytest.mark.parametrize(("pp", "in_flight"), [(1, 1), (2, 2)])
def test_what_a_program_keeps_beside_the_inputs_of_products(tp: int, pp: int, in_flight: int) -> None:
    """The activation's output apart from its gate; and whole hidden states of each microbatch in flight."""
    plain = replace(STACKS["nanotron"], fuses_gates=True, kept_messages=0.0)
    spec = run("llama3-8b", tp=tp, pp=pp, dp=8 // tp // pp, stages="even", schedule="1f1b")
    spec = spec.model_copy(update={"recompute": NoRecompute()})
    tokens, model = spec.micro_batch * spec.data.seq_len, spec.model

    def kept(**changed: Any) -> float:
        costs = CostModel(cluster("h100", 8), replace(plain, **changed))
        return Generic(costs).ranks(spec)[0].activations

    apart, layers = kept(fuses_gates=False) - kept(), model.layers // pp * in_flight
    assert apart == pytest.approx(layers * 2 * tokens * model.ffn / tp)
    messages = in_flight * 2 * tokens * model.hidden if pp > 1 else 0
    assert kept(kept_messages=3.0) - kept() == pytest.approx(3 * messages)
