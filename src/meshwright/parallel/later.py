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


class Later:
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
