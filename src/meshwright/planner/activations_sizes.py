"""Elements of a microbatch's activations on one rank, of which `planner/activations.py` makes bytes."""

from __future__ import annotations

from math import ceil

from meshwright.planner.rank_view import widths
from meshwright.spec import RunSpec

ROUNDED = {"fp8": 1.0, "fp8-blockwise": 1 + 4 / 128, "mxfp8": 1 + 1 / 32, "nvfp4": 1 / 2 + 1 / 16}
"""Recipe -> bytes of an element of a rounded operand with its scales, as gradients of weights take it."""

SIDES = {"fp8": 16, "fp8-blockwise": 128, "mxfp8": 32, "nvfp4": 32}
"""Recipe -> what divides the sides of operands that kernels take (`model/scaled_products.py`)."""


class Sizes:
    """Elements of a microbatch's activations on one rank: of a CPU, or of a device with kernels for products
    in low precision."""

    def __init__(self, spec: RunSpec, cpu: bool = True) -> None:
        layout, model = spec.layout, spec.model
        self.spec, self.width, self.cpu = spec, widths(spec), cpu
        self.compiled = spec.train.compile and not cpu
        """True if blocks are compiled, as on a GPU where a run says so."""
        precision, plain = spec.precision, cpu or spec.train.compile or not spec.trains_all
        kernels = precision.compute in ROUNDED and precision.high == "bf16" and not plain
        self.rounded = ROUNDED[precision.compute] if kernels else None
        """Bytes of an element of an operand in low precision, with its scales; None where what is kept is in
        the format of the rest."""
        self.tokens = spec.micro_batch * spec.data.seq_len // layout.cp
        self.own = self.tokens // (layout.tp if layout.sequence_parallel else 1)
        self.stream = self.own * model.hidden
        self.whole = self.tokens * model.hidden
        self.gathered = self.whole if self.own < self.tokens else 0
        """The residual stream of all tensor ranks, where it is gathered."""
        self.heads = model.heads // layout.tp
        self.queries = self.tokens * self.heads * model.head_dim
        self.keys = self.tokens * layout.local_kv_heads(model.kv_heads) * model.head_dim
        # Over context ranks values travel, and come out, as wide as keys.
        v_dim = model.v_dim if layout.cp == 1 else model.head_dim
        self.values, self.out = self.keys * v_dim // model.head_dim, self.queries * v_dim // model.head_dim
        self.gates = 2 if model.gated else 1
        self.rows = ceil(model.vocab_size / layout.tp)
        self.kinds = model.last_layers
        """Kind -> the last such block: blocks of one kind are alike."""

    @property
    def gathers(self) -> bool:
        """True if tensor ranks gather the inputs of column-parallel layers, and keep their own tokens."""
        return self.own < self.tokens

    def takes(self, *sides: int) -> bool:
        """True if products with matrices of these sides have rounded operands that are kept."""
        divisor = SIDES.get(self.spec.precision.compute, 1)
        return self.rounded is not None and all(side % divisor == 0 for side in (*sides, self.tokens))

    def input(self, elements: int, *sides: int) -> int:
        """Bytes that are kept of an input of linear layers whose matrices have these sides."""
        if self.rounded is not None and self.takes(*sides):
            return round(elements * self.rounded)
        return elements * self.width.compute

    def channels(self, layer: int) -> int:
        """Channels of the feed-forward layer of all tokens, over all tensor ranks; 0 if there is none."""
        model = self.spec.model
        return model.moe.shared_ffn if model.moe and model.has_experts(layer) else model.ffn

    def inner(self, layer: int) -> int:
        """Elements inside the feed-forward layer that all tokens pass, dense or of shared experts."""
        return self.tokens * self.channels(layer) // self.spec.layout.tp

    def numbers(self, norms: int, tokens: int) -> int:
        """Bytes that norms keep besides their input: a scale, or a mean and a scale, for each token."""
        return norms * tokens * self.width.exact * (1 if self.spec.model.norm == "rmsnorm" else 2)
