"""Activation recomputation: which activations a block saves for its backward, and which it computes again.

Splits nothing and sends nothing. Full recomputation (Chen et al. 2016) saves each block's input and costs one
more forward. Selective recomputation (Korthikanti et al. 2022) saves the outputs of named operators, by
default those that cost most to compute for their size (attention and matmul), and computes the rest again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from meshwright.model import attention_cpu, attention_flash  # noqa: F401 - they register operators
from meshwright.parallel import fused_comm_ops  # noqa: F401 - it registers operators
from meshwright.parallel.recompute_cache import Context, RecomputeCache, Results
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


def apply_recompute(
    blocks: Iterable[nn.Module], recompute: RecomputeSpec, cache: RecomputeCache | None = None
) -> None:
    """Wrap each block's `forward` so that it recomputes by the policy, with the results that `cache`
    keeps."""
    if isinstance(recompute, NoRecompute):
        return
    saved = frozenset(recompute.save) if isinstance(recompute, SelectiveRecompute) else frozenset()
    options = {"context_fn": partial(_contexts, saved, cache)} if saved or cache else {}
    for block in blocks:
        block.forward = partial(_recomputing, block.forward, options)


def _recomputing(forward: Callable[..., Any], options: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    # The decoder draws no random numbers, so there is no generator state to restore.
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **options, **kwargs)


def _contexts(saved: frozenset[SavedOp], cache: RecomputeCache | None) -> tuple[Context, Context]:
    """Contexts of a block's first and recomputing forward."""
    operators = frozenset(op for kind in saved for op in OPERATORS[kind])
    first, second = (
        create_selective_checkpoint_contexts(partial(_policy, operators))
        if operators
        else (nullcontext(), nullcontext())
    )
    if cache is None:
        return first, second
    results: deque[Results | None] = deque()
    return cache.during(saved, results, False, first), cache.during(saved, results, True, second)


def _policy(
    saved: frozenset[Any], _context: Any, operator: Any, *_args: Any, **_kwargs: Any
) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in saved else CheckpointPolicy.PREFER_RECOMPUTE
