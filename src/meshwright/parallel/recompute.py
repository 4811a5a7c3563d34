"""Activation recomputation: what a block keeps for its backward, and what it computes again.

Splits nothing and sends nothing. Full (Chen et al. 2016) keeps each block's input and pays one more forward.
Selective (Korthikanti et al. 2022) keeps the outputs of named operators, by default those that cost most
to compute for their size (attention and matmul), and computes norms, activations and products again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import (
    CheckpointPolicy,
    _CachedTorchDispatchMode,
    _CachingTorchDispatchMode,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from meshwright.model import attention_cpu, attention_flash  # noqa: F401 - they register torch.ops.meshwright's
from meshwright.parallel import fused_comm_ops as joint  # noqa: F401 - so does this
from meshwright.spec.sections import NoRecompute, RecomputeSpec, SavedOp, SelectiveRecompute

_aten = torch.ops.aten
OPERATORS: dict[SavedOp, tuple[Any, ...]] = {
    "attention": (
        torch.ops.meshwright.joint_attention.default,
        torch.ops.meshwright.blocked_attention.default,
        torch.ops.meshwright.varlen_attention.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_cudnn_attention.default,
    ),
    "matmul": (
        torch.ops.meshwright.joint_matmul.default,
        _aten.mm.default,
        _aten.addmm.default,
        _aten.bmm.default,
        _aten.linear.default,
    ),
}


Results = tuple[torch.Tensor, ...]
Context = AbstractContextManager[Any]


class RecomputeCache:
    """Lets a computation of many operators and messages count as one for the policy.

    What runs in `run` is kept whole in a block's first forward and taken from there in the second where its
    kind is saved; else it is computed again. What nothing in the second forward reads is not even then: its
    shape is enough.
    """

    def __init__(self) -> None:
        self._saved: frozenset[SavedOp] = frozenset()
        self._results: deque[Results | None] | None = None
        self._second = False

    @property
    def second(self) -> bool:
        """Whether a block's second forward runs."""
        return self._second

    def serves(self, kind: SavedOp) -> bool:
        """Whether what is of this kind is there already, as a second forward runs."""
        return self._second and kind in self._saved

    def run(self, kind: SavedOp | None, compute: Callable[[], Results], read_again: bool = True) -> Results:
        """What `compute` returns, now or the first time; shapes only where it is not `read_again`.

        What is of kind None is kept by every policy.
        """
        results = self._results
        if results is None:
            return compute()
        before = results.popleft() if self._second else None
        if before is not None:
            return before
        with _unseen_by_policy():  # operators of what is one for the policy are none of its own
            found = compute()
        if not self._second:
            shapes = tuple(x.new_empty(()).expand(x.shape) for x in found)
            results.append(
                shapes if not read_again else found if kind in self._saved or kind is None else None
            )
        return found

    @contextmanager
    def during(
        self,
        saved: frozenset[SavedOp],
        results: deque[Results | None],
        second: bool,
        inner: Context,
    ) -> Iterator[None]:
        """A block's first or second forward, which shares `results` with the other."""
        before = self._saved, self._results, self._second
        self._saved, self._results, self._second = saved, results, second
        try:
            with inner:
                yield
        finally:
            self._saved, self._results, self._second = before


@contextmanager
def _unseen_by_policy() -> Iterator[None]:
    """Takes away the modes that save operators; others, which count or fake them, go on."""
    with _disable_current_modes() as modes, ExitStack() as stack:
        for mode in reversed(modes):
            if not isinstance(mode, (_CachingTorchDispatchMode, _CachedTorchDispatchMode)):
                stack.enter_context(mode)
        yield


def apply_recompute(
    blocks: Iterable[nn.Module], recompute: RecomputeSpec, kept: RecomputeCache | None = None
) -> None:
    """Replace each block's `forward` by one that recomputes by the policy; its parts run in `kept`."""
    if isinstance(recompute, NoRecompute):
        return
    saved = frozenset(recompute.save) if isinstance(recompute, SelectiveRecompute) else frozenset()
    given = {"context_fn": partial(_contexts, saved, kept)} if saved or kept else {}
    for block in blocks:
        block.forward = _recomputing(block.forward, given)


def _recomputing(forward: Callable[..., Any], given: dict[str, Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        # The decoder draws no random numbers, so there is no generator state to keep.
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **given, **kwargs)

    return run


def _contexts(saved: frozenset[SavedOp], kept: RecomputeCache | None) -> tuple[Context, Context]:
    """What a block's first and second forward run in."""
    operators = frozenset(op for kind in saved for op in OPERATORS[kind])
    first, second = (
        create_selective_checkpoint_contexts(partial(_policy, operators))
        if operators
        else (nullcontext(), nullcontext())
    )
    if kept is None:
        return first, second
    results: deque[Results | None] = deque()
    return kept.during(saved, results, False, first), kept.during(saved, results, True, second)


def _policy(
    saved: frozenset[Any], _context: Any, operator: Any, *_args: Any, **_kwargs: Any
) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in saved else CheckpointPolicy.PREFER_RECOMPUTE
