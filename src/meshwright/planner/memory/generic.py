"""Bytes of a step on the ranks of a pipeline, term by term, for any software stack.

`exact.py` overrides it for this program.

States by ZeRO's stage (Rajbhandari et al. 2020); activations of each block by recompute policy, tensor by
tensor (Korthikanti et al. 2022, section 4, generalised to gated layers, grouped keys, latents and experts),
times the microbatches that the schedule has in flight; the head's logits; and buffers: gathered units, packed
gradients, the operator of the last backward. On top of what is allocated stand the allocator's rounding and
fragmentation (reserved), and the device's context and its communicators' buffers (what nvidia-smi shows).
"""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.planner.cost.data_parallel import StoredParameters
from meshwright.planner.cost.layer import LayerCost
from meshwright.planner.cost.model import CostModel
from meshwright.planner.cost.stages import Contents, placed_stages, stored, together
from meshwright.planner.rank_view import moment_width, widths
from meshwright.schedule.in_flight import in_flight
from meshwright.spec import Layout, RunSpec
from meshwright.spec.layers import LayerKind
from meshwright.spec.pipeline_schedules import SCHEDULES

_CONTEXT = 0.6e9
"""Bytes of a CUDA context with its kernels."""
_CHANNEL = 0.25e9
"""Bytes of buffers of each of a rank's NCCL communicators."""

