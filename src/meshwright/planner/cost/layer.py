"""Seconds of one microbatch in one block, and in the ends, on one device, by what they are spent on.

Every operator is taken with the shape that it has after tensor, context and expert ranks have their shares:
matrix products by `KernelCosts.matmul`, attention by its FLOPs (the causal half) where it is fused and by the
bytes of its scores where it is not, norms, activations and residuals by the bytes that they move. Messages
between tensor ranks are on the critical path but for the share that the stack hides; those of a ring of
context ranks run beside its attention, and only what is left of them counts.

N tokens of a microbatch on this context rank, D hidden channels, Q and K channels of queries and keys, F of
the feed-forward layer, b bytes of an element.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from meshwright.planner.cost import layer_communication as own_messages
from meshwright.planner.cost.breakdown import PassSeconds, Product, Seconds
from meshwright.planner.cost.collectives import CollectiveCosts
from meshwright.planner.cost.kernels import KernelCosts
from meshwright.planner.cost.software import SoftwareStack
from meshwright.planner.group_shapes import GroupShape, axes
from meshwright.spec import ModelSpec, MoeSpec, RunSpec
from meshwright.spec.parameters import block_parameters
from meshwright.units import FORMAT_BYTES

_AGAIN = 8
"""Operators that selective recomputation launches again."""


@dataclass
class Dense:
    """What a layout's blocks without experts, and its ends, cost: the same however experts are dealt out."""

    block: PassSeconds | None = None
    embedding: PassSeconds | None = None
    head: PassSeconds | None = None
    sizes: dict[bool, tuple[int, int, int]] = field(default_factory=dict)
    """Parameters of a block, with experts or dense: split by tensor ranks, whole, experts'."""


