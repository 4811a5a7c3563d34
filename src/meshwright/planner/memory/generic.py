"""Bytes of a step on the fullest rank of a pipeline, term by term.

States by ZeRO's stage (Rajbhandari et al. 2020); activations of each block by recompute policy, tensor by
tensor (Korthikanti et al. 2022, §4, generalised to gated layers, grouped keys, latents and experts), times
those that the schedule has in flight; the head's logits; and what is there for a moment: gathered units,
packed gradients, the operator of the last backward. On top of what is allocated stand the allocator's
rounding and fragmentation (reserved), and the device's context and its communicators' buffers (what nvidia-
smi shows).
"""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.planner.cost.data_parallel import StoredParameters
from meshwright.planner.cost.layer import LayerCost
from meshwright.planner.cost.model import CostModel
from meshwright.planner.cost.stages import held_by
from meshwright.schedule import schedule_of
from meshwright.schedule.validate import peak
from meshwright.spec import RunSpec
from meshwright.spec.layout import HOLD_ALL, SPLIT
from meshwright.spec.stages import Stage, stages

_CONTEXT = 0.6e9
"""Bytes of a CUDA context with its kernels."""
_CHANNEL = 0.25e9
"""Bytes of buffers of each of a rank's NCCL communicators."""


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank."""

    parameters: float
    """The copy that computes, and master weights."""
    gradients: float
    optimiser: float
    activations: float
    logits: float
    buffers: float
    """Gathered parameters, packed gradients."""
    fragmentation: float
    context: float
    communicators: float
    rank: int
    """The pipeline rank that this is."""

    @property
    def allocated(self) -> float:
        """At the step's peak, by tensors."""
        return (
            self.parameters + self.gradients + self.optimiser + self.activations + self.logits + self.buffers
        )

    @property
    def reserved(self) -> float:
        """With what the caching allocator holds beyond."""
        return self.allocated + self.fragmentation

    @property
    def device(self) -> float:
        """What the driver counts (nvidia-smi)."""
        return self.reserved + self.context + self.communicators


def memory(spec: RunSpec, on: CostModel) -> Memory:
    """What the fullest rank of the pipeline needs."""
    return max(memories(spec, on), key=lambda each: each.allocated)


def memories(spec: RunSpec, on: CostModel) -> list[Memory]:
    """What each rank of the pipeline needs."""
    blocks = on.blocks(spec)
    cut = stages(spec.model, spec.layout, spec.data.seq_len)
    schedule = schedule_of(spec.layout, held_microbatches(spec))
    kept = [stage_activations(blocks, stage, spec.layout.schedule in SPLIT) for stage in cut]
    found = []
    for rank in range(schedule.ranks):
        own = [cut[index] for index in schedule.stages_of(rank)]
        layers = [layer for stage in own for layer in stage.blocks]
        routed = any(map(spec.model.has_experts, layers))
        flight = peak(schedule.actions[rank], kept) + working(blocks, bool(layers), routed)
        head = any(stage.head for stage in own)
        found.append(rank_memory(spec, blocks, on, held_by(blocks, own), flight, head, rank))
    return found


def held_microbatches(spec: RunSpec) -> int:
    """Microbatches after which a rank of the schedule holds no more than before."""
    layout = spec.layout
    return spec.microbatches if layout.schedule in HOLD_ALL else min(spec.microbatches, 2 * layout.pp)


def rank_memory(
    spec: RunSpec,
    blocks: LayerCost,
    on: CostModel,
    held: StoredParameters,
    activations: float,
    head: bool,
    rank: int,
) -> Memory:
    """What a rank that has `held` needs at a step's peak; `head`: whether it has the output head."""
    stack = on.stack
    layout, recipe = spec.layout, stack.recipe
    dense, routed = (layout.shard_ranks, layout.expert_data_ranks) if layout.zero else (1, 1)
    sharded = held.dense / dense + held.routed / routed
    whole = held.dense + held.routed
    copy = recipe.copy * (whole if layout.zero < 3 else 0)
    width = recipe.gradient + (recipe.wide if blocks.format == "bf16" else 0)
    waits = layout.zero < 2 or (stack.whole_gradients and layout.pp > 1 and spec.microbatches > 1)
    gradients = width * (whole if waits else sharded)
    master = 4 * sharded if recipe.optimiser > 8 else 0
    optimiser = (recipe.optimiser - 4) * sharded if master else recipe.optimiser * sharded
    buffers = 0.0
    unit = max(blocks.largest_unit, whole / max(1, held.units))
    if layout.zero == 3:
        buffers = stack.unit * unit * (2 * stack.gather_bytes + stack.gradient_bytes)
        if layout.pp > 1:  # units stay whole through a step of the pipeline
            buffers = whole * (stack.gather_bytes + (0 if waits else stack.gradient_bytes))
    elif layout.zero:
        buffers = unit * stack.gradient_bytes
    logits = blocks.rows * blocks.tokens * stack.logits if head else 0.0
    found = Memory(copy + master, gradients, optimiser, activations, logits, buffers, 0.0, 0.0, 0.0, rank)
    return beyond(found, spec, on)