Terms = tuple[float, float, float, float, float, float]
"""Bytes of tensors: the first six fields of `Memory`."""


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank at the peak of a step."""

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
    """The pipeline rank."""

    @property
    def allocated(self) -> float:
        """Bytes of tensors."""
        return (
            self.parameters + self.gradients + self.optimiser + self.activations + self.logits + self.buffers
        )

    @property
    def reserved(self) -> float:
        """Bytes that the caching allocator holds."""
        return self.allocated + self.fragmentation

    @property
    def device(self) -> float:
        """Bytes that the driver counts (nvidia-smi)."""
        return self.reserved + self.context + self.communicators

    def to_json(self) -> dict[str, float]:
        """The terms, and their sums."""
        terms = {name: value for name, value in vars(self).items() if name != "rank"}
        return terms | {"allocated": self.allocated, "reserved": self.reserved, "device": self.device}


class Generic:
    """Bytes that layouts need on a cost model's devices, by formulas that hold for every software stack."""

    def __init__(self, costs: CostModel) -> None:
        self.costs = costs
        self._shares: dict[tuple[LayerCost, int], tuple[StoredParameters, float]] = {}

    def peak(self, spec: RunSpec) -> Memory:
        """Bytes of the fullest rank."""
        return max(self.ranks(spec), key=lambda memory: memory.allocated)

    def ranks(self, spec: RunSpec) -> list[Memory]:
        """Bytes of each rank of the pipeline, in the fullest of the steps of a warm-up of the batch."""
        steps = [self.in_step(spec.at_step(stage.steps_before + 1)) for stage in spec.train.batch_stages]
        return [max(each, key=lambda memory: memory.allocated) for each in zip(*steps, strict=True)]

    def in_step(self, spec: RunSpec) -> list[Memory]:
        """Bytes of each rank of the pipeline in a step of `train.batch_tokens`."""
        blocks, placed = self.costs.blocks(spec), placed_stages(spec)
        flights = in_flight(spec.layout, held_microbatches(spec))
        halves = self.deferred if spec.layout.splits_backward else self.kept
        known = {held: (self.kept(blocks, held), halves(blocks, held)) for held in set(placed.contents)}
        found = []
        for rank, member in enumerate(placed.by_rank):
            mine = together(member)
            flight = flights[rank].most(*zip(*(known[held] for held in member), strict=True))
            found.append(
                self.rank(spec, blocks, stored(blocks, mine), flight, mine.head, rank, working(blocks, mine))
            )
        return found

    def kept(self, blocks: LayerCost, held: Contents, split: bool | None = None) -> float:
        """Bytes that a stage keeps of one microbatch until its backward; `split` is None where no schedule is
        known."""
        return stage_activations(blocks, held)

    def deferred(self, blocks: LayerCost, held: Contents) -> float:
        """Bytes that a stage keeps of one microbatch whose weight gradients alone are left."""
        return stage_activations(blocks, held, True)

    def resident(self, spec: RunSpec, blocks: LayerCost, held: Contents, met: bool = True) -> Memory:
        """Bytes of a rank that holds `held`; in a pipeline, without activations that its schedule holds.

        `met` is true if gradients of all its stages wait at one time.
        """
        kept = self.kept(blocks, held) if spec.layout.pp == 1 else 0.0
        return self.rank(spec, blocks, stored(blocks, held), kept, held.head, 0, working(blocks, held))

    def lower_bound(self, spec: RunSpec, blocks: LayerCost, model: Contents) -> Memory:
        """Bytes that the fullest rank needs at least, however stages are cut; `model` is the whole model.

        They are those of a rank with an equal share of the model and of one microbatch's activations.
        """
        held, kept = self.equal_share(blocks, model, spec.layout.pp)
        return self.rank(spec, blocks, held, kept, False, 0)

    def least_states(self, spec: RunSpec, blocks: LayerCost, model: Contents) -> Memory:
        """`lower_bound` without activations."""
        return self.rank(spec, blocks, self.equal_share(blocks, model, spec.layout.pp)[0], 0.0, False, 0)

    def equal_share(self, blocks: LayerCost, model: Contents, pp: int) -> tuple[StoredParameters, float]:
        """Parameters of 1 / `pp` of the model, and bytes that as much of its blocks keeps of a microbatch."""
        if (blocks, pp) not in self._shares:
            dense = routed = kept = 0.0
            for count, kind in model.by_kind(blocks.kinds):
                mine = blocks.held(kind)
                dense, routed = dense + count * mine[0] / pp, routed + count * mine[1] / pp
                kept += count * block_activations(blocks, kind) / pp
            dense += (1 if blocks.spec.model.tied else 2) * blocks.largest_unit / pp
            self._shares[blocks, pp] = StoredParameters(dense, routed, model.blocks + 2, 1), kept
        return self._shares[blocks, pp]

    def rank(
        self,
        spec: RunSpec,
        blocks: LayerCost,
        held: StoredParameters,
        activations: float,
        head: bool,
        rank: int,
        in_block: float = 0.0,
    ) -> Memory:
        """Bytes of a rank that stores `held`; `head` is true if it has the output head.

        A block's backward takes `in_block` beyond the `activations` that are kept.
        """
        stack, layout = self.costs.stack, spec.layout
        recipe = stack.recipe
        shards, expert_shards = (layout.shard_ranks, layout.expert_data_ranks) if layout.zero else (1, 1)
        sharded = held.dense / shards + held.routed / expert_shards
        whole = held.dense + held.routed
        copy = recipe.copy * (whole if layout.zero < 3 else 0)
        width = recipe.gradient + (recipe.wide if blocks.format == "bf16" else 0)
        waits = layout.zero < 2 or (stack.whole_gradients and layout.pp > 1 and spec.microbatches > 1)
        gradients = width * (whole if waits else sharded)
        master = 4 * sharded if recipe.optimiser > 8 else 0
        of_adamw = moment_width(spec) / (2 * widths(spec).exact)
        optimiser = of_adamw * (recipe.optimiser * sharded - master)
        if spec.train.offload != "none":
            optimiser = 0.0
        optimiser += 4 * sharded if spec.train.ema is not None else 0
        buffers = 0.0
        unit = max(blocks.largest_unit, whole / max(1, held.units))
        if layout.zero == 3:
            buffers = stack.unit * unit * (2 * stack.gather_bytes + stack.gradient_bytes)
            if layout.pp > 1:  # units stay whole through a step of the pipeline
                buffers = whole * (stack.gather_bytes + (0 if waits else stack.gradient_bytes))
        elif layout.zero:
            buffers = unit * stack.gradient_bytes
        logits = blocks.rows * blocks.tokens * stack.logits if head else 0.0
        terms = copy + master, gradients, optimiser, activations + in_block, logits, buffers
        if stack.planned_memory:
            in_blocks = copy + master, gradients, optimiser, activations + in_block, 0.0, buffers
            early = gradients if spec.microbatches > 1 else 0.0
            if layout.zero == 3 and layout.pp == 1:
                buffers = blocks.largest_unit * (stack.gather_bytes + stack.gradient_bytes)
            at_head = copy + master, early, optimiser, activations, logits, buffers
            terms = max(in_blocks, at_head, key=sum) if head else in_blocks
        return self.on_device(layout, rank, terms)

    @property
    def fragmentation(self) -> float:
        """Bytes that an allocator reserves beyond allocated ones, as a share of these."""
        stack, caches = self.costs.stack, self.costs.cluster.device.kind not in ("cpu", "tpu")
        return stack.numbers.fragmentation if caches and not stack.planned_memory else 0.0

    def on_device(self, layout: Layout, rank: int, terms: Terms) -> Memory:
        """Bytes of a rank with such terms of tensors; a GPU adds fragmentation, context and communicators.

        The memory of a TPU in the catalogue is what its compiler may plan with.
        """
        if self.costs.cluster.device.kind in ("cpu", "tpu"):
            return Memory(*terms, 0.0, 0.0, 0.0, rank)
        sizes = (layout.tp, layout.cp, layout.shard_ranks, layout.replicate, layout.pp, layout.ep)
        communicators = _CHANNEL * sum(size > 1 for size in sizes)
        return Memory(*terms, self.fragmentation * sum(terms), _CONTEXT, communicators, rank)


