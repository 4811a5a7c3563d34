"""Seconds of one microbatch in one layer, and in the embedding and the head, on one device.

Every operator has the shape that tensor, context and expert ranks leave of it: matrix products cost
`KernelCosts.matmul`, fused attention its FLOPs (the causal half), other attention also the bytes of its
scores, and norms, activations and residuals the bytes that they move. Messages are lists of `Message`: those
of this program call by call where collectives were measured one by one, a coarser list for published
programs. They are on the critical path but for the share that the software hides; keys and values that travel
around a ring run beside its attention, and only the rest counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from math import ceil

from meshwright.hardware.measurements import attention_seconds
from meshwright.planner.cost.breakdown import PassSeconds, Product, Seconds
from meshwright.planner.cost.collectives import CollectiveCosts
from meshwright.planner.cost.kernels import WORD, KernelCosts
from meshwright.planner.cost.software import SoftwareStack
from meshwright.planner.rank_view import share
from meshwright.planner.traffic.layer_shape import LayerShape, layer_shape
from meshwright.planner.traffic.messages import Message, Overlap, Phase, Where, end_messages, layer_messages
from meshwright.spec import ModelSpec, RunSpec
from meshwright.spec.parameters import block_parameters
from meshwright.units import FORMAT_BYTES

# Each literal says where it is from. `source:` a publication or a program. `counted:` a count of reads and
# writes that gives it. `fitted by hand`: on all rows of the published table (`docs/validation.md`).

PRICED_AS = {"sequence": "expert"}
"""Axes whose seconds count as another's: ranks that share sequences send the router's statistics."""


@dataclass
class Dense:
    """Cached costs that do not depend on how experts are sharded."""

    seconds: dict[str, PassSeconds] = field(default_factory=dict)
    """'dense', 'embed' or 'head' -> seconds of the part."""
    sizes: dict[bool, tuple[int, int, int]] = field(default_factory=dict)
    """Has experts -> parameters of a layer: split by tensor ranks, replicated on them, of routed experts."""


@dataclass(eq=False)
class LayerCost:
    """Seconds of the layers, the embedding and the head of a run, for one microbatch.

    `dense` is a cache shared by layouts that differ only in how experts are sharded; `format` is the number
    format of matrix products.
    """

    spec: RunSpec
    format: str
    stack: SoftwareStack
    kernels: KernelCosts
    links: CollectiveCosts
    dense: Dense

    def __post_init__(self) -> None:
        spec, stack, kernels, format = self.spec, self.stack, self.kernels, self.format
        self.width = max(2.0, FORMAT_BYTES[format])
        shape = layer_shape(spec, on_cpu=kernels.device.kind == "cpu")
        self.shape = shape = replace(shape, width=self.width, repeated=frozenset())
        self.length, self.tokens, self.own = shape.length, shape.tokens, shape.own
        self.q, self.kv, self.rows = shape.q, shape.kv, shape.rows
        measured = kernels.measured
        self.launch = stack.launch
        if stack.host and measured is not None and measured.launch is not None:
            self.launch = stack.host * measured.launch
        self._routed: dict[str, PassSeconds] = {}

    def seconds(self, part: str) -> PassSeconds:
        """Seconds of a part of the model: a 'dense' layer, a 'routed' one with experts, 'embed' or 'head'."""
        known = self._routed if part == "routed" else self.dense.seconds
        if part not in known:
            if part == "head":
                known[part] = self._head()
            elif part == "embed":
                known[part] = self._embedding()
            else:
                known[part] = self._layer(part == "routed")
        return known[part]

    def passes(self, routed: bool) -> PassSeconds:
        """Seconds of a layer, dense or with routed experts."""
        return self.seconds("routed" if routed else "dense")

    def held(self, routed: bool) -> tuple[int, int]:
        """Parameters of a layer on one tensor rank: those that all tokens use, and its routed experts'."""
        if routed not in self.dense.sizes:
            self.dense.sizes[routed] = _sizes(self.spec.model, routed)
        (split, whole, experts), layout = self.dense.sizes[routed], self.spec.layout
        return split // layout.tp + whole, experts // (layout.ep * layout.etp)

    def products(self, routed: bool) -> list[Product]:
        """Matrix products of a layer's forward."""
        inner = self._feed_forward_products(self.shape.moe.shared_ffn if routed else self.spec.model.ffn)
        return [*self._attention_products(), *inner, *(self._routed_products() if routed else ())]

    @property
    def largest_unit(self) -> float:
        """Parameters of the embedding or the head on one tensor rank."""
        return self.rows * self.spec.model.hidden

    def _layer(self, routed: bool) -> PassSeconds:
        products, listed = self.products(routed), self.messages(routed)
        (core, scores), (core_back, scores_back) = self._core(), self._core(backward=True)
        moved = self.kernels.moved(self._bytes(routed))
        forward = self._exposed(listed, core, Phase.FORWARD)._replace(
            matmul=sum(map(self._product, products)), attention=core, moved=moved + scores
        )
        input = self._exposed(listed, core_back, Phase.INPUT, Phase.WEIGHT)._replace(
            matmul=sum(self._product(Product(p.m, p.k, p.n, p.batch)) for p in products),
            attention=core_back,
            moved=2 * moved + 2 * scores_back,  # counted: the forward's tensors, and their gradients
        )
        weight = Seconds(
            matmul=sum(self._product(Product(p.n, p.k, p.m, p.batch)) for p in products),
            moved=self.kernels.moved(self.stack.packed * sum(self.held(routed))),
        )
        policy, selective = self.spec.recompute.policy, self.stack.selective
        again = forward if policy == "full" else self._exposed(listed, core, Phase.RECOMPUTE)
        if policy == "selective" and selective == "attention":  # Korthikanti et al. 2022
            again = Seconds() if self.stack.fused_attention else Seconds(attention=core, moved=scores)
        elif policy == "selective":
            products_again = 0.5 if selective == "half" else 0.0  # source: every second one, as torchtitan
            again = again._replace(matmul=forward.matmul * products_again, moved=forward.moved - scores)
        return self._launched(self._uncovered(PassSeconds(forward, input, weight, again), listed), routed)

    def _launched(self, passes: PassSeconds, routed: bool) -> PassSeconds:
        """`passes` with the seconds in which the device waits for its host to launch operators."""
        # Fitted by hand: operators of the forward, of both halves of the backward over those, and of
        # selective recomputation.
        count = (22 if self.stack.fused_attention else 30) + (25 if routed else 0)
        counts = count, count * 1.2, count * 0.4, count if self.spec.recompute.policy == "full" else 8
        launched = []
        for seconds, operators in zip(passes, counts, strict=True):
            launches = operators * self.launch if seconds.total else 0.0
            waits = launches if self.stack.blocking else max(0.0, launches - seconds.total)
            launched.append(seconds._replace(host=waits))
        return PassSeconds(*launched)

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

    def _feed_forward_products(self, channels: int) -> list[Product]:
        n, inner, hidden = self.tokens, channels // self.spec.layout.tp, self.spec.model.hidden
        return [Product(n, self.gates * inner, hidden), Product(n, hidden, inner)] if channels else []

    def _routed_products(self) -> list[Product]:
        moe, layout, hidden = self.shape.moe, self.spec.layout, self.spec.model.hidden
        local, inner = max(1, moe.experts // layout.ep), moe.ffn // layout.etp
        # Source: programs pad each expert's rows to whole words (NVIDIA Transformer Engine's Fp8Padding,
        # torchtitan's TOKEN_GROUP_ALIGN_SIZE_M).
        words = int(WORD / FORMAT_BYTES[self.format])
        rows = words * max(1, ceil(self.shape.copies / local / words))
        experts = partial(Product, rows, batch=local)
        router = Product(self.own, moe.experts, hidden)
        return [router, experts(self.gates * inner, hidden), experts(hidden, inner)]

    @property
    def gates(self) -> int:
        """Products of a feed-forward network's input: two where the activation is gated."""
        return 2 if self.spec.model.activation == "swiglu" else 1

    # Operators.

    def _product(self, p: Product) -> float:
        seconds = self.kernels.matmul(self.format, p.m, p.n, p.k, p.batch)
        if self.format == "fp8":  # fitted by hand: a quarter of a cast of the weight for each product
            seconds += self.kernels.moved(self.stack.cast_bytes * p.batch * (p.m * p.k + p.k * p.n / 4))
        return seconds

    def _core(self, backward: bool = False) -> tuple[float, float]:
        """Seconds of attention's products, and of moving its scores where they are stored; one way."""
        model, layout = self.spec.model, self.spec.layout
        heads, window = model.heads // layout.tp, model.sliding_window
        seen = self.length if window is None else min(self.length, 2 * window)  # no causal half of a window
        pairs = self.tokens * seen * heads  # of queries and keys, without the causal mask
        if self.stack.fused_attention:
            measured = self._measured_core(backward) if self.stack.own else None
            if measured is not None:
                return measured * seen / self.length, 0.0
            products = 2.5 if backward else 1.0  # source: Dao et al. 2022, FlashAttention: five for two
            flops = products * (model.head_dim + model.v_dim) * pairs  # 2 FLOPs, half of the pairs
            return self.kernels.attention(self.format, flops, self.length, backward), 0.0
        batch = max(1, self.tokens // self.length) * heads
        length, d = self.length, model.head_dim
        shapes = [Product(length, length, d, batch), Product(length, d, length, batch)]
        core = sum(self.kernels.matmul(self.format, *p) for p in shapes)
        # counted: softmax reads and writes 2 bytes twice; dropout its result, and a mask of 1 byte
        scored = (13 if self.stack.dropout else 8) * pairs
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

    def _bytes(self, routed: bool) -> float:
        """Bytes that the norms, activations, residuals and copies of the forward move."""
        model, b, t = self.spec.model, self.width, self.spec.layout.tp
        d, own, n = model.hidden, self.own, self.tokens
        masks = 2.0 * own * d if self.stack.dropout else 0.0  # counted: two masks of a byte an element
        moved = own * d * b * (4 + 6) + masks  # counted: two norms, 1 read and 1 write; two sums, 2 and 1
        # counted: queries, keys and values read and written by the rotation, queries once more
        moved += n * b * (2 * (self.q + 2 * self.kv) + 2 * self.q)
        if model.qk_norm:
            moved += 2 * n * b * (self.q + self.kv)
        channels = self.shape.moe.shared_ffn if routed else model.ffn
        if routed:  # counted: rows permuted there and back; the activation reads its gates and writes one
            inner = (1 + self.gates) * self.shape.moe.ffn / self.spec.layout.etp
            moved += self.shape.copies * b * (4 * d + inner)
        moved += n * b * (1 + self.gates) * channels / t
        return moved * self.stack.elementwise

    # Messages.

    def messages(self, routed: bool) -> list[Message]:
        """Messages of a layer in one microbatch; recomputation repeats the forward's, or some of them.

        Full recomputation is charged a whole forward, compute and messages alike, as the lower bounds of the
        search are; the program leaves out what no backward reads (`planner/traffic/messages.py`).
        """
        listed = [*(layer_messages if self.stack.own else _published)(self.shape, routed)]
        again = [m for m in listed if m.phase is Phase.FORWARD]
        policy, selective = self.spec.recompute.policy, self.stack.selective
        if policy == "none" or (policy == "selective" and selective == "attention"):
            return listed
        if policy == "selective" and selective == "half":
            again = [m.times(0.5) for m in again if m.axis == "tensor"]
        elif policy == "selective":
            again = [_dispatch(self.shape, Phase.FORWARD, 1)] if routed else []
        return listed + [replace(m, phase=Phase.RECOMPUTE) for m in again]

    def end_messages(self, head: bool) -> list[Message]:
        """Messages around the head, or the embedding; published programs are not charged for the loss's."""
        return [m for m in end_messages(self.shape, head) if self.stack.own or m.where != "loss"]

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
            shifts = max(shifts - beside, 0.1 * shifts)  # fitted by hand: a tenth is never hidden
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
        if message.overlaps is Overlap.PRODUCT:
            return stack.overlap_gather
        if message.overlaps is Overlap.COMPUTE:
            return stack.overlap_expert if message.axis == "expert" else stack.overlap_tensor
        return 0.0

    # The ends.

    def _around(self, head: bool) -> float:
        """Seconds of the messages around an end, the loss's left out: half of them for each pass."""
        seconds = sum(self.links.seconds(m) for m in end_messages(self.shape, head) if m.where != "loss")
        return seconds * (1 - self.stack.overlap_tensor) / 2

    def _head(self) -> PassSeconds:
        """Seconds of the last norm, the head's product and the loss; fp8 runs compute logits in bf16."""
        model, rows, n = self.spec.model, self.rows, self.tokens
        product = partial(self.kernels.matmul, "bf16" if self.format == "fp8" else self.format)
        loss = [m.count * self.links.seconds(m) for m in self.end_messages(True) if m.where == "loss"]
        sent = self._around(head=True)
        logits = self.kernels.moved(n * rows * 14.0)  # fitted by hand: bytes of a logit; 0.7 of it backward
        packed = self.kernels.moved(self.stack.packed * rows * model.hidden)
        host = self.stack.ends / 2 * self.launch
        return PassSeconds(
            Seconds(matmul=product(n, rows, model.hidden), moved=logits, host=host, tensor=sent + sum(loss)),
            Seconds(matmul=product(n, model.hidden, rows), moved=logits * 0.7, tensor=sent),
            Seconds(matmul=product(rows, model.hidden, n), moved=packed),
        )

    def _embedding(self) -> PassSeconds:
        """Seconds of the lookup, and of adding up its gradient."""
        stream, sent = self.shape.stream * self.width, self._around(head=False)
        moved = self.kernels.moved(3 * stream)  # counted: a row read, written, and read by what follows
        packed = self.kernels.moved(self.stack.packed * self.largest_unit)
        host = self.stack.ends / 2 * self.launch
        weight = Seconds(moved=2 * moved + packed, tensor=sent)  # fitted by hand: twice the forward's
        return PassSeconds(Seconds(moved=moved, host=host, tensor=sent), Seconds(), weight)


def _published(shape: LayerShape, routed: bool) -> Iterator[Message]:
    """Messages of a layer in published programs, together where large ones cost the same in one call or two.

    Latent attention gathers the residual stream, the backward of gathered keys and values takes two gathers,
    and what accompanies tokens to their experts is left out.
    """
    layout, maps, ring = shape.layout, shape.maps(routed), shape.ring
    keys = 2 * shape.tokens * shape.kv
    where: Where = "moe" if routed else "dense"
    stream = partial(Message, "tensor", elements=shape.stream, width=shape.width, group=shape.groups.tensor)
    context = partial(Message, "context", width=shape.width, where=where)
    for phase, times in ((Phase.FORWARD, 1), (Phase.INPUT, 2)):
        for operation in (shape.reduction, *["all_gather"] * layout.sequence_parallel):
            yield stream(operation, phase=phase, where=where, count=maps, overlaps=Overlap.COMPUTE)
        moved = 2 * shape.tokens * (shape.q + shape.kv)
        yield context("all_to_all", moved, group=shape.ulysses, phase=phase, count=times)
        if layout.context_mode == "gather":
            yield context("all_gather", keys * ring.ranks, group=ring, phase=phase, count=times)
        elif ring.ranks > 1:
            sends = times * (ring.ranks - 1)
            yield context("send", keys, group=ring, phase=phase, count=sends, overlaps=Overlap.ATTENTION)
        if routed:
            yield _dispatch(shape, phase, 2)
    if layout.sequence_parallel:  # inputs, for the gradients of their weights
        yield stream("all_gather", phase=Phase.WEIGHT, where=where, count=maps, overlaps=Overlap.PRODUCT)


def _dispatch(shape: LayerShape, phase: Phase, count: int) -> Message:
    """Tokens to their experts, or back."""
    size = shape.copies * shape.model.hidden, shape.width, shape.groups.expert
    return Message("expert", "all_to_all", *size, phase, "moe", count, Overlap.COMPUTE)


def _sizes(model: ModelSpec, routed: bool) -> tuple[int, int, int]:
    """Parameters of a layer: split by tensor ranks, replicated on them, of routed experts."""
    sizes = Counter[str]()
    layer = next(layer for layer in range(model.layers) if model.has_experts(layer) == routed)
    for p in block_parameters(model, layer):
        sizes["experts" if p.expert else "split" if p.split else "whole"] += p.size
    return sizes["split"], sizes["whole"], sizes["experts"]