def stage_activations(blocks: LayerCost, stage: Stage, split: bool = False) -> float:
    """What a stage keeps of one microbatch; where the backward is `split`, until the weights' half."""
    model = blocks.spec.model
    found = 0.0
    for layer in stage.blocks:
        routed = model.has_experts(layer)
        kept = block_activations(blocks, routed)
        found += max(kept, put_off(blocks, routed)) if split else kept
    if stage.embed and blocks.stack.dropout:
        found += blocks.own * model.hidden
    if stage.head:
        found += 2 * blocks.own * model.hidden * blocks.width
    return found


def block_activations(blocks: LayerCost, routed: bool) -> float:
    """What a block keeps of one microbatch under the run's policy."""
    stack, policy = blocks.stack, blocks.spec.recompute.policy
    entry = blocks.own * blocks.spec.model.hidden * blocks.width
    if policy == "full":
        return entry
    every = everything(blocks, routed)
    if policy == "none":
        return every
    if stack.selective == "attention":
        return every - scores(blocks)
    outputs = _outputs(blocks, routed)
    core = blocks.tokens * blocks.q * blocks.width
    return entry + core + outputs * (0.5 if stack.selective == "half" else 1.0)


def put_off(blocks: LayerCost, routed: bool) -> float:
    """What the gradients of a block's weights need: each map's input, and the gradient of its output.

    See `planner/memory/in_flight.py`, which has it for our own program to the byte.
    """
    layout, n = blocks.spec.layout, blocks.tokens
    found = 0.0
    for each in blocks.products(routed):
        found += each.batch * each.m * (each.n + each.k)
    if layout.tp > 1 and layout.sequence_parallel:  # what enters is kept by the ranks together
        found -= 2 * (n - blocks.own) * blocks.spec.model.hidden
    return blocks.width * found


def working(blocks: LayerCost, has: bool = True, routed: bool = False) -> float:
    """What the backward of one block holds beyond what was kept: what it computed again, and gradients.

    Nothing on a rank that `has` no blocks; `routed`: whether any of them has experts.
    """
    if not has:
        return 0.0
    model = blocks.spec.model
    gradient = 2 * blocks.tokens * model.hidden * blocks.width
    if blocks.spec.recompute.policy == "none":
        return gradient
    return everything(blocks, routed) - block_activations(blocks, routed) + gradient


def everything(blocks: LayerCost, routed: bool) -> float:
    """What a block keeps where nothing is computed again."""
    model, b, d, own, n = blocks.spec.model, blocks.width, blocks.spec.model.hidden, blocks.own, blocks.tokens
    found = own * d * b * 2 + own * d * b * 2  # inputs of both norms, and of what follows them
    if blocks.stack.dropout:
        found += own * d * 2
    found += n * b * (blocks.q + 2 * blocks.kv) + n * b * blocks.q
    if model.mla is not None:
        found += own * b * 2 * ((model.mla.q_rank or 0) + model.mla.kv_rank + model.mla.rope_dim)
    gates, t = blocks.gates, blocks.spec.layout.tp
    channels = model.ffn
    if routed:
        assert model.moe is not None
        channels = model.moe.shared_ffn
        rows = blocks.routed_rows
        found += rows * b * (2 * d + (1 + gates) * model.moe.ffn / blocks.spec.layout.etp)
    found += n * b * (1 + gates) * channels / t
    return found * blocks.stack.kept + scores(blocks)


def scores(blocks: LayerCost) -> float:
    """Attention's scores: of the softmax, of its dropout with the mask."""
    stack = blocks.stack
    if stack.fused_attention:
        return blocks.tokens * blocks.q / blocks.spec.model.head_dim * 4
    heads = blocks.q // blocks.spec.model.head_dim
    return blocks.tokens * blocks.length * heads * (5 if stack.dropout else 4)


def _outputs(blocks: LayerCost, routed: bool) -> float:
    """What a block's matrix products give; of those that tensor ranks sum, a rank keeps its own tokens."""
    hidden, n = blocks.spec.model.hidden, blocks.tokens
    found = 0.0
    for each in blocks.products(routed):
        summed = each.n == hidden and each.m == n
        found += (blocks.own if summed else each.m) * each.n * each.batch
    return blocks.width * found


def beyond(found: Memory, spec: RunSpec, on: CostModel) -> Memory:
    """With what a GPU takes beside tensors; on a CPU there is nothing of it."""
    layout = spec.layout
    if on.cluster.device.kind == "cpu":
        return found
    sizes = (layout.tp, layout.cp, layout.shard_ranks, layout.replicate, layout.pp, layout.ep)
    axes = sum(size > 1 for size in sizes)
    return Memory(
        found.parameters,
        found.gradients,
        found.optimiser,
        found.activations,
        found.logits,
        found.buffers,
        fragmentation=on.stack.fragmentation * found.allocated,
        context=_CONTEXT,
        communicators=_CHANNEL * axes,
        rank=found.rank,
    )
