"""Activation recomputation: which activations a block saves for its backward, and which it computes again.

Splits nothing and sends nothing. Full recomputation (Chen et al. 2016) saves each block's input and costs one
more forward. Selective recomputation (Korthikanti et al. 2022) saves the outputs of named operators, by
default those that cost most to compute for their size (attention and matmul), and computes the rest again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import (
    CheckpointPolicy,
    _VersionWrapper,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from meshwright.kernels import attention_cpu, attention_flash  # noqa: F401 - they register operators
from meshwright.parallel import fused_comm_ops  # noqa: F401 - it registers operators
from meshwright.parallel.activation_offload import ActivationOffload, SavedTensor
from meshwright.parallel.recompute_cache import Context, RecomputeCache
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
        torch.ops.meshwright.joint_matmul_one.default,
        _aten.mm.default,
        _aten.addmm.default,
        _aten.bmm.default,
        _aten.linear.default,
    ),
}


def apply_recompute(
    blocks: Iterable[nn.Module],
    recompute: RecomputeSpec,
    cache: RecomputeCache | None = None,
    offload: ActivationOffload | None = None,
) -> None:
    """Wrap each block's `forward` so that it recomputes by the policy, with the results that `cache`
    keeps; `offload` moves what is saved."""
    if isinstance(recompute, NoRecompute):
        return
    saved = frozenset(recompute.save) if isinstance(recompute, SelectiveRecompute) else frozenset()
    options = {"context_fn": partial(_contexts, saved, cache, offload)} if saved or cache else {}
    for block in blocks:
        block.forward = partial(_recomputing, block.forward, options)


def _recomputing(forward: Callable[..., Any], options: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    # The decoder draws no random numbers, so there is no generator state to restore.
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **options, **kwargs)


def _contexts(
    saved: frozenset[SavedOp], cache: RecomputeCache | None, offload: ActivationOffload | None
) -> tuple[Context, Context]:
    """Contexts of a block's first and recomputing forward."""
    operators = frozenset(op for kind in saved for op in OPERATORS[kind])
    outputs: Mapping[Any, Mapping[int, Any]] = {}
    first: Context = nullcontext()
    second: Context = nullcontext()
    if operators:
        first, second = create_selective_checkpoint_contexts(partial(_policy, operators))
        outputs = first.storage  # type: ignore[attr-defined]
    results: deque[Any] = deque()
    if cache is not None:
        first = cache.during(saved, results, False, first)
        second = cache.during(saved, results, True, second)
    if offload is None:
        return first, second
    return _offloading(offload, first, outputs, results), _loading(offload, second, outputs, results)


@contextmanager
def _offloading(
    offload: ActivationOffload, first: Context, outputs: Any, results: deque[Any]
) -> Iterator[None]:
    """Context of a block's first forward that gives what it keeps for the recomputing one to `offload`."""
    with first:
        yield
    for wrapper in _wrappers(outputs):
        wrapper.val = offload.save(wrapper.val)
    for number, kept in enumerate(results):
        results[number] = kept and tuple(map(offload.save, kept))


@contextmanager
def _loading(
    offload: ActivationOffload, second: Context, outputs: Any, results: deque[Any]
) -> Iterator[None]:
    """Context of a block's recomputing forward that takes back what `offload` was given."""
    for wrapper in _wrappers(outputs):
        assert isinstance(wrapper.val, SavedTensor)
        wrapper.val = offload.load(wrapper.val)
        wrapper.version = wrapper.val._version
    for number, kept in enumerate(results):
        results[number] = kept and tuple(map(offload.load, kept))
    with second:
        yield


def _wrappers(outputs: Mapping[Any, Mapping[int, Any]]) -> list[_VersionWrapper]:
    """Holders of the outputs of operators that torch saves for a recomputing forward."""
    leaves = pytree.tree_leaves([[*calls.values()] for calls in outputs.values()])
    wrappers = (each for each in leaves if isinstance(each, _VersionWrapper))
    return [each for each in wrappers if isinstance(each.val, (Tensor, SavedTensor))]


def _policy(
    saved: frozenset[Any], _context: Any, operator: Any, *_args: Any, **_kwargs: Any
) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in saved else CheckpointPolicy.PREFER_RECOMPUTE
