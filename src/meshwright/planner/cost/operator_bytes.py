"""Bytes that memory-bound operators of this program read and write on a GPU, by the part of a step.

Operators are not fused, so each reads its inputs from memory and writes its results there. A number here is
one for each operator that a dry run records (`dryrun/trace.py`), and `tests/dryrun/test_operator_bytes.py`
holds the parts to such a record: blocks, the embedding, the head with its loss, and copies of units. Where an
operator of a part is fused or added, its number changes with it.
"""

from __future__ import annotations

from typing import NamedTuple

from meshwright.planner.activations_sizes import ROUNDED
from meshwright.planner.rank_view import adds_gradients, widths
from meshwright.planner.traffic.layer_shape import LayerShape
from meshwright.spec import RunSpec
from meshwright.spec.layers import LayerKind
from meshwright.spec.tiling import loss_rows


class ForwardBackward(NamedTuple):
    """Passes over a tensor, each a read or a write, or bytes, of a forward and of its backward."""

    forward: float
    backward: float

    def plus(self, other: ForwardBackward, times: float = 1.0) -> ForwardBackward:
        """The sum with `times` x `other`."""
        return ForwardBackward(self.forward + times * other.forward, self.backward + times * other.backward)


# Passes over a tensor, and the kernels that make them. Counted: the operators of a block in a dry run.

NORM = ForwardBackward(2, 3)
NORM_KERNELS = ForwardBackward(1, 1)
RESIDUAL = ForwardBackward(3, 3)
"""Passes over the hidden state at one sum of a block."""
RESIDUAL_KERNELS = ForwardBackward(1, 1)
SHARED_INPUT = 3.0
"""Passes over a product's input in the backward for each further product of it, as gradients are added."""
ROTATION = ForwardBackward(5, 5)
"""Passes over queries and keys: a product with cosines, and the other halves added by sines."""
ROTATION_KERNELS = ForwardBackward(6, 6)
"""Kernels for queries and keys together."""
GATED = ForwardBackward(5, 11)
"""Passes over the inner channels: activation and product, which the backward computes again, too."""
GATED_KERNELS = ForwardBackward(2, 4)
UNGATED = ForwardBackward(2, 3)
UNGATED_KERNELS = ForwardBackward(1, 1)
EXPERT_INNER = ForwardBackward(7, 15)
"""Passes over the inner channels of the rows of experts, which the router weighs."""
EXPERT_ROWS = ForwardBackward(7.5, 7)
"""Passes over the rows of experts on their way there and back."""
EXPERT_KERNELS = ForwardBackward(79, 52)
"""Kernels of the router, of rows on their way and of experts. Counted: a block of mixtral-8x7b."""
COMPILED_KERNELS = ForwardBackward(6, 7)
"""Kernels of a compiled block beside products and attention. Counted: a block of llama3-8b."""

# Bytes. Counted: the head, the embedding and copies of units in a dry run in 16 bits, sums in fp32.

LOGIT = 36.0
"""Bytes of a logit: widened, its log-softmax taken, exponentiated and scaled, the gradient narrowed."""
CAPPED = 6.0
"""Passes over the logits that a soft cap and its slope add."""
FIRST_PRODUCT, FURTHER_PRODUCT = 6.0, 10.0
"""Bytes of a weight of the head, as the gradient of a chunk of tokens is written to its sum, or added."""
SCALED = 14.0
"""Bytes of a weight of the head, whose gradient is scaled and narrowed."""


def block_bytes(spec: RunSpec, shape: LayerShape, kind: LayerKind) -> ForwardBackward:
    """Bytes of the norms, activations, residuals and rotations of a layer in a microbatch."""
    model, width = spec.model, shape.width
    stream, tokens = shape.own * model.hidden * width, shape.tokens * width
    found = ForwardBackward(0.0, 0.0).plus(NORM, model.block_norms * stream).plus(RESIDUAL, 2 * stream)
    if spec.layout.tp == 1:  # tensor ranks take the gradients of several products together
        products = (2 if model.mla is None else 1) + (model.gated and not kind.has_experts)
        found = found.plus(ForwardBackward(0, SHARED_INPUT), products * shape.tokens * model.hidden * width)
    if model.position == "rope":
        found = found.plus(ROTATION, tokens * (shape.q + shape.kv))
    if model.qk_norm:
        found = found.plus(NORM, tokens * (shape.q + shape.kv))
    inner = shape.moe.shared_ffn if kind.has_experts else model.ffn
    found = found.plus(GATED if model.gated else UNGATED, tokens * inner / spec.layout.tp)
    if kind.has_experts:
        rows = shape.copies * width
        found = found.plus(EXPERT_INNER, rows * shape.moe.ffn / spec.layout.etp)
        found = found.plus(EXPERT_ROWS, rows * model.hidden)
    return found


