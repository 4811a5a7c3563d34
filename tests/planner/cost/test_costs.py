"""Operators, messages and steps: what the cost model must not break, whatever its constants are."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.comm.mesh import rank_grid
from meshwright.hardware.cluster import Rates
from meshwright.hardware.find import cluster
from meshwright.hardware.network import with_network
from meshwright.planner.cost import step as estimate
from meshwright.planner.cost.collectives import CollectiveCosts
from meshwright.planner.cost.kernels import KernelCosts, peak
from meshwright.planner.cost.model import CostModel
from meshwright.planner.cost.software import STACKS
from meshwright.planner.cost.stages import message
from meshwright.planner.cost.step import step_time
from meshwright.planner.group_shapes import GroupShape, axes
from meshwright.planner.memory.generic import Generic
from meshwright.spec import Layout, RunSpec

A100 = cluster("a100", 64)
MB = 2**20


def run(layout: dict, model: str = "llama2-7b", sequences: int = 64, length: int = 4096, **more) -> RunSpec:
    return RunSpec.model_validate(
        {
            "model": {"preset": model},
            "data": {"seq_len": length},
            "train": {"batch_tokens": sequences * length},
            "precision": {"compute": "bf16"},
            "layout": layout,
            **more,
        }
    )


@pytest.mark.parametrize("format", ["bf16", "fp32"])
@pytest.mark.parametrize("shape", [(1, 1, 1), (128, 4096, 4096), (8192, 11008, 4096), (333, 777, 555)])
def test_no_product_is_faster_than_the_device(format: str, shape: tuple[int, int, int]) -> None:
    device = A100.device
    m, n, k = shape
    seconds = KernelCosts(device).matmul(format, m, n, k)
    width = 2 if format == "bf16" else 4
    assert seconds >= 2 * m * n * k / peak(device, format)
    assert seconds >= width * (m * k + k * n + m * n) / device.bandwidth


def test_a_wave_that_is_not_full_costs_a_full_one() -> None:
    kernels, units = KernelCosts(A100.device), A100.device.units
    full = kernels.matmul("bf16", 256 * units, 128, 8192)
    more = kernels.matmul("bf16", 256 * units + 256, 128, 8192)
    assert full < more < 2.01 * full
    assert kernels.matmul("bf16", 256 * units - 256, 128, 8192) == pytest.approx(full, rel=0.05)


def test_sizes_that_words_do_not_divide_are_slow() -> None:
    kernels = KernelCosts(A100.device)
    assert kernels.matmul("bf16", 8192, 4096, 4097) > 1.5 * kernels.matmul("bf16", 8192, 4096, 4096)
    batched = kernels.matmul("bf16", 2048, 2048, 108, batch=32)
    assert batched > 5 * kernels.matmul("bf16", 2048, 2048, 112, batch=32)


def test_an_all_reduce_is_a_scatter_and_a_gather() -> None:
    links, group = CollectiveCosts(A100), GroupShape(8, 1)
    both = sum(links.collective(each, 512 * MB, group) for each in ("reduce_scatter", "all_gather"))
    assert links.collective("all_reduce", 512 * MB, group) == pytest.approx(both, rel=0.01)


def test_neighbours_share_a_node_and_others_the_network() -> None:
    links = CollectiveCosts(A100)
    near, far = GroupShape(8, 1), GroupShape(8, 8)
    assert links.group_links(near).level == "node"
    assert links.group_links(far).level != "node"
    slower = links.collective("all_gather", 512 * MB, far) / links.collective("all_gather", 512 * MB, near)
    ratio = links.rate(A100.levels[0]) / links.rate(A100.levels[1])
    assert slower == pytest.approx(ratio, rel=0.05)


@pytest.mark.parametrize("operation", ["send", "shift"])
def test_a_ring_that_leaves_the_node_is_as_slow_as_its_slowest_link(operation: str) -> None:
    links = CollectiveCosts(A100)
    within, across = (
        links.to_next(operation, 512 * MB, GroupShape(ranks, stride)) for ranks, stride in ((8, 1), (16, 1))
    )
    assert across == pytest.approx(512 * MB / links.rate(A100.levels[1]), rel=0.01)
    assert across > 5 * within
    assert links.to_next(operation, 512 * MB, GroupShape(4, 2)) == within


def test_a_pipeline_over_nodes_sends_over_the_network_in_any_order() -> None:
    near = run({"pp": 16, "tp": 2, "dp": 2, "order": "replicate-dp-pp-tp"}, model="llama2-13b")
    assert axes(near.layout).pipeline == GroupShape(16, 2)
    far = run({"pp": 16, "tp": 2, "dp": 2}, model="llama2-13b")
    for stack in (STACKS["megatron-core"], STACKS["meshwright"]):
        costs = CostModel(A100, stack)
        (seconds, link), (other, _) = (message(each, costs, costs.blocks(each)) for each in (near, far))
        assert seconds == pytest.approx(other, rel=0.1)
        assert link is None or link.bandwidth == costs.links.rate(A100.levels[1])


def test_rows_of_experts_are_padded_to_whole_words() -> None:
    seconds = []
    for experts in (128, 144):
        spec = run({"dp": 8, "ep": 8}, model="qwen3-30b-a3b", sequences=8)
        tree = spec.to_json()
        tree["model"] |= {"moe": tree["model"]["moe"] | {"experts": experts}, "preset": None}
        costs = CostModel(A100.resized(8), STACKS["megatron-core"])
        blocks = costs.blocks(RunSpec.model_validate(tree))
        seconds.append(blocks.seconds(blocks.kinds[-1]).total)
    assert seconds[1] < 1.1 * seconds[0]


@pytest.mark.parametrize("policy", ["none", "full"])
def test_messages_hide_behind_the_compute_of_their_layer_and_no_more(policy: str) -> None:
    spec = run(
        {"dp": 32, "ep": 32, "pp": 8, "zero": 1, "micro_batch": 1},
        "deepseek-v3",
        recompute={"policy": policy},
    )
    totals = []
    for gigabits in (400, 40, 4):
        there = with_network(cluster("h800", 256), nic_bandwidth=gigabits * 1e9 / 8)
        blocks = CostModel(there, STACKS["hai-llm"]).blocks(spec)
        passes = blocks.seconds(blocks.kinds[-1])
        sent = sum(m.count * blocks.links.seconds(m) for m in blocks.messages(True) if m.axis == "expert")
        compute = sum(each.matmul + each.attention + each.moved for each in passes)
        assert sent - sum(each.expert for each in passes) <= compute * (1 + 1e-9)
        totals.append(passes.total / sent)
    assert totals[-1] > 0.9  # 4 Gb/s: hardly anything is hidden


def test_a_ring_uses_the_interfaces_of_all_its_members() -> None:
    links, flat = CollectiveCosts(A100), CollectiveCosts(A100, flat_rings=True)
    whole = GroupShape(64, 1)
    assert flat.collective("all_gather", 4096 * MB, whole) > 5 * links.collective(
        "all_gather", 4096 * MB, whole
    )


def test_an_oversubscribed_network_is_slower() -> None:
    large, size = A100.resized(2048), 1024 * MB
    plain, thin = (
        CollectiveCosts(large),
        CollectiveCosts(with_network(large, oversubscription=4.0).resized(2048)),
    )
    apart, within = GroupShape(8, 256), GroupShape(8, 8)
    assert thin.collective("all_reduce", size, apart) > 3 * plain.collective("all_reduce", size, apart)
    assert thin.collective("all_reduce", size, within) == plain.collective("all_reduce", size, within)


def test_one_rank_sends_nothing() -> None:
    for operation in ("all_reduce", "all_gather", "all_to_all"):
        assert CollectiveCosts(A100).collective(operation, MB, GroupShape(1, 1)) == 0


def test_strides_follow_the_mesh() -> None:
    layout = run({"dp": 2, "cp": 2, "tp": 2, "pp": 4, "replicate": 2, "zero": 1}).layout
    at = axes(layout)
    assert (at.tensor, at.context, at.shard) == (GroupShape(2, 1), GroupShape(2, 2), GroupShape(4, 2))
    assert (at.replicate, at.pipeline) == (GroupShape(2, 8), GroupShape(4, 16))


@pytest.mark.parametrize("order", ["pp-replicate-dp-tp", "replicate-pp-dp-tp", "replicate-dp-pp-tp"])
@pytest.mark.parametrize(("dp", "tp", "ep", "etp"), [(4, 1, 1, 1), (1, 4, 1, 1), (4, 2, 4, 1), (2, 2, 1, 2)])
def test_ranks_with_the_same_experts_are_as_far_apart_as_in_the_mesh(
    order: str, dp: int, tp: int, ep: int, etp: int
) -> None:
    """Where that is one distance."""
    size = {"dp": dp, "tp": tp, "ep": ep, "etp": etp}
    layout = Layout(replicate=2, pp=2, order=order, zero=1, **size)  # type: ignore[arg-type]
    experts = rank_grid(layout).reshape(2, 2, -1, ep * etp)
    at = axes(layout)
    for group, ranks in ((at.expert_data, experts[0, 0, :, 0]), (at.expert, experts[0, 0, 0])):
        gaps = set(ranks.diff().tolist())
        assert group.ranks == len(ranks)
        assert len(gaps) != 1 or gaps == {group.stride}


@pytest.mark.parametrize("stack", list(STACKS))
@pytest.mark.parametrize(
    "layout",
    [
        {"dp": 8, "zero": 3},
        {"dp": 2, "tp": 4, "zero": 1},
        {"dp": 2, "tp": 2, "pp": 2, "micro_batch": 1},
        {"dp": 2, "cp": 4},
    ],
)
def test_parts_add_up_to_the_step(stack: str, layout: dict) -> None:
    spec = run(layout)
    found = step_time(spec, CostModel(cluster("a100", spec.layout.world_size), STACKS[stack]))
    assert sum(found.parts.values()) == pytest.approx(found.seconds)
    assert min(found.parts.values()) >= 0
    flops = spec.model.flops_per_token(4096) * spec.train.batch_tokens / spec.layout.world_size
    assert found.seconds > 0.8 * flops / peak(A100.device, "bf16")  # attention's half is not done


@pytest.mark.parametrize(
    "schedule", ["1f1b", "gpipe", "zb-h1", "zb-h2", "interleaved", "bfs", "zb-v", "dualpipe-v"]
)
def test_microbatches_that_are_not_simulated_cost_what_one_more_does(
    monkeypatch: pytest.MonkeyPatch, schedule: str
) -> None:
    """Stages differ: the first has the embedding and the last the head."""
    layout = {"pp": 4, "schedule": schedule, "micro_batch": 1}
    spec = run(layout, sequences=131, length=512)
    assert estimate.simulated(spec) < spec.microbatches
    short = step_time(spec, CostModel(cluster("a100", 4))).seconds
    monkeypatch.setattr(estimate, "_SIMULATED", 10**6)
    long = step_time(spec, CostModel(cluster("a100", 4))).seconds
    assert estimate.simulated(spec) == spec.microbatches
    assert short == pytest.approx(long, rel=1e-4)


def test_sharding_more_holds_less() -> None:
    held = [Generic(CostModel(A100)).peak(run({"dp": 8, "zero": zero})) for zero in (0, 1, 2, 3)]
    assert held[0].optimiser == pytest.approx(8 * held[1].optimiser)
    assert held[1].gradients == pytest.approx(8 * held[2].gradients)
    sizes = [each.parameters + each.gradients + each.optimiser for each in held]
    assert sizes == sorted(sizes, reverse=True)
    assert held[0].allocated < held[0].reserved < held[0].device


def test_recomputing_more_keeps_less_and_takes_longer() -> None:
    specs = [run({"dp": 8}, recompute={"policy": policy}) for policy in ("none", "selective", "full")]
    on = CostModel(A100)
    assert [Generic(on).peak(spec).activations for spec in specs] == sorted(
        (Generic(on).peak(spec).activations for spec in specs), reverse=True
    )
    times = [step_time(spec, on).seconds for spec in specs]
    assert times == sorted(times)


def test_a_faster_device_is_faster() -> None:
    spec = run({"dp": 8, "zero": 1})
    slow = replace(A100, device=replace(A100.device, rates=Rates(matmul=0.4, memory=0.4)))
    assert step_time(spec, CostModel(slow)).seconds > step_time(spec, CostModel(A100)).seconds


def test_experts_cost_what_they_compute_and_send() -> None:
    layout = {"dp": 8, "ep": 8, "zero": 1}
    spec = run(layout, model="mixtral-8x7b", sequences=32)
    found = step_time(spec, CostModel(cluster("h100", 8)))
    assert found.parts["expert axis"] > 0
    alone = step_time(
        spec.model_copy(update={"layout": spec.layout.model_copy(update={"ep": 1})}),
        CostModel(cluster("h100", 8)),
    )
    assert alone.parts["expert axis"] == 0


@pytest.mark.parametrize("stack", ["meshwright", "meshwright-cpu"])
def test_what_recomputation_does_not_save_is_computed_and_sent_again(stack: str) -> None:
    layout, on = {"dp": 8, "tp": 4, "cp": 2, "ep": 8}, CostModel(A100, STACKS[stack])
    of_save = {}
    for save in (("attention", "matmul"), ("matmul",), ("attention",), ()):
        policy = {"policy": "selective", "save": save}
        spec = run(layout, model="mixtral-8x7b", recompute=policy)
        forward, _, _, again = of_save[save] = on.blocks(spec).seconds(spec.model.kinds[-1])
        assert again.matmul == (0.0 if "matmul" in save else forward.matmul)
        assert again.attention == (0.0 if "attention" in save else forward.attention)
        for sent in (again.tensor, again.expert):
            assert (sent == 0) == ("matmul" in save)
        assert again.moved == forward.moved
    blocks = on.blocks(run(layout, model="mixtral-8x7b", recompute={"policy": "full"}))
    full = blocks.seconds(blocks.kinds[-1])
    times = [each.again.total for each in (*of_save.values(), full)]
    assert times == sorted(times) and len(set(times)) == 5


@pytest.mark.parametrize(("zero", "times"), [(1, 6 / 4), (0, 2.0), (3, 8 / 6)])
def test_gradients_of_this_program_travel_in_their_format(zero: int, times: float) -> None:
    """Parameters are gathered in 2 bytes, once with ZeRO-1 and twice with ZeRO-3."""
    layout = {"dp": 16, "zero": zero, "micro_batch": 4}
    for name, slower in (("meshwright", times), ("megatron-core", 1.0)):
        on = CostModel(A100.resized(16), STACKS[name])
        wide, narrow = (
            sum(step_time(run(layout, precision=formats), on).ranks[0].data.sent.values())
            for formats in ({"compute": "bf16", "reduce": each} for each in ("fp32", "bf16"))
        )
        assert wide == pytest.approx(slower * narrow, rel=0.03)


def test_replicas_of_shards_add_up_in_the_masters_format() -> None:
    """As `parallel/data_parallel.py` does, whatever the format that shards are reduced in."""
    layout, on = {"dp": 8, "replicate": 2, "zero": 1, "micro_batch": 4}, CostModel(A100.resized(16))
    wide, narrow = (
        step_time(run(layout, precision={"compute": "bf16", "reduce": each}), on).ranks[0].data.sent
        for each in ("fp32", "bf16")
    )
    assert wide["replicate"] == narrow["replicate"] and wide["shard"] > 1.3 * narrow["shard"]


@pytest.mark.parametrize(
    ("head_dim", "kernel", "share"),
    [(64, "cudnn", 0.72), (128, "cudnn", 1.0), (256, "flash3", 1.04), (32, "flash2", 0.445)],
)
def test_attention_is_slower_over_narrow_heads(head_dim: int, kernel: str, share: float) -> None:
    """Rates that Shah et al. 2024 (figure 5) measured on an H100, over that at 128 channels a head."""
    costs = KernelCosts(cluster("h100", 8).device)
    seconds = [costs.attention("bf16", 1e15, 4096, False, kernel, channels) for channels in (128, head_dim)]
    assert seconds[0] / seconds[1] == pytest.approx(share)


def test_plans_take_a_packed_sample_for_one_document() -> None:
    """Attention is that of a sample without documents, on the same kernel; two halves take half of it."""
    layout = {"dp": 8, "zero": 3, "micro_batch": 1}
    model = {"preset": "llama3-8b"}
    packed, whole = (
        RunSpec.model_validate(
            {
                "model": model,
                "data": {"seq_len": 131072, "document_mask": masked},
                "train": {"batch_tokens": 8 * 131072},
                "precision": {"compute": "bf16"},
                "layout": layout,
            }
        )
        for masked in (True, False)
    )
    device = cluster("a100", 8)
    one, two = (step_time(packed, CostModel(device, documents=count)) for count in (1, 2))
    plain = step_time(whole, CostModel(device))
    assert one.parts["attention"] == pytest.approx(plain.parts["attention"], rel=0.01)
    assert two.parts["attention"] == pytest.approx(one.parts["attention"] / 2, rel=0.02)
    flops = 12 * packed.model.layers * packed.model.hidden * 131072**2 / 2  # forward and backward, causal
    assert one.parts["attention"] > flops / device.device.peak["bf16"]
