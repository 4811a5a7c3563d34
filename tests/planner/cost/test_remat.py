"""Outputs that a program keeps by name: what of a block is computed again, in which memory the rest waits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.hardware.find import cluster
from meshwright.planner.cost.kernels import KernelCosts
from meshwright.planner.cost.layer import LayerCost
from meshwright.planner.cost.model import CostModel
from meshwright.planner.cost.remat import OUTPUTS, POLICIES, Remat
from meshwright.planner.cost.software import STACKS
from meshwright.planner.memory.generic import Generic, Memory, block_activations
from meshwright.spec import RunSpec

MAXTEXT = STACKS["maxtext"]
TOKENS = 2 * 8192


def run(policy: str, micro_batch: int = 2, microbatches: int = 1) -> RunSpec:
    """Llama 3 8B on eight chips, of sequences of 8,192 tokens."""
    return RunSpec.model_validate(
        {
            "model": {"preset": "llama3-8b"},
            "layout": {"dp": 8, "zero": 3, "micro_batch": micro_batch},
            "data": {"seq_len": 8192},
            "train": {"batch_tokens": 8 * micro_batch * microbatches * 8192},
            "precision": {"compute": "bf16"},
            "recompute": {"policy": policy},
        }
    )


def costs(remat: Remat, name: str = "tpu-v6e") -> CostModel:
    return CostModel(cluster(name, 8), replace(MAXTEXT, remat=remat), None)


def blocks(remat: Remat, policy: str = "selective", name: str = "tpu-v6e") -> LayerCost:
    return costs(remat, name).blocks(run(policy))


@pytest.mark.parametrize(
    ("name", "columns"),
    [
        ("full", 4096),
        ("minimal", 4096 + 6144 + 4096 + 2 * 14336),
        ("minimal_with_context", 4096 + 6144 + 2 * 4096 + 2 * 14336),
        ("save_qkv_proj", 4096 + 6144),
        ("save_dot_except_mlp", 4096 + 6144 + 4096),
        ("minimal_offloaded", 4096),
        ("custom", 0),
    ],
)
def test_a_block_keeps_what_its_policy_names(name: str, columns: int) -> None:
    """Columns of the outputs in bf16, worked out by hand; what no backward reads is not kept."""
    found = blocks(POLICIES[name])
    assert block_activations(found, found.kinds[0]) == 2 * TOKENS * columns


def test_what_is_offloaded_waits_in_the_hosts_memory() -> None:
    found = blocks(POLICIES["custom"])
    assert found.offloaded(found.kinds[0]) == 2 * TOKENS * (4096 + 6144 + 4096)
    assert blocks(POLICIES["minimal"]).offloaded(found.kinds[0]) == 0


def test_what_is_not_kept_is_computed_again() -> None:
    def again(*kept: str) -> tuple[float, float]:
        found = blocks(Remat(tuple(name for name in OUTPUTS if name in kept)))
        seconds = found.seconds(found.kinds[0])
        assert seconds.again.attention in (0.0, seconds.forward.attention)
        return seconds.again.matmul / seconds.forward.matmul, seconds.again.attention

    parts = {"qkv": 4096 * 6144, "out": 4096 * 4096, "gates": 4096 * 2 * 14336, "down": 4096 * 14336}
    whole, down = sum(parts.values()), parts["down"]
    share, core = again()
    # nothing reads the last product's output but the next block, which keeps it as its input
    assert share == pytest.approx(1 - down / whole, abs=0.01) and core > 0
    share, core = again("query_proj", "key_proj", "value_proj", "out_proj", "mlpwi_0")
    assert share == pytest.approx(parts["gates"] / 2 / whole, abs=0.01) and core > 0
    assert again(*OUTPUTS) == (0.0, 0.0)


def test_full_recomputation_is_that_of_no_names() -> None:
    named, full = blocks(Remat()), blocks(POLICIES["minimal"], "full")
    kind = full.kinds[0]
    assert full.seconds(kind) == named.seconds(kind)
    assert block_activations(full, kind) == block_activations(named, kind)


def test_copies_over_a_slow_link_are_waited_for() -> None:
    fast, unknown = (blocks(POLICIES["custom"], name=name) for name in ("tpu-v6e", "tpu-v5p"))
    kind = fast.kinds[0]
    assert all(passes.offload == 0 for found in (fast, unknown) for passes in found.seconds(kind))
    assert unknown.kernels.device.host_link is None  # then copies are taken to be hidden
    chip = cluster("tpu-v6e", 8)
    slow = replace(chip, device=replace(chip.device, host_link=5e9))
    waits = CostModel(slow, replace(MAXTEXT, remat=POLICIES["custom"]), None).blocks(run("selective"))
    passes = waits.seconds(kind)
    copy = waits.offloaded(kind) / 5e9
    assert passes.forward.offload == pytest.approx(copy - (passes.forward.total - passes.forward.offload))


def test_memory_that_a_compiler_plans_is_that_of_one_moment() -> None:
    """At the head no gradient is there yet; in a block no logits are; nothing is lost between tensors."""

    def peak(planned: bool, spec: RunSpec) -> Memory:
        stack = replace(MAXTEXT, remat=POLICIES["custom"], planned_memory=planned)
        return Generic(CostModel(cluster("tpu-v6e", 8), stack, None)).peak(spec)

    found, summed = peak(True, run("selective")), peak(False, run("selective"))
    assert (found.gradients == 0) != (found.logits == 0)
    assert found.device == found.allocated < summed.allocated
    assert peak(True, run("selective", 2, 4)).gradients > 0  # those of earlier microbatches


def test_narrow_heads_leave_a_systolic_array_idle() -> None:
    """Austin et al. 2025: matrices are padded to 128 channels, and to 256 on a v6e."""
    for name, shares in (("tpu-v5e", (0.5, 1.0, 1.0)), ("tpu-v6e", (0.25, 0.5, 1.0))):
        kernels = KernelCosts(cluster(name, 4).device)
        seconds = [kernels.attention("bf16", 1e15, 8192, False, None, n) for n in (64, 128, 256)]
        assert [seconds[-1] / each for each in seconds] == pytest.approx(shares)


@pytest.mark.parametrize(
    ("stack", "columns"),
    [("fsdp-compiled", 4096 + 1024 + 14336), ("fsdp", 4096 + 1024 + 14336 + 4096)],
)
def test_torchtitan_keeps_every_second_product_of_a_block(stack: str, columns: int) -> None:
    """Queries, values, gates, and the last product, which a compiler drops as no backward reads it; beside a
    block's input, and attention's output."""
    found = CostModel(cluster("h100", 8), STACKS[stack], None).blocks(run("selective"))
    assert block_activations(found, found.kinds[0]) == 2 * TOKENS * (2 * 4096 + columns)


def test_a_compiled_loss_keeps_logits_and_their_gradient() -> None:
    need = []
    for stack in ("fsdp-compiled", "fsdp-compiled-loss"):
        need.append(Generic(CostModel(cluster("h100", 8), STACKS[stack], None)).peak(run("selective")))
    assert need[1].logits == 4 * TOKENS * 128256 < need[0].logits / 3
    assert need[1].activations == need[0].activations
