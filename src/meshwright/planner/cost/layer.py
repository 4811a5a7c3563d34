"""Seconds of one microbatch in one layer on one device.

Every operator has the shape that tensor, context and expert ranks leave of it: matrix products cost
`KernelCosts.matmul`, fused attention its FLOPs (the causal half), other attention also the bytes of its
scores, and norms, activations and residuals the bytes that they move. Messages are lists of `Message`: those
of this program call by call where collectives were measured one by one, a coarser list for published
programs. They are on the critical path but for the share that the software, or attention in a ring, hides.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

from meshwright.hardware.attention_backend import holds_documents, planned_backends
from meshwright.hardware.measurements import attention_seconds
from meshwright.planner.cost.activation_copies import moved_bytes, with_copies
from meshwright.planner.cost.breakdown import PassSeconds, Product, Seconds
from meshwright.planner.cost.collectives import CollectiveCosts
from meshwright.planner.cost.embedding_head import EndCosts
from meshwright.planner.cost.expert_balance import busiest
from meshwright.planner.cost.host import counted_host_seconds, host_seconds
from meshwright.planner.cost.kernels import START, KernelCosts
from meshwright.planner.cost.operator_bytes import (
    ForwardBackward,
    block_bytes,
    block_kernels,
)
from meshwright.planner.cost.precision import Precision, our_precision, precision
from meshwright.planner.cost.published_messages import dispatch, merged_share, published_messages
from meshwright.planner.cost.remat import Remat
from meshwright.planner.cost.software import KERNELS, SoftwareStack, elementwise_passes
from meshwright.planner.cost.tensor_overlap import (
    fused_passes,
    fuses_products,
    hidden_messages,
    in_parts,
    overlaps_sums,
)
from meshwright.planner.rank_view import ALL_TRAINED, BlockTraining, layer_parameters, share, training_of
from meshwright.planner.traffic.layer_messages import layer_messages
from meshwright.planner.traffic.layer_shape import expert_room, layer_shape
from meshwright.planner.traffic.message import Message, Overlap, Phase
from meshwright.spec import RunSpec
from meshwright.spec.layers import LayerKind
from meshwright.units import FORMAT_BYTES

# Each literal says where it is from. `source:` a publication or a program. `counted:` a count of reads and
# writes that gives it.

PRICED_AS = {"sequence": "expert"}
"""Axes whose seconds count as another's: ranks that share sequences send the router's statistics."""


Part = LayerKind | Literal["embed", "head"]
"""A layer of a kind, the embedding or the head."""
ENDS: tuple[Part, ...] = ("embed", "head")


@dataclass
class Dense:
    """Cached costs that do not depend on how experts are sharded."""

    seconds: dict[Part, PassSeconds] = field(default_factory=dict)
    """Seconds of each part without experts."""
    sizes: dict[LayerKind, tuple[int, int, int]] = field(default_factory=dict)
    """Parameters of a layer of each kind: split by tensor ranks, replicated on them, of routed experts."""
    work: dict[tuple[object, ...], tuple[float, ...]] = field(default_factory=dict)
    """Seconds of products, which depend on their shapes alone, and of messages beside them."""


@dataclass(eq=False)
class LayerCost(EndCosts):
    """Seconds of the layers, the embedding and the head of a run, for one microbatch.

    `dense` is a cache shared by layouts that differ only in how experts are sharded; `format` is the number
    format of matrix products, `violation` how unequally popular experts are, and `documents` what a packed
    sample is taken to hold.
    """

    spec: RunSpec
    format: str
    stack: SoftwareStack
    kernels: KernelCosts
    links: CollectiveCosts
    dense: Dense
    violation: float = 0.0
    documents: int = 1

    def __post_init__(self) -> None:
        spec, stack, kernels = self.spec, self.stack, self.kernels
        ours = stack.ours
        self.precision = our_precision(self.format, kernels.device) if ours else precision(self.format)
        self.width = max(2.0, FORMAT_BYTES[self.precision.products])
        shape = layer_shape(spec, on_cpu=kernels.device.kind == "cpu")
        selects = ours and spec.recompute.policy == "selective"  # of others `selective` names operators
        self.repeats = shape.repeated if selects else frozenset[str]()
        if stack.pads_experts and spec.model.moe is not None:
            shape = replace(shape, admitted=expert_room(spec, spec.model.moe))
        else:
            shape = replace(shape, busiest=busiest(spec, self.violation))
        self.shape = shape = replace(shape, width=self.width, repeated=frozenset())
        self.length, self.tokens, self.own = shape.length, shape.tokens, shape.own
        self.q, self.kv, self.rows = shape.q, shape.kv, shape.rows
        self.attention, self.document, self.masked = stack.attention, self.length, False
        if ours and kernels.device.kind != "cpu":
            backends = planned_backends(spec, kernels.device)
            self.attention = KERNELS[backends.taken]
            self.masked = backends.path == "packed" and backends.taken in ("efficient", "math")
            if holds_documents(spec) and not self.masked:
                answers = 1 if spec.preference is None else 2
                self.document = self.length // max(self.documents, answers)
        self.counted = ours and kernels.device.kind != "cpu"
        """True if memory-bound operators are counted one by one (`planner/cost/operator_bytes.py`)."""
        measured = kernels.measured
        self.launch = stack.numbers.launch["graphs"] if ours and spec.train.cuda_graphs else stack.launch
        layout = spec.layout
        if layout.pp > 1 and layout.tp > 1 and layout.world_size > self.links.cluster.node:
            self.launch *= 1 + stack.staged_launch * layout.tp
        if stack.host and measured is not None and measured.launch is not None:
            self.launch = stack.host * measured.launch
        self.kinds = spec.model.kinds
        self.parts: tuple[Part, ...] = (*self.kinds, *ENDS)
        self._routed: dict[Part, PassSeconds] = {}
        self.remat = self._remat()
        """Where outputs wait that this program keeps by name; None where it names none, or keeps all."""

    def _remat(self) -> Remat | None:
        policy = self.spec.recompute.policy
        if self.stack.selective != "named" or policy == "none":
            return None
        return self.stack.remat if policy == "selective" else Remat()

    def offloaded(self, kind: LayerKind) -> float:
        """Bytes that a layer has in the host's memory of what it keeps by name."""
        if self.remat is None:
            return 0.0
        outputs = self.named_outputs(kind)
        return self.width * sum(outputs[name] for name in self.remat.host)

    def seconds(self, part: Part) -> PassSeconds:
        """Seconds of a part of the model."""
        routed = isinstance(part, LayerKind) and part.has_experts
        known = self._routed if routed else self.dense.seconds
        if part not in known:
            ends = {"head": self._heads, "embed": self._embedding}
            known[part] = self._layer(part) if isinstance(part, LayerKind) else ends[part]()
        return known[part]

    def held(self, kind: LayerKind) -> tuple[int, int]:
        """Parameters of a layer on one tensor rank: those that all tokens use, and its routed experts'."""
        if kind not in self.dense.sizes:
            self.dense.sizes[kind] = layer_parameters(self.spec.model, kind)
        (split, whole, experts), layout = self.dense.sizes[kind], self.spec.layout
        return split // layout.tp + whole, experts // (layout.ep * layout.etp)

    def _layer(self, kind: LayerKind) -> PassSeconds:
        training = ALL_TRAINED if self.spec.lora is None else training_of(self.spec, self._last(kind))
        products, listed = self.products(kind), self.messages(kind.has_experts, training)
        (core, scores), (core_back, scores_back) = self._core(kind), self._core(kind, backward=True)
        kernels = block_kernels(self.spec, kind) if self.counted else (0.0, 0.0)
        moved, moved_back = map(self.kernels.moved, self._bytes(kind), kernels)
        cast, cast_back = map(self.kernels.moved, self._casts(products))
        multiplied, multiplied_back, multiplied_weight = self._multiplied(kind, products)
        forward = self._exposed(listed, core, Phase.FORWARD)._replace(
            matmul=multiplied, attention=core, moved=moved + scores + cast
        )
        input = self._exposed(listed, core_back, Phase.INPUT, Phase.WEIGHT)._replace(
            matmul=multiplied_back, attention=core_back, moved=moved_back + 2 * scores_back + cast_back
        )
        forward, input = self._overlapped(kind, forward, input)
        held = self.held(kind)[0] if self.counted else sum(self.held(kind))  # experts' are copies of units
        weight = Seconds(
            matmul=multiplied_weight,
            moved=self.kernels.moved(self.packed(block=True) * held),
        )
        again = self._again(kind, forward, self._exposed(listed, core, Phase.RECOMPUTE), scores, cast)
        passes = self._uncovered(PassSeconds(forward, input, weight, again), listed)
        return self._offloaded(self._launched(passes, kind), kind)

    def _again(
        self, kind: LayerKind, forward: Seconds, messages: Seconds, scores: float, cast: float
    ) -> Seconds:
        """Seconds of what recomputation repeats of a layer's `forward`; `messages` are those that it repeats.

        `scores` and `cast` are seconds of moving attention's scores, and of casts, in the forward.
        """
        policy, selective = self.spec.recompute.policy, self.stack.selective
        core, moved = forward.attention, forward.moved - scores
        if self.remat is not None:
            kept = self.remat.kept
            repeated = sum(share * self._product(p) for share, p in self.repeated_products(kind, kept))
            attended = 0.0 if "context" in kept else core
            return messages._replace(matmul=repeated, attention=attended, moved=moved)
        if policy == "full":
            return forward
        if policy == "selective" and selective == "attention":  # Korthikanti et al. 2022
            return Seconds() if self.stack.fused_attention else Seconds(attention=core, moved=scores)
        if policy == "none":
            return messages
        widened = (p for p in self.products(kind) if selective == "latents" and self.widens(p))
        repeated = sum(map(self._product, widened))
        if selective == "half":  # source: every second product, as torchtitan
            repeated = forward.matmul / 2
        if "matmul" in self.repeats:
            repeated = forward.matmul
        attended = core if "attention" in self.repeats else 0.0
        recast = 0.0 if "matmul" in self.repeats else cast
        return messages._replace(matmul=repeated, attention=attended, moved=moved - recast)

    def _fused(self, kind: LayerKind) -> bool:
        return self.counted and fuses_products(self.spec, kind, self.links, self.shape)

    def _multiplied(self, kind: LayerKind, products: Sequence[Product]) -> tuple[float, ...]:
        """Seconds of a layer's products in the forward, and of those for the gradients of inputs and of
        weights."""
        key = "products", self.format, kind, self.spec.layout.tp, self._fused(kind), *products
        if key not in self.dense.work:
            self.dense.work[key] = self._products_of_passes(kind, self._separate(products))
        return self.dense.work[key]

    def _products_of_passes(self, kind: LayerKind, products: Sequence[Product]) -> tuple[float, ...]:
        turned = [p._replace(n=p.k, k=p.n) for p in products]
        weight = sum(self._product(p._replace(m=p.n, n=p.k, k=p.m)) for p in products)
        if not self._fused(kind):
            return sum(map(self._product, products)), sum(map(self._product, turned)), weight
        rows = {each.row._replace(n=each.row.k, k=each.row.n) for each in self._maps(kind)}
        parts = partial(in_parts, self._started, ranks=self.spec.layout.tp)
        back = (parts(p=p) if p in rows else self._product(p) for p in turned)
        return sum(parts(p=p) for p in products), sum(back), weight

    def _started(self, p: Product) -> float:
        """Seconds of a product with its start, which counts where it is short."""
        return self._product(p) + START

    def _overlapped(self, kind: LayerKind, forward: Seconds, input: Seconds) -> tuple[Seconds, Seconds]:
        """Passes without the messages of tensor ranks that this program's products hide."""
        if not (self.counted and overlaps_sums(self.spec)):
            return forward, input
        layout, fused = self.spec.layout, self._fused(kind)
        key = "messages", self.format, kind, layout.tp, layout.sequence_parallel, self.tokens, fused
        if key not in self.dense.work:
            self.dense.work[key] = hidden_messages(
                self._maps(kind), self._started, self.links, self.shape, fused
            )
        hidden = self.dense.work[key]
        left = [max(0.0, each.tensor - less) for each, less in zip((forward, input), hidden, strict=True)]
        return forward._replace(tensor=left[0]), input._replace(tensor=left[1])

    def _offloaded(self, passes: PassSeconds, kind: LayerKind) -> PassSeconds:
        """`passes` with the seconds in which the device waits for copies of activations."""
        size = self.offloaded(kind) or moved_bytes(self.spec, kind)
        return with_copies(passes, size, self.kernels.device.host_link)

    def _launched(self, passes: PassSeconds, kind: LayerKind) -> PassSeconds:
        """`passes` with the seconds in which the device waits for its host to launch operators."""
        full = self.spec.recompute.policy == "full"
        if not self.counted:
            again = full or "matmul" in self.repeats
            return host_seconds(self.stack, kind, self.launch, again).waits(passes, self.stack)
        numbers, graphs = self.stack.numbers.launch, self.spec.train.cuda_graphs
        launch = dict.fromkeys(numbers, numbers["graphs"]) if graphs else numbers
        products = len(self.separate_products(kind))
        repeated = ("attention", "matmul") if full else self.repeats
        return counted_host_seconds(self.spec, kind, products, launch, repeated).waits(passes, self.stack)

    # Operators.

    def _product(self, p: Product) -> float:
        """Seconds of a product; of other programs with those of the casts of its operands."""
        recipe = self._recipe(p)
        seconds = self.kernels.matmul(recipe.products, p.m, p.n, p.k, p.batch)
        return seconds if self.stack.ours else seconds + self.kernels.moved(self._cast(p))

    def _recipe(self, p: Product) -> Precision:
        return self.precision.experts if p.experts and self.precision.experts else self.precision

    def _cast(self, p: Product) -> float:
        """Bytes of the casts of a product's operands, in the mean of a layer's products."""
        # assumed: weights are cast every fourth time
        return self._recipe(p).cast * p.batch * (p.m * p.k + p.k * p.n / 4)

    def _casts(self, products: Iterable[Product]) -> ForwardBackward:
        """Bytes of the casts of this program's operands, in the forward and in the backward."""
        found = ForwardBackward(0.0, 0.0)
        if not self.stack.ours:
            return found
        for p in products:
            if p.experts or (casts := self._recipe(p).operands) is None:
                back = self._cast(p._replace(n=p.k, k=p.n)) + self._cast(p._replace(m=p.n, n=p.k, k=p.m))
                found = found.plus(ForwardBackward(self._cast(p), back))
            else:
                weight = casts.weight / 2 * p.k * p.n
                found = found.plus(
                    ForwardBackward(casts.input * p.m * p.k + weight, casts.gradient * p.m * p.n + weight)
                )
        return found

    def _core(self, kind: LayerKind, backward: bool = False) -> tuple[float, float]:
        """Seconds of attention's products, and of moving its scores where they are stored; one way."""
        model, layout = self.spec.model, self.spec.layout
        heads = model.heads // layout.tp
        # A mask in memory hides keys and saves no products.
        seen = 2 * (self.length if self.masked else kind.keys_visible(self.document))
        pairs = self.tokens * seen * heads  # of queries and keys, without the causal mask
        # Without a kernel that fuses it, scores are in memory; that of processors has a soft cap, too.
        blocked = self.attention == "unfused" and self.stack.fused_attention
        if self.stack.fused_attention and not blocked:
            measured = self._measured_core(backward) if self.stack.own else None
            if measured is not None:
                return measured * seen / self.length, 0.0
            products = 2.5 if backward else 1.0  # source: Dao et al. 2022, FlashAttention: five for two
            flops = products * (model.head_dim + model.v_dim) * pairs  # 2 FLOPs, half of the pairs
            format, length = self.precision.products, self.document
            channels = (model.head_dim + model.v_dim) / 2
            return self.kernels.attention(format, flops, length, backward, self.attention, channels), 0.0
        sequences = max(1, self.tokens // self.length)
        batch = sequences * heads
        length, d = self.length, model.head_dim
        shapes = [Product(length, length, d, batch), Product(length, d, length, batch)]
        core = sum(self.kernels.matmul(self.sixteen, p.m, p.n, p.k, p.batch) for p in shapes)
        # counted: softmax reads and writes 2 bytes twice; dropout its result, and a mask of 1 byte
        scored = (13 if self.stack.dropout else 8) * pairs
        if blocked:  # half of the pairs; counted: the cap reads and writes scores three times, its slope, too
            times, computed = 2 if backward else 1, pairs / (batch * length**2)
            core *= (2.5 if backward else 1) / 2 * computed
            return core, self.kernels.moved(times * 10 * pairs)
        return core * (2 if backward else 1), self.kernels.moved(scored)

    def _measured_core(self, backward: bool) -> float | None:
        """Measured seconds of attention, once for the keys of each rank of the ring; None if not measured."""
        model, layout, u = self.spec.model, self.spec.layout, self.shape.ulysses.ranks
        ring, heads = layout.cp // u, model.heads // layout.tp // u
        kv_heads = max(1, layout.local_kv_heads(model.kv_heads) // u)
        if (measured := self.kernels.measured) is None:
            return None
        size = self.spec.micro_batch, heads, kv_heads, model.head_dim, self.length // ring
        seconds = attention_seconds(measured, self.format, *size)
        return None if seconds is None else ring * seconds[backward]

    def _bytes(self, kind: LayerKind) -> ForwardBackward:
        """Bytes that norms, activations, residuals and copies of the forward move, and of the backward."""
        if self.counted and not self.spec.train.compile:
            found = block_bytes(self.spec, self.shape, kind)
            return found.plus(ForwardBackward(1, 2), self._ring_bytes())
        model, b, t = self.spec.model, self.width, self.spec.layout.tp
        d, own, n = model.hidden, self.own, self.tokens
        more = fused_passes(self.shape, len(self._maps(kind))) if self._fused(kind) else ForwardBackward(0, 0)
        masks = 2.0 * own * d if self.stack.dropout else 0.0  # counted: two masks of a byte an element
        # counted: norms, each 1 read and 1 write; two sums, 2 and 1
        moved = own * d * b * (2 * model.block_norms + 6) + masks
        # counted: queries, keys and values read and written by the rotation, queries once more
        moved += n * b * (2 * (self.q + 2 * self.kv) + 2 * self.q)
        moved += self._ring_bytes()
        if model.qk_norm:
            moved += 2 * n * b * (self.q + self.kv)
        channels = self.shape.moe.shared_ffn if kind.has_experts else model.ffn
        if kind.has_experts:
            # counted: rows permuted there and back; the activation reads its gates and writes one
            inner = (1 + self.gates) * self.shape.moe.ffn / self.spec.layout.etp
            moved += self.shape.sent()[0] * b * (4 * d + inner)
        moved += n * b * (1 + self.gates) * channels / t
        moved *= elementwise_passes(self.stack, self.spec.train.compile)
        return ForwardBackward(moved, 2 * moved).plus(more)  # counted: the forward's tensors, and gradients

    def _ring_bytes(self) -> float:
        """Bytes that the sums of the outputs for each rank's keys move."""
        # counted: in fp32, two are read and one is written
        return 12.0 * (self.shape.ring.ranks - 1) * self.tokens * self.q

    # Messages.

    def messages(self, routed: bool, training: BlockTraining = ALL_TRAINED) -> list[Message]:
        """Messages of a layer in one microbatch; recomputation repeats the forward's, or some of them.

        Full recomputation is charged a whole forward, compute and messages alike, as the lower bounds of the
        search are; the program leaves out what no backward reads (`planner/traffic/messages.py`).
        """
        merged = merged_share(self.shape, self.links) if routed and self._merges() else 1.0
        if self.stack.own:
            listed = [*layer_messages(replace(self.shape, training=training), routed)]
        else:
            sent = self.precision.sent if self.precision.cast else self.width
            listed = [*published_messages(self.shape, routed, sent, merged)]
        again = [m for m in listed if m.phase is Phase.FORWARD]
        policy, selective = self.spec.recompute.policy, self.stack.selective
        if policy == "none" or (policy == "selective" and selective in ("attention", "latents")):
            return listed
        if self.repeats:
            called = layer_messages(replace(self.shape, repeated=self.repeats, training=training), routed)
            again = [m for m in called if m.phase is Phase.RECOMPUTE]
        elif policy == "selective" and selective == "half":
            again = [m.times(0.5) for m in again if m.axis == "tensor"]
        elif policy == "selective" and selective == "named":
            kept = self.stack.remat.kept  # of four messages, the last is of what no backward reads
            needed = sum(not kept >= names for names in ({"query_proj"}, {"out_proj"}, {"mlpwi_0"})) / 4
            again = [m.times(needed) for m in again if m.axis == "tensor"]
            again += [dispatch(self.shape, Phase.FORWARD, 1, merged)] if routed else []
        elif policy == "selective":
            again = [dispatch(self.shape, Phase.FORWARD, 1, merged)] if routed else []
        return listed + [replace(m, phase=Phase.RECOMPUTE) for m in again]

    def _merges(self) -> bool:
        """True if the program sends merged copies, which it does where no expert drops any.

        Source: Megatron-Core drops tokens with its plain all-to-all dispatcher only (TransformerConfig), and
        Megatron-Bridge's recipes then hide none of its messages (scripts/performance/configs, moe_a2a).
        """
        moe = self.spec.model.moe
        return self.stack.merged_copies and moe is not None and moe.capacity_factor is None

    def _exposed(self, listed: Iterable[Message], core: float, *phases: Phase) -> Seconds:
        """Seconds of the messages of `phases`, less what overlaps products or `core` seconds of attention."""
        exposed = dict.fromkeys(("tensor", "context", "expert"), 0.0)
        shifts, beside = 0.0, 0.0
        for m in listed:
            if m.phase not in phases:
                continue
            seconds = m.count * self.links.seconds(m)
            if m.overlaps is Overlap.ATTENTION:
                shifts, beside = shifts + seconds, core * share(m.group.ranks)
            else:
                exposed[PRICED_AS.get(m.axis, m.axis)] += seconds * (1 - self._hidden(m))
        if self.stack.own:
            shifts -= min(shifts, beside / self.links.slowed) * (1 - self.links.contention("shift"))
        else:
            shifts = max(shifts - beside, 0.0)
        exposed["context"] += shifts
        return Seconds(**exposed)

    def _uncovered(self, passes: PassSeconds, listed: Iterable[Message]) -> PassSeconds:
        """`passes` with what the software would hide of messages beside more compute than the layer has."""
        places = {Phase.FORWARD: 0, Phase.INPUT: 1, Phase.WEIGHT: 1, Phase.RECOMPUTE: 3}
        hidden: dict[tuple[int, str], float] = {}
        for m in listed:
            if part := self._hidden(m):
                key = places[m.phase], PRICED_AS.get(m.axis, m.axis)
                hidden[key] = hidden.get(key, 0.0) + part * m.count * self.links.seconds(m)
        compute, total = sum(p.matmul + p.attention + p.moved for p in passes), sum(hidden.values())
        if total <= compute:
            return passes
        found = list(passes)
        for (place, axis), seconds in hidden.items():
            found[place] = found[place].plus(Seconds(**{axis: seconds * (1 - compute / total)}))
        return PassSeconds(*found)

    def _hidden(self, message: Message) -> float:
        """The share of a message's seconds that the software hides behind products."""
        stack = self.stack
        if message.overlaps is not Overlap.COMPUTE:
            return 0.0
        if message.axis == "expert":
            return stack.overlap("expert") if self._merges() == stack.merged_copies else 0.0
        # Source: buffers of products that overlap their messages are shared by the processes of one host
        # (NVIDIA Transformer Engine, "userbuffers").
        host, group = self.links.cluster.host, message.group
        return 0.0 if host and group.ranks * group.stride > host else stack.overlap("tensor")
