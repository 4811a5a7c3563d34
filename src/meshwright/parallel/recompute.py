"""Activation recomputation: what a block keeps for its backward, and what it computes again.

Splits nothing and sends nothing. Full (Chen et al. 2016) keeps each block's input and pays one more forward.
Selective (Korthikanti et al. 2022) keeps the outputs of named operators, by default those that cost most
to compute for their size (attention and matmul), and computes norms, activations and products again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from meshwright.model import attention_cpu, attention_flash  # noqa: F401 - they register torch.ops.meshwright's
from meshwright.spec.parts import NoRecompute, RecomputeSpec, SavedOp, SelectiveRecompute

_aten = torch.ops.aten
OPERATORS: dict[SavedOp, tuple[Any, ...]] = {
    "attention": (
        torch.ops.meshwright.blocked_attention.default,
        torch.ops.meshwright.varlen_attention.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_cudnn_attention.default,
    ),
    "matmul": (_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.linear.default),
}


Results = tuple[torch.Tensor, ...]


class Kept:
    """Lets a computation of many operators count as one for the policy: what runs in `run` is kept whole in
    the first forward and taken from there in the second, or computed again, by whether `attention` is saved.
    """

    def __init__(self) -> None:
        self._results: deque[Results] | None = None
        self._second = False

    def run(self, compute: Callable[[], Results]) -> Results:
        """What `compute` returns, now or the first time."""
        if self._results is not None and self._second:
            return self._results.popleft()
        with _disable_current_modes():  # the policy must not save what is inside
            found = compute()
        if self._results is not None:
            self._results.append(found)
        return found

    @contextmanager
    def during(
        self, results: deque[Results], second: bool, inner: AbstractContextManager[Any]
    ) -> Iterator[None]:
        """A block's first or second forward, which shares `results` with the other."""
        before = self._results, self._second
        self._results, self._second = results, second
        try:
            with inner:
                yield
        finally:
            self._results, self._second = before


def apply_recompute(blocks: nn.ModuleList, recompute: RecomputeSpec, kept: Kept | None = None) -> None:
    """Replace each block's `forward` by one that recomputes by the policy; `kept` is its attention's."""
    if isinstance(recompute, NoRecompute):
        return
    context: dict[str, Any] = {}
    if isinstance(recompute, SelectiveRecompute):
        saved = frozenset(op for name in recompute.save for op in OPERATORS[name])
        context = {"context_fn": partial(_contexts, saved, kept if "attention" in recompute.save else None)}
    for block in blocks:
        block.forward = _recomputing(block.forward, context)


def _recomputing(forward: Callable[..., Any], context: dict[str, Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        # The decoder draws no random numbers, so there is no generator state to keep.
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **context, **kwargs)

    return run


def _contexts(
    saved: frozenset[Any], kept: Kept | None
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    first, second = create_selective_checkpoint_contexts(partial(_policy, saved))
    if kept is None:
        return first, second
    results: deque[Results] = deque()
    return kept.during(results, False, first), kept.during(results, True, second)


def _policy(
    saved: frozenset[Any], _context: Any, operator: Any, *_args: Any, **_kwargs: Any
) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in saved else CheckpointPolicy.PREFER_RECOMPUTE