class LayerCost:
    """What blocks cost in a run's layout.

    `dense` is what is known of layouts that differ in how experts are dealt out only.
    """

    def __init__(
        self,
        spec: RunSpec,
        format: str,
        stack: SoftwareStack,
        kernels: KernelCosts,
        links: CollectiveCosts,
        dense: Dense | None = None,
    ) -> None:
        self.spec, self.stack, self.kernels, self.links, self.format = spec, stack, kernels, links, format
        layout, model = spec.layout, spec.model
        self.width = max(2.0, FORMAT_BYTES[format])
        self.length = spec.data.seq_len
        self.tokens = spec.micro_batch * self.length // layout.cp
        self.own = self.tokens // (layout.tp if layout.sequence_parallel else 1)
        self.q = model.heads * model.head_dim // layout.tp
        self.kv = layout.local_kv_heads(model.kv_heads) * model.head_dim
        self.launch = kernels.launched(stack.launch, stack.host)
        self.on_cpu = kernels.device.kind == "cpu"
        self.axes = axes(layout)
        self.tensor, self.context, self.expert = self.axes.tensor, self.axes.context, self.axes.expert
        self._dense = dense or Dense()
        self._routed: PassSeconds | None = None

    # What a block is made of.

    def passes(self, routed: bool) -> PassSeconds:
        """Seconds of a block, with experts or dense."""
        if routed:
            self._routed = self._routed or self._block(True)
            return self._routed
        self._dense.block = self._dense.block or self._block(False)
        return self._dense.block

    def held(self, routed: bool) -> tuple[int, int]:
        """Parameters of a block on one tensor rank: those that all tokens meet, and its experts'."""
        if routed not in self._dense.sizes:
            self._dense.sizes[routed] = _sizes(self.spec.model, routed)
        (split, whole, experts), layout = self._dense.sizes[routed], self.spec.layout
        return split // layout.tp + whole, experts // (layout.ep * layout.etp)

    def products(self, routed: bool) -> list[Product]:
        """The forward's matrix products of a block."""
        inner: list[Product] = self._routed_products() if routed else []
        return [*self._attention_products(), *self._feed_forward_products(routed), *inner]

    @property
    def rows(self) -> int:
        """Rows of the vocabulary on one tensor rank."""
        return -(-self.spec.model.vocab_size // self.spec.layout.tp)

    @property
    def largest_unit(self) -> float:
        """Parameters of the largest of the ends."""
        return self.rows * self.spec.model.hidden

    def _block(self, routed: bool) -> PassSeconds:
        products = self.products(routed)
        forward = self._forward(products, routed)
        input = self._input(products, routed)
        weight = Seconds(
            matmul=sum(self._product(Product(p.n, p.k, p.m, p.batch)) for p in products),
            moved=self.kernels.moved(self.stack.packed * sum(self.held(routed))),
        )
        again = self._again(forward, products, routed)
        return self._launched(PassSeconds(forward, input, weight, again), routed)

    def _forward(self, products: list[Product], routed: bool) -> Seconds:
        core, scores = self._core()
        sent = self._own(core, routed, False) if self.stack.own else self._sent(core, routed, False)
        return sent._replace(
            matmul=sum(map(self._product, products)),
            attention=core,
            moved=self.kernels.moved(self._bytes(routed)) + scores,
        )

    def _input(self, products: list[Product], routed: bool) -> Seconds:
        core, scores = self._core(backward=True)
        sent = self._own(core, routed, True) if self.stack.own else self._sent(core, routed, True)
        return sent._replace(
            matmul=sum(self._product(Product(p.m, p.k, p.n, p.batch)) for p in products),
            attention=core,
            moved=2 * self.kernels.moved(self._bytes(routed)) + 2 * scores,
        )

    def _again(self, forward: Seconds, products: list[Product], routed: bool) -> Seconds:
        policy = self.spec.recompute.policy
        if policy == "full":
            return forward
        if policy == "none":
            return Seconds()
        core, scores = self._core()
        if (
            self.stack.selective == "attention"
        ):  # Korthikanti et al. 2022: what fused attention does by itself
            return Seconds() if self.stack.fused_attention else Seconds(attention=core, moved=scores)
        moved = forward.moved - scores
        if self.stack.selective == "half":  # every second product, and what moves bytes
            return Seconds(matmul=forward.matmul / 2, moved=moved, tensor=forward.tensor / 2)
        trips = self._trips(1) if routed else 0.0
        return Seconds(moved=moved, tensor=0.0, expert=trips)

    def _launched(self, passes: PassSeconds, routed: bool) -> PassSeconds:
        """With the time that the device waits for the host, which launches so many operators."""
        each = 30 if not self.stack.fused_attention else 22
        each += 25 if routed else 0
        again = each if self.spec.recompute.policy == "full" else _AGAIN
        found = []
        for seconds, count in zip(passes, (each, each * 1.2, each * 0.4, again), strict=True):
            launches = count * self.launch if seconds.total else 0.0
            waits = launches if self.stack.blocking else max(0.0, launches - seconds.total)
            found.append(seconds._replace(host=waits))
        return PassSeconds(*found)

    # Shapes.

    def _attention_products(self) -> list[Product]:
        model, layout, n = self.spec.model, self.spec.layout, self.tokens
        if (mla := model.mla) is None:
            return [Product(n, self.q + 2 * self.kv, model.hidden), Product(n, model.hidden, self.q)]
        heads = model.heads // layout.tp
        down = [Product(self.own, mla.kv_rank + mla.rope_dim, model.hidden)]
        query = [Product(n, self.q, model.hidden)]
        if mla.q_rank is not None:
            down.append(Product(self.own, mla.q_rank, model.hidden))
            query = [Product(n, self.q, mla.q_rank)]
        up = Product(n, heads * (model.head_dim - mla.rope_dim + mla.v_dim), mla.kv_rank)
        return [*down, *query, up, Product(n, model.hidden, heads * mla.v_dim)]

    def _feed_forward_products(self, routed: bool) -> list[Product]:
        model, t = self.spec.model, self.spec.layout.tp
        channels = self._moe().shared_ffn if routed else model.ffn
        if not channels:
            return []
        n, inner = self.tokens, channels // t
        return [Product(n, self.gates * inner, model.hidden), Product(n, model.hidden, inner)]

    def _routed_products(self) -> list[Product]:
        moe, layout, model = self._moe(), self.spec.layout, self.spec.model
        local = max(1, moe.experts // layout.ep)
        rows = max(1, round(self.routed_rows / local))
        inner = moe.ffn // layout.etp
        router = Product(self.own, moe.experts, model.hidden)
        return [
            router,
            Product(rows, self.gates * inner, model.hidden, local),
            Product(rows, model.hidden, inner, local),
        ]

    @property
    def routed_rows(self) -> float:
        """Rows that this rank's experts compute, where the router is even."""
        moe, layout = self._moe(), self.spec.layout
        return self.tokens / layout.tp * moe.top_k * layout.etp

    def _moe(self) -> MoeSpec:
        moe = self.spec.model.moe
        assert moe is not None
        return moe

    @property
    def gates(self) -> int:
        return 2 if self.spec.model.activation == "swiglu" else 1

    def _mapped(self, routed: bool) -> bool:
        """Whether tensor ranks share a feed-forward layer that all tokens take."""
        return not routed or bool(self._moe().shared_ffn)

    # Operators.

    def _product(self, p: Product) -> float:
        seconds = self.kernels.matmul(self.format, p.m, p.n, p.k, p.batch)
        if self.format == "fp8":  # both operands are cast, one of them with its transpose
            seconds += self.kernels.moved(self.stack.cast_bytes * p.batch * (p.m * p.k + p.k * p.n / 4))
        return seconds

    def _core(self, backward: bool = False) -> tuple[float, float]:
        """Attention's products, and moving its scores where they are kept: seconds forward or backward."""
        model, layout = self.spec.model, self.spec.layout
        heads = model.heads // layout.tp
        seen = self.length if model.sliding_window is None else min(self.length, 2 * model.sliding_window)
        pairs = self.tokens * seen * heads  # query-key pairs, both halves
        if self.stack.fused_attention:
            measured = self._measured_core(backward) if self.stack.own else None
            if measured is not None:
                return measured * seen / self.length, 0.0
            products = 2.5 if backward else 1.0
            flops = products * (model.head_dim + model.v_dim) * pairs  # 2 FLOPs, half of the pairs
            return self.kernels.attention(self.format, flops, self.length, backward), 0.0
        batch = max(1, self.tokens // self.length) * heads
        length, d = self.length, model.head_dim
        shapes = [Product(length, length, d, batch), Product(length, d, length, batch)]
        core = sum(self.kernels.matmul(self.format, *p) for p in shapes)
        scored = (13 if self.stack.dropout else 8) * pairs
        return core * (2 if backward else 1), self.kernels.moved(scored)

    def _measured_core(self, backward: bool) -> float | None:
        """Attention as it was measured: in a ring, on one rank's keys after the other's."""
        model, layout = self.spec.model, self.spec.layout
        u = layout.ulysses(model.kv_heads)
        ring, heads = layout.cp // u, model.heads // layout.tp // u
        kv_heads = max(1, layout.local_kv_heads(model.kv_heads) // u)
        found = self.kernels.attention_of(
            self.format, self.spec.micro_batch, heads, kv_heads, model.head_dim, self.length // ring
        )
        return None if found is None else ring * found[backward]

    def _bytes(self, routed: bool) -> float:
        """Bytes that the forward's norms, activations, residuals and copies move."""
        model, b, t = self.spec.model, self.width, self.spec.layout.tp
        d, own, n = model.hidden, self.own, self.tokens
        masks = 2.0 * own * d if self.stack.dropout else 0.0
        found = own * d * b * (4 + 6) + masks  # two norms, two residuals
        found += n * b * (2 * (self.q + 2 * self.kv) + 2 * self.q)  # rotated or rearranged
        if model.qk_norm:
            found += 2 * n * b * (self.q + self.kv)
        channels = 0 if model.moe is not None and routed else model.ffn
        if routed:
            moe = self._moe()
            channels = moe.shared_ffn
            rows = self.routed_rows
            found += rows * b * (4 * d + (1 + self.gates) * moe.ffn / self.spec.layout.etp)
        found += n * b * (1 + self.gates) * channels / t
        return found * self.stack.elementwise

    # Messages.

    def _own(self, core: float, routed: bool, backward: bool) -> Seconds:
        """This program's in one pass."""
        maps = 2 if self._mapped(routed) else 1
        return Seconds(
            tensor=own_messages.tensor(self, routed, maps, backward),
            context=own_messages.context(self, core, backward),
            expert=own_messages.expert(self, backward) if routed else 0.0,
        )

    def _sent(self, core: float, routed: bool, backward: bool) -> Seconds:
        """Any program's in one pass."""
        layout = self.spec.layout
        gathered = 0.0
        if backward and layout.tp > 1 and layout.sequence_parallel:
            whole = self.tokens * self.spec.model.hidden * self.width  # inputs, for their maps' gradients
            gathered = self.links.collective("all_gather", whole, self.tensor) * (
                1 - self.stack.overlap_gather
            )
        maps = 2 if self._mapped(routed) else 1
        return Seconds(
            tensor=self._tensor(maps) + maps * gathered,
            context=self._exposed(core, 2 if backward else 1),
            expert=self._trips(2) if routed else 0.0,
        )

    def _tensor(self, maps: int) -> float:
        """What `maps` parallel regions exchange in one pass: gathered and reduced, or summed."""
        layout = self.spec.layout
        if layout.tp == 1:
            return 0.0
        whole = self.tokens * self.spec.model.hidden * self.width
        if layout.sequence_parallel:
            each = self.links.collective("all_gather", whole, self.tensor)
            each += self.links.collective("reduce_scatter", whole, self.tensor)
        else:
            each = self.links.collective("all_reduce", whole, self.tensor)
        return maps * each * (1 - self.stack.overlap_tensor)

    def _exposed(self, core: float, times: int) -> float:
        """What keys and values between context ranks take beyond the attention that they run beside."""
        layout = self.spec.layout
        if layout.cp == 1:
            return 0.0
        n, u = layout.cp, layout.ulysses(self.spec.model.kv_heads)
        keys = 2 * self.tokens * self.kv * self.width
        if layout.context_mode == "gather":
            return times * self.links.collective("all_gather", keys * n, self.context)
        found = 0.0
        if u > 1:
            moved = 2 * self.tokens * (self.q + self.kv) * self.width
            found += times * self.links.collective("all_to_all", moved, GroupShape(u, self.context.stride))
        ring = n // u
        if ring > 1:
            shifts = (ring - 1) * times * self.links.message(keys, self.context.stride * u)
            found += max(shifts - core * (ring - 1) / ring, 0.1 * shifts)
        return found

    def _trips(self, count: int) -> float:
        """Tokens to their experts, or back, `count` times."""
        layout = self.spec.layout
        if self.expert.ranks == 1:
            return 0.0
        size = self.tokens / layout.tp * self._moe().top_k * layout.etp * self.spec.model.hidden * self.width
        return (
            count * self.links.collective("all_to_all", size, self.expert) * (1 - self.stack.overlap_expert)
        )

    # The ends.

    def head(self) -> PassSeconds:
        """Seconds of the last norm, the head's product and the loss; its logits are in `format` or bf16."""
        self._dense.head = self._dense.head or self._head()
        return self._dense.head

    def embedding(self) -> PassSeconds:
        """Seconds of the lookup, and of adding its gradient's rows."""
        self._dense.embedding = self._dense.embedding or self._embedding()
        return self._dense.embedding

    def _head(self) -> PassSeconds:
        model, rows = self.spec.model, self.rows
        format = "bf16" if self.format == "fp8" else self.format
        n = self.tokens
        product = self.kernels.matmul(format, n, rows, model.hidden)
        logits = self.kernels.moved(n * rows * 14.0)
        end = (own_messages.tensor_end(self) if self.stack.own else self._tensor(1)) / 2
        told = own_messages.loss(self) if self.stack.own else 0.0
        host = self.stack.ends / 2 * self.launch
        forward = Seconds(matmul=product, moved=logits, host=host, tensor=end + told)
        input = Seconds(
            matmul=self.kernels.matmul(format, n, model.hidden, rows),
            moved=logits * 0.7,
            tensor=end,
        )
        packed = self.kernels.moved(self.stack.packed * rows * model.hidden)
        weight = Seconds(matmul=self.kernels.matmul(format, rows, model.hidden, n), moved=packed)
        return PassSeconds(forward, input, weight)

    def _embedding(self) -> PassSeconds:
        moved = self.kernels.moved(3 * self.tokens * self.spec.model.hidden * self.width)
        end = (own_messages.tensor_end(self) if self.stack.own else self._tensor(1)) / 2
        packed = self.kernels.moved(self.stack.packed * self.rows * self.spec.model.hidden)
        host = self.stack.ends / 2 * self.launch
        return PassSeconds(
            Seconds(moved=moved, host=host, tensor=end),
            Seconds(),
            Seconds(moved=2 * moved + packed, tensor=end),
        )


def _sizes(model: ModelSpec, routed: bool) -> tuple[int, int, int]:
    """Parameters of a block with experts or dense: split by tensor ranks, others, of experts."""
    split = whole = experts = 0
    layer = next(layer for layer in range(model.layers) if model.has_experts(layer) == routed)
    for p in block_parameters(model, layer):
        if p.expert:
            experts += p.size
        elif p.split:
            split += p.size
        else:
            whole += p.size
    return split, whole, experts