def held_microbatches(spec: RunSpec) -> int:
    """Microbatches after which a rank of the schedule holds no more than before."""
    layout = spec.layout
    most = spec.microbatches if SCHEDULES[layout.schedule].holds_all else max(2 * layout.pp, 3)
    return min(spec.microbatches, most)


def stage_activations(blocks: LayerCost, held: Contents, split: bool = False) -> float:
    """Bytes that a stage keeps of one microbatch: where backwards are `split`, until the weights' half."""
    found = 0.0
    for count, kind in held.by_kind(blocks.kinds):
        kept = block_activations(blocks, kind)
        found += count * (max(kept, weight_gradient_inputs(blocks, kind)) if split else kept)
    stream = blocks.own * blocks.spec.model.hidden
    if held.embed and blocks.stack.dropout:
        found += stream
    if blocks.spec.layout.pp > 1:
        found += blocks.stack.kept_messages * blocks.tokens * blocks.spec.model.hidden * blocks.width
    return found + (2 * stream * blocks.width if held.head else 0)


def block_activations(blocks: LayerCost, kind: LayerKind) -> float:
    """Bytes that a block keeps of one microbatch under the run's recompute policy."""
    stack, policy = blocks.stack, blocks.spec.recompute.policy
    entry = blocks.own * blocks.spec.model.hidden * blocks.width
    if policy == "full":
        return entry
    every = everything(blocks, kind)
    if policy == "none":
        return every
    if blocks.remat is not None:
        named, held = blocks.named_outputs(kind), {"decoder_layer_input", *blocks.remat.device}
        return blocks.width * sum(size for name, size in named.items() if name in held - {*blocks.remat.host})
    if stack.selective == "attention":
        return every - _scores(blocks)
    if stack.selective == "latents":
        return every - _light(blocks, kind)
    core = blocks.tokens * blocks.q * blocks.width
    if stack.selective == "half":
        compiled = stack.operators == "compiled"
        return entry + core + blocks.width * blocks.every_second_output(kind, compiled)
    hidden, n, outputs = blocks.spec.model.hidden, blocks.tokens, 0.0
    for each in blocks.products(kind):
        summed = each.n == hidden and each.m == n  # over tensor ranks: a rank keeps its own tokens
        outputs += (blocks.own if summed else each.m) * each.n * each.batch
    return entry + core + blocks.width * outputs


