"""Bytes of activations in the head, and in layers that predict further tokens, of one microbatch on one rank.

For N tokens of D channels, n of them on the rank between the layers, in b bytes, and V rows of the
vocabulary, in sums of e bytes, the head keeps its input, n D b, and the gradients that its forward computed,
N D b + V D e, or N D b + V D b where one product gives all of the weight's.
A layer that predicts further tokens (`model/multi_token_prediction.py`) keeps the embeddings and the hidden
states that it joins, 2 n D b, both side by side where nothing is recomputed, what its block keeps, its
result, and the gradients of the head once more. The backward begins with it: of the head's weight and of the
embedding it leaves gradients of V D b each, which wait for others of the same.
A head that gives log-probabilities (`model/log_probs.py`) keeps the norm's result, N D b, in the place of
gradients, which its backward computes, and three numbers a token.
"""

from __future__ import annotations

from typing import NamedTuple

from meshwright.planner.activations_sizes import Sizes
from meshwright.planner.rank_view import embedding_is_trained, loss_by_kernel
from meshwright.spec.sections import SelectiveRecompute
from meshwright.spec.tiling import loss_rows
from meshwright.spec.training_flops import head_is_trained


def _loss_rows(s: Sizes, cpu: bool) -> tuple[int, int]:
    """Tokens of a chunk of logits, and of a piece of it whose softmax is taken at one time."""
    chunk, piece = loss_rows(s.rows, cpu, loss_by_kernel(s.spec, cpu))
    return min(s.tokens, chunk), min(s.tokens, piece)


def weight_width(s: Sizes, cpu: bool) -> int:
    """Bytes of a number of the weight's gradient that the head's forward computes: of a sum over chunks, or
    of the only product."""
    whole = loss_by_kernel(s.spec, cpu) and _loss_rows(s, cpu)[0] == s.tokens
    return s.width.compute if whole else s.width.exact


def gradients_kept(s: Sizes, cpu: bool) -> int:
    """Bytes of the gradients that the head's forward computes, of its input and of its weight."""
    if s.spec.preference is not None:
        return s.width.compute * s.whole + 3 * s.width.exact * s.tokens
    weight = s.rows * s.spec.model.hidden * head_is_trained(s.spec)
    return s.width.compute * s.whole + weight_width(s, cpu) * weight


def head_kept(s: Sizes, cpu: bool) -> int:
    """Bytes that the head keeps of the loss of the next tokens."""
    return s.width.compute * s.stream + s.numbers(1, s.own) + gradients_kept(s, cpu)


class FurtherBytes(NamedTuple):
    """Bytes that layers that predict further tokens keep, 0 without any."""

    layer: int = 0
    """Within the layer."""
    around: int = 0
    """Before and after it, and in the head."""

    @property
    def kept(self) -> int:
        """All of it."""
        return self.layer + self.around


def further_kept(s: Sizes, block: int, shared: int, cpu: bool) -> FurtherBytes:
    """Bytes that the tokens after the next ones keep, whose layer keeps `block` as a block of the model does,
    and `shared` for its table of positions and its mask."""
    spec, stream = s.spec, s.width.compute * s.stream
    if not spec.model.mtp_num_layers:
        return FurtherBytes()
    layer = block
    if spec.recompute.policy == "none":
        layer += 2 * stream + s.numbers(2, s.own)
    elif not isinstance(spec.recompute, SelectiveRecompute) or "matmul" not in spec.recompute.save:
        layer -= stream  # the block's input is computed again
    lookup = 9 * s.tokens if spec.layout.tp > 1 and embedding_is_trained(spec) else 0
    around = 3 * stream + s.numbers(1, s.own) + lookup + shared + gradients_kept(s, cpu)
    return FurtherBytes(layer, around)


def head_peaks(s: Sizes, cpu: bool) -> tuple[int, int, int]:
    """Peaks of the head beyond kept bytes: in its forward, with a chunk of logits and the softmax of a piece;
    with the weight's gradient in two formats; and in the norm's backward.

    On a CPU adding numbers of one format to another's takes a copy of them.
    """
    b, exact, hidden = s.width.compute, s.width.exact, s.spec.model.hidden
    kernel, (chunk, piece) = loss_by_kernel(s.spec, cpu), (rows * s.rows for rows in _loss_rows(s, cpu))
    weight, mixed = s.rows * hidden * head_is_trained(s.spec), b != exact
    slope = b * piece if s.spec.model.logit_softcap is not None else 0
    if s.spec.preference is not None:
        softmax = b * piece if kernel else (b + exact) * piece + slope
        return b * s.whole + weight * (b + exact) + softmax, weight * b if mixed else 0, in_norm(s)
    softmax = b * chunk + (0 if kernel else piece * (2 * exact if mixed else exact) + slope)
    summed = weight_width(s, cpu)
    product = weight * (b + exact) if cpu and summed != b else 0  # a GPU's writes wider numbers to the sum
    return (
        b * (s.stream + s.gathered) + max(softmax, b * chunk + product),
        weight * b if summed != b else 0,
        in_norm(s) - summed * weight,  # the weight's gradient was freed
    )


def in_norm(s: Sizes) -> int:
    """Bytes that a norm's backward makes; the kernel of a GPU makes its result alone."""
    b, exact = s.width.compute, s.width.exact
    if not s.cpu:
        return b * s.stream
    if b != exact:  # in wider numbers
        return s.stream * (3 * exact + b)
    return s.stream * exact * (2 if s.spec.model.norm == "rmsnorm" else 1)


def waiting_gradient(s: Sizes) -> int:
    """Bytes of the embedding's gradient that further tokens leave until the backward is at the embedding."""
    further = s.spec.model.mtp_num_layers and not s.spec.model.tied and embedding_is_trained(s.spec)
    return s.width.compute * s.rows * s.spec.model.hidden if further else 0


def further_peak(s: Sizes, further: FurtherBytes, in_layer: int, cpu: bool) -> int:
    """Peak of the backward of further tokens beyond all kept bytes, where that of a block takes `in_layer` in
    all: in the layer, in the lookup, and where the head's two gradients meet."""
    if not further.kept:
        return 0
    b, exact = s.width.compute, s.width.exact
    weight = s.rows * s.spec.model.hidden
    freed = gradients_kept(s, cpu) + b * s.stream
    at_layer = in_layer - further.layer - freed + b * weight
    gradient = added = b * weight
    if cpu and exact != b:  # a CPU adds up in wider numbers
        added = exact * weight + max(gradient, exact * s.whole)
    at_lookup = 2 * b * s.stream + added + b * weight - further.kept
    meet = 3 * b * weight - further.kept
    return max(at_layer, at_lookup, meet)
