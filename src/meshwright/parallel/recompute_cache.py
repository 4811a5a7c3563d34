"""Results of operations that a block's recomputing forward takes over from its first forward."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

from meshwright.spec.sections import SavedOp

Results = tuple[torch.Tensor, ...]
Context = AbstractContextManager[Any]


class RecomputeCache:
    """Lets a policy of recomputation treat a computation of many operators and messages as one.

    The results of `run` are kept in a block's first forward, and returned in its recomputing forward, if the
    policy saves their kind; else they are computed again. Results that no recomputing forward reads are
    neither kept nor computed again: tensors of their shape stand in for them.
    """

    def __init__(self) -> None:
        self._saved: frozenset[SavedOp] = frozenset()
        self._results: deque[Results | None] | None = None
        self.recomputing = False
        """True while a block's recomputing forward runs."""

    def serves(self, kind: SavedOp) -> bool:
        """True in a recomputing forward that has results of this kind."""
        return self.recomputing and kind in self._saved

    def run(self, kind: str | None, compute: Callable[[], Results], read_again: bool = True) -> Results:
        """The results of `compute`, now or from the first forward; only their shapes if not `read_again`.

        Every policy saves results of kind None.
        """
        results = self._results
        if results is None:
            return compute()
        cached = results.popleft() if self.recomputing else None
        if cached is not None:
            return cached
        with _hidden_from_policy():
            computed = compute()
        if not self.recomputing:
            shapes = tuple(x.new_empty(()).expand(x.shape) for x in computed)
            saved = kind is None or kind in self._saved
            results.append(shapes if not read_again else computed if saved else None)
        return computed

    @contextmanager
    def during(
        self, saved: frozenset[SavedOp], results: deque[Results | None], recomputing: bool, inner: Context
    ) -> Iterator[None]:
        """Context of a block's first or recomputing forward, which share `results`."""
        before = self._saved, self._results, self.recomputing
        self._saved, self._results, self.recomputing = saved, results, recomputing
        try:
            with inner:
                yield
        finally:
            self._saved, self._results, self.recomputing = before


@contextmanager
def _hidden_from_policy() -> Iterator[None]:
    """Disable the dispatch modes that save operators, but not others, which count or fake them."""
    with _disable_current_modes() as modes, ExitStack() as stack:
        for mode in reversed(modes):
            if not isinstance(mode, (_CachingTorchDispatchMode, _CachedTorchDispatchMode)):
                stack.enter_context(mode)
        yield