def weight_gradient_inputs(blocks: LayerCost, kind: LayerKind) -> float:
    """Bytes that a block's deferred weight gradients need: each map's input, and its output's gradient.

    `planner/memory/in_flight.py` has them for this program, to the byte.
    """
    layout, n, low = blocks.spec.layout, blocks.tokens, _kept_width(blocks)
    found = 0.0
    for each in blocks.products(kind):
        found += each.batch * each.m * (blocks.width * each.n + low * each.k)
    if layout.tp > 1 and layout.sequence_parallel:  # the input is kept by the ranks together
        found -= 2 * (n - blocks.own) * blocks.spec.model.hidden * low
    return found


def working(blocks: LayerCost, held: Contents) -> float:
    """Bytes of one block's backward beyond kept activations: what it recomputes, and gradients.

    They are those of a block with experts if a rank has any, and none on a rank without blocks.
    """
    if not held.blocks:
        return 0.0
    gradient = 2 * blocks.tokens * blocks.spec.model.hidden * blocks.width
    if blocks.spec.recompute.policy == "none":
        return gradient
    _, kind = held.by_kind(blocks.kinds)[-1]
    came = blocks.offloaded(kind)  # ahead of the block before
    return everything(blocks, kind) - block_activations(blocks, kind) + gradient + came


def everything(blocks: LayerCost, kind: LayerKind) -> float:
    """Bytes that a block keeps of one microbatch without recomputation."""
    model, b, d, own, n = blocks.spec.model, blocks.width, blocks.spec.model.hidden, blocks.own, blocks.tokens
    low = _kept_width(blocks)
    found = own * d * 2 * (b + low)  # inputs of both norms, and of what follows them
    if blocks.stack.dropout:
        found += own * d * 2
    found += n * b * (blocks.q + 2 * blocks.kv) + n * blocks.q * (b + low if low < b else b)
    if model.mla is not None:
        found += own * b * 2 * ((model.mla.q_rank or 0) + model.mla.kv_rank + model.mla.rope_dim)
    gates, t = blocks.gates, blocks.spec.layout.tp
    channels = model.ffn
    if kind.has_experts:
        assert model.moe is not None
        channels = model.moe.shared_ffn
        inner = model.moe.ffn / blocks.spec.layout.etp
        outputs = 0 if blocks.stack.low_states else d * b  # weighed before the last product
        found += blocks.shape.copies * (d * low + outputs + (gates * b + low) * inner)
    activated = blocks.gates == 2 and not blocks.stack.fuses_gates
    found += n * ((gates + activated) * b + low) * channels / t
    return found + _scores(blocks)


def _kept_width(blocks: LayerCost) -> float:
    """Bytes of an element of a product's input as it is kept."""
    return blocks.precision.kept if blocks.stack.low_states and blocks.precision.cast else blocks.width


def _light(blocks: LayerCost, kind: LayerKind) -> float:
    """Bytes of `everything` that norms, activations and the products that widen latents gave."""
    model, shape, layout = blocks.spec.model, blocks.shape, blocks.spec.layout
    low = _kept_width(blocks)
    channels, routed = model.ffn, 0.0
    if kind.has_experts:
        channels, routed = shape.moe.shared_ffn, shape.copies * shape.moe.ffn / layout.etp
    found = low * (2 * blocks.own * model.hidden + blocks.tokens * channels / layout.tp + routed)
    if model.mla is not None:
        found += blocks.tokens * blocks.width * (blocks.q + 2 * blocks.kv)
    return found


def _scores(blocks: LayerCost) -> float:
    """Bytes of attention's scores: of the softmax, and of its dropout with the mask."""
    stack = blocks.stack
    if stack.fused_attention:
        return blocks.tokens * blocks.q / blocks.spec.model.head_dim * 4
    heads = blocks.q // blocks.spec.model.head_dim
    return blocks.tokens * blocks.length * heads * (5 if stack.dropout else 4)
