"""The matrix products of a layer on one rank, in the shapes that tensor, context and expert ranks leave."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import ceil

from meshwright.planner.cost.breakdown import Product
from meshwright.planner.cost.kernels import WORD
from meshwright.planner.cost.precision import Precision
from meshwright.planner.cost.remat import Output
from meshwright.planner.cost.tensor_overlap import ParallelMaps
from meshwright.planner.traffic.layer_shape import LayerShape
from meshwright.spec import RunSpec
from meshwright.spec.layers import LayerKind
from meshwright.spec.parameter_groups import run_parameters
from meshwright.units import FORMAT_BYTES


class LayerProducts:
    """The products of the layers of a run, whose seconds `LayerCost` has."""

    spec: RunSpec
    shape: LayerShape
    precision: Precision
    counted: bool
    tokens: int
    own: int
    q: int
    kv: int

    def products(self, kind: LayerKind) -> list[Product]:
        """Matrix products of a layer's forward."""
        routed = kind.has_experts
        inner = self._feed_forward_products(self.shape.moe.shared_ffn if routed else self.spec.model.ffn)
        others = [*self._adapter_products(kind), *(self._routed_products() if routed else ())]
        return [*self._attention_products(), *inner, *others]

    def separate_products(self, kind: LayerKind) -> list[Product]:
        """Matrix products of a layer's forward, as they are multiplied."""
        return self._separate(self.products(kind))

    def _maps(self, kind: LayerKind) -> list[ParallelMaps]:
        """The regions that tensor ranks compute together; none of latent attention."""
        if self.spec.model.mla is not None:
            return []
        inner = self._feed_forward_products(
            self.shape.moe.shared_ffn if kind.has_experts else self.spec.model.ffn
        )
        pairs = [pair for pair in (self._attention_products(), inner) if pair]
        return [ParallelMaps(self._separate(pair[:1]), pair[1]) for pair in pairs]

    def _separate(self, products: Sequence[Product]) -> list[Product]:
        """Products as this program multiplies on GPUs: those of queries, keys and values, of gates and of
        what they gate, each by itself."""
        if not self.counted or self.spec.model.mla is not None:
            return list(products)
        joint, *_ = self._attention_products()
        channels = {self.spec.model.ffn, self.shape.moe.shared_ffn if self.spec.model.moe else 0}
        gated = [self._feed_forward_products(each)[0] for each in channels if each and self.gates > 1]
        found: list[Product] = []
        for p in products:
            if p == joint:
                found += [p._replace(n=n) for n in (self.q, self.kv, self.kv)]
            elif p in gated:
                found += [p._replace(n=p.n // 2)] * 2
            else:
                found.append(p)
        return found

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

    def _adapter_products(self, kind: LayerKind) -> list[Product]:
        """The products with A and B of the adapters in the last layer of a kind."""
        tp, n, own = self.spec.layout.tp, self.tokens, self.own
        found: list[Product] = []
        for each in run_parameters(self.spec)[f"blocks.{self._last(kind)}"]:
            if not each.adapters:
                continue
            (outputs, inputs), rank = each.shape[-2:], each.adapters[0].shape[-2]
            if each.expert:
                found += [self._of_experts(rank, inputs), self._of_experts(outputs, rank)]
            elif each.split is None:
                found += [Product(own, rank, inputs), Product(own, outputs, rank)]
            elif each.dim:
                found += [Product(n, rank, inputs // tp), Product(own, outputs, rank)]
            else:
                found += [Product(own, rank, inputs), Product(n, outputs // tp, rank)]
        return found

    def _last(self, kind: LayerKind) -> int:
        """The last layer of a kind; all are taken to have its adapters."""
        return self.spec.model.last_layers[kind]

    def _routed_products(self) -> list[Product]:
        moe, hidden = self.shape.moe, self.spec.model.hidden
        inner = moe.ffn // self.spec.layout.etp
        router = Product(self.own, moe.experts, hidden)
        return [router, self._of_experts(self.gates * inner, hidden), self._of_experts(hidden, inner)]

    def named_outputs(self, kind: LayerKind) -> dict[Output, float]:
        """Elements of a layer's outputs that programs keep by name, 0 of those that no backward reads."""
        routed, n, stream = kind.has_experts, self.tokens, float(self.own * self.spec.model.hidden)
        channels = self.shape.moe.shared_ffn if routed else self.spec.model.ffn
        gate, down = n * channels / self.spec.layout.tp, stream * self.spec.model.rereads_outputs
        if routed:
            gate += self.shape.copies * self.shape.moe.ffn / self.spec.layout.etp
            down += self.shape.copies * self.spec.model.hidden
        found: dict[Output, float] = {"decoder_layer_input": stream, "out_proj": stream}
        found |= {"query_proj": n * self.q, "key_proj": n * self.kv, "value_proj": n * self.kv}
        found |= {"context": n * self.q, "mlpwi_0": gate, "mlpwo": down}
        return found | {"mlpwi_1": gate * (self.gates - 1)}

    def every_second_output(self, kind: LayerKind, compiled: bool) -> float:
        """Elements of the outputs that a layer keeps if it computes every second product again.

        Queries, keys, values, gates and what they gate are products of their own; those of experts are all
        computed again. A compiler does not keep what no backward reads, such as the last product's output.
        Source: torchtitan's distributed/activation_checkpoint.py, 2025.
        """
        n, stream = self.tokens, self.own * self.spec.model.hidden
        *joint, _ = self._attention_products()
        found: list[float] = [n * self.q, n * self.kv, n * self.kv]
        if self.spec.model.mla is not None:
            found = [p.m * p.n for p in joint]
        channels = self.shape.moe.shared_ffn if kind.has_experts else self.spec.model.ffn
        found.append(stream)
        if channels:
            found += [n * channels / self.spec.layout.tp] * self.gates
            read = not compiled or self.spec.model.rereads_outputs
            found.append(stream * read)
        return sum(found[::2])

    def repeated_products(self, kind: LayerKind, kept: Collection[Output]) -> list[tuple[float, Product]]:
        """(share of its columns, product) of a layer's forward that are computed again for a backward.

        The last product of a dense layer is not: its output is the next layer's input, which is kept.
        """
        model, routed = self.spec.model, kind.has_experts
        *joint, out = self._attention_products()
        sizes = {"query_proj": self.q, "key_proj": self.kv, "value_proj": self.kv}
        missing = sum(size for name, size in sizes.items() if name not in kept) / sum(sizes.values())
        found = [(missing if model.mla is None else float(missing > 0), p) for p in joint]
        found.append((float("out_proj" not in kept), out))
        gates = ["mlpwi_0", "mlpwi_1"][: self.gates]
        gated = sum(name not in kept for name in gates) / len(gates)
        down = float("mlpwo" not in kept)
        inner = self._feed_forward_products(self.shape.moe.shared_ffn if routed else model.ffn)
        found += zip((gated, down * model.rereads_outputs), inner, strict=False)
        if routed:
            router, first, last = self._routed_products()
            found += [(1.0, router), (gated, first), (down, last)]
        return [(share, p) for share, p in found if share]

    def _of_experts(self, outputs: int, inputs: int) -> Product:
        """The product of each expert's rows with a matrix of its own."""
        local = max(1, self.shape.moe.experts // self.spec.layout.ep)
        # Source: programs pad each expert's rows to whole words (NVIDIA Transformer Engine's Fp8Padding,
        # torchtitan's TOKEN_GROUP_ALIGN_SIZE_M).
        words = int(WORD / FORMAT_BYTES[self.precision.products])
        rows = words * max(1, ceil(self.shape.copies / local / words))
        return Product(rows, outputs, inputs, local, experts=True)

    def widens(self, product: Product) -> bool:
        """True for a product that makes queries, keys or values of latents."""
        mla = self.spec.model.mla
        return mla is not None and product.k in (mla.q_rank, mla.kv_rank)

    @property
    def gates(self) -> int:
        """Products of a feed-forward network's input: two where the activation is gated."""
        return 2 if self.spec.model.gated else 1
