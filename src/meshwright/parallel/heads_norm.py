"""RMSNorm of the queries of all heads together, and of the keys, where tensor ranks hold some heads each.

Splits        the weight by heads, as the queries and keys are.
Wire          one all-reduce of two numbers a token in the forward, and one in the backward.
Saves         nothing: without it each rank would need the queries and keys of all heads.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from meshwright.comm.collectives import start_all_reduce
from meshwright.comm.mesh import Axis
from meshwright.model.norm import RmsNorm
from meshwright.parallel.fused_comm_ops import FusedCommOp, Parameters, Tensors, empty
from meshwright.parallel.recompute_cache import RecomputeCache
from meshwright.spec import ModelSpec


class HeadsNorm(FusedCommOp):
    """Queries (B, T, H d / n) and keys (B, T, K d / n) over the root mean square of all ranks' channels.

    Inputs: queries, keys, and the rank's part of each weight. Where several ranks hold one key head, each
    adds its share. Results: both normed, and the scales (2, B, T), which only the backward needs.
    """

    kind = "exchange"
    results = 2

    def __init__(self, axis: Axis, cache: RecomputeCache | None, model: ModelSpec) -> None:
        super().__init__(cache)
        self._axis, self._eps, self._offset = axis, model.norm_eps, float(model.norm_unit_offset)
        self._sizes = model.heads * model.head_dim, model.kv_heads * model.head_dim
        self._copies = 1, max(1, axis.size // model.kv_heads)

    def norm(self, q: Tensor, k: Tensor, q_norm: RmsNorm, k_norm: RmsNorm) -> tuple[Tensor, Tensor]:
        """The normed queries and keys."""
        q, k = self(q, k, q_norm.weight, k_norm.weight)
        return q, k

    def forward(self, inputs: Tensors) -> Tensors:
        """Norm both, by the sum of the squares of all ranks."""
        pairs, weights = inputs[:2], inputs[2:]
        exact = torch.promote_types(pairs[0].dtype, torch.float32)
        sums = self._summed([x.to(exact).square().sum(-1) for x in pairs])
        sizes = sums.new_tensor(self._sizes).view(2, 1, 1)
        scales = sums.div_(sizes).add_(self._eps).rsqrt_()
        normed = [
            (x.to(exact) * scale.unsqueeze(-1) * (weight.to(exact) + self._offset)).to(x.dtype)
            for x, scale, weight in zip(pairs, scales, weights, strict=True)
        ]
        return [*normed, scales]

    def keep(self, inputs: Tensors, results: Tensors) -> Tensors:
        """The inputs, and the scales."""
        return [*inputs, results[2]]

    def backward(self, saved: Tensors, grads: Tensors, parameters: Parameters = ()) -> Tensors:
        """Gradients of queries, keys and both weights."""
        pairs, weights, scales = saved[:2], saved[2:4], saved[4]
        exact = scales.dtype
        wide = [
            (grad.to(exact), x.to(exact), weight.to(exact) + self._offset)
            for grad, x, weight in zip(grads, pairs, weights, strict=False)
        ]
        along = self._summed([(grad * weight * x).sum(-1) for grad, x, weight in wide])
        found = []
        of_weights = []
        for (grad, x, weight), scale, one, size in zip(wide, scales, along, self._sizes, strict=True):
            factor = (one * scale.square() / size).unsqueeze(-1)
            found.append(((grad * weight - x * factor) * scale.unsqueeze(-1)).to(pairs[0].dtype))
            of_weights.append((grad * x * scale.unsqueeze(-1)).sum((0, 1)).to(weights[0].dtype))
        return [*found, *of_weights]

    def _summed(self, parts: Sequence[Tensor]) -> Tensor:
        """The sums (2, B, T) over all ranks of what each has of queries and keys."""
        sums = torch.stack([part / copies for part, copies in zip(parts, self._copies, strict=True)])
        start_all_reduce(sums, self._axis).wait()
        return sums

    def results_like(self, inputs: Tensors) -> Tensors:
        """Empty results."""
        q = inputs[0]
        exact = torch.promote_types(q.dtype, torch.float32)
        return [*map(empty, inputs[:2]), q.new_empty(2, *q.shape[:2], dtype=exact)]

    def gradients_like(self, saved: Tensors, grads: Tensors) -> Tensors:
        """Empty gradients."""
        return [*map(empty, saved[:4])]
