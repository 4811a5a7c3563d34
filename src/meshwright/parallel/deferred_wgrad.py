"""Gradients of weights, with the backward that finds them or after it.

Nobody waits for the gradient of a weight, while the stage before waits for that of the input: so a schedule
may put the first off and fill bubbles with it (Qi et al. 2023, zero bubble). A linear map's backward then
leaves what is to be computed here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn

Found = Sequence[Tensor | None]
Work = tuple[Sequence[nn.Parameter | None], Callable[[], Found]]
"""Parameters, and what computes the gradient of each."""


class WeightGradStore:
    """Where linear maps take their weights' gradients to."""

    def __init__(self) -> None:
        self._open: list[Work] | None = None

    @property
    def open(self) -> bool:
        """Whether gradients of weights are put off now."""
        return self._open is not None

    def put(self, parameters: Sequence[nn.Parameter | None], compute: Callable[[], Found]) -> None:
        """Put off `compute`, which returns the gradient of each of `parameters`."""
        assert self._open is not None
        self._open.append((parameters, compute))

    @contextmanager
    def during(self) -> Iterator[list[Work]]:
        """A backward for the inputs; the list holds what it put off."""
        found: list[Work] = []
        self._open = found
        try:
            yield found
        finally:
            self._open = None


def together(works: Sequence[Work]) -> Iterator[tuple[Sequence[nn.Parameter | None], Found]]:
    """Parameters and their gradients, each set of parameters once; experts are used once for each part."""
    of_same: dict[tuple[int, ...], list[Work]] = {}
    for work in works:
        of_same.setdefault(tuple(map(id, work[0])), []).append(work)
    for (parameters, compute), *others in of_same.values():
        found = compute()
        for _, again in others:
            found = [
                a if b is None else b if a is None else a.add_(b) for a, b in zip(found, again(), strict=True)
            ]
        yield parameters, found
