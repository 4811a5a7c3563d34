"""Deferred weight gradients (Qi et al. 2023, zero bubble).

The stage before waits for the gradient of a stage's input, but nothing waits for those of its weights, so a
schedule may compute the latter later and fill bubbles with them. A linear layer's backward then leaves that
computation in a `WeightGradStore` (`parallel/tensor_linears.py`, also of one tensor rank).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn

from meshwright.kernels.gradient_accumulation_fusion import GradientSum, no_sum

Gradients = Sequence[Tensor | None]
Work = tuple[Sequence[nn.Parameter], Callable[[], Gradients]]
"""Parameters, and the computation of the gradient of each."""


class WeightGradStore:
    """Collects deferred computations of weight gradients while it is open."""

    def __init__(self) -> None:
        self._works: list[Work] | None = None
        self.gradient_sum: GradientSum = no_sum
        """Where a parameter's gradient is added, deferred or not."""
        self.parameter_at: Callable[[Tensor], nn.Parameter] | None = None
        """Finds the parameter whose memory a tensor has, for compiled blocks; None where gradients are
        returned."""

    @property
    def open(self) -> bool:
        """True while weight gradients are deferred."""
        return self._works is not None

    def put(self, parameters: Sequence[nn.Parameter], compute: Callable[[], Gradients]) -> None:
        """Defer `compute`, which returns the gradient of each of `parameters`, if any of them is trained."""
        assert self._works is not None
        if any(parameter.requires_grad for parameter in parameters):
            self._works.append((parameters, compute))

    @contextmanager
    def during(self) -> Iterator[list[Work]]:
        """Open the store for a backward of inputs; yields the list that it fills."""
        works: list[Work] = []
        self._works = works
        try:
            yield works
        finally:
            self._works = None


def weight_gradients(works: Sequence[Work]) -> Iterator[tuple[Sequence[nn.Parameter], Gradients]]:
    """Compute deferred gradients: (parameters, gradients), each set of parameters once.

    Experts, which process several chunks of tokens, occur in several works; their gradients are summed.
    """
    by_parameters: dict[tuple[int, ...], list[Work]] = {}
    for work in works:
        by_parameters.setdefault(tuple(map(id, work[0])), []).append(work)
    for (parameters, compute), *others in by_parameters.values():
        sums = compute()
        for _, again in others:
            pairs = zip(sums, again(), strict=True)
            sums = [a if b is None else b if a is None else a.add_(b) for a, b in pairs]
        yield parameters, sums