def block_kernels(spec: RunSpec, kind: LayerKind) -> ForwardBackward:
    """Memory-bound kernels of a layer in a microbatch, which a device starts one after the other."""
    model = spec.model
    if spec.train.compile and not kind.has_experts:
        return COMPILED_KERNELS
    found = ForwardBackward(0.0, 0.0).plus(NORM_KERNELS, model.block_norms + 2 * model.qk_norm)
    found = found.plus(RESIDUAL_KERNELS, 2)
    if model.position == "rope":
        found = found.plus(ROTATION_KERNELS)
    if not kind.has_experts or model.moe is None or model.moe.shared_ffn:
        found = found.plus(GATED_KERNELS if model.gated else UNGATED_KERNELS)
    return found.plus(EXPERT_KERNELS) if kind.has_experts else found


def head_chunks(shape: LayerShape) -> dict[int, int]:
    """Tokens whose logits are there at one time -> chunks of so many, of a microbatch."""
    whole, rest = divmod(shape.tokens, rows := loss_rows(shape.rows, False, shape.loss_by_kernel)[0])
    return {rows: whole} | ({rest: 1} if rest else {})


def head_bytes(spec: RunSpec, shape: LayerShape) -> ForwardBackward:
    """Bytes of the loss, and of the sum of the head's gradient over chunks of tokens."""
    weight = shape.rows * spec.model.hidden
    chunks = sum(head_chunks(shape).values())
    if shape.loss_by_kernel:  # sums read it, gradients read and write it, by one kernel where a row is whole
        passes = ForwardBackward(1, 2) if shape.log_probs else ForwardBackward(2 + (spec.layout.tp > 1), 0)
        kernel = ForwardBackward(0, 0).plus(passes, shape.tokens * shape.rows * shape.width)
        if chunks == 1:
            return kernel
        sums = FIRST_PRODUCT + (chunks - 1) * FURTHER_PRODUCT
        return kernel.plus(ForwardBackward(weight * sums, weight * SCALED))
    logit = LOGIT + (CAPPED * shape.width if spec.model.logit_softcap is not None else 0.0)
    sums = FIRST_PRODUCT + (chunks - 1) * FURTHER_PRODUCT
    return ForwardBackward(shape.tokens * shape.rows * logit + weight * sums, weight * SCALED)


def embedding_bytes(spec: RunSpec, shape: LayerShape) -> ForwardBackward:
    """Bytes of the lookup, and of its gradient, which is as large as the embedding."""
    stream = shape.stream * shape.width
    return ForwardBackward(2 * stream, stream + shape.rows * spec.model.hidden * shape.width)


class UnitCopies(NamedTuple):
    """Bytes of a parameter as units are gathered, and their gradients put together.

    Gathers write parameters to their places, and products of blocks their gradients, in the format of the
    sum (`kernels/gradient_accumulation_fusion.py`). Copied are messages that are encoded, the gradients of
    both ends, and those of blocks on context ranks that autograd hands over. Products below 16 bits write
    them in place, too, but add none to a sum: a further microbatch's is added to it.
    """

    cast: float
    """As a rank's part of a gather is narrowed to the compute format, for each of its own."""
    unpacked: float
    """As it is copied out of a gather."""
    packed: float
    """As its gradient is laid out to be sent, or begins a sum."""
    packed_block: float
    """As the gradient of a parameter of a block is laid out, or begins a sum."""
    added: float
    """As its gradient is added to what is there, more than `packed`."""
    added_block: float
    """As the gradient of a parameter of a block is added to what is there, more than `packed_block`."""
    summed: float
    """As the sum of ranks is added to that of microbatches before, for each of its own."""


def unit_copies(spec: RunSpec) -> UnitCopies:
    """The bytes of a run's formats."""
    formats = widths(spec)
    compute, exact = formats.compute, formats.exact
    packed, added = compute + exact, float(exact)
    handed_over, low = not adds_gradients(spec), spec.precision.compute in ROUNDED
    return UnitCopies(
        cast=0.0 if compute >= exact else exact + compute,
        unpacked=1.0 + compute if spec.precision.fp8_gather else 0.0,
        packed=packed,
        packed_block=packed if handed_over else 0.0,
        added=added,
        added_block=added if handed_over else low * 3.0 * exact,
        summed=3.0 * exact,
    )
