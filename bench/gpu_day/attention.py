"""Causal attention forward and backward by backend, at the shapes of Llama 3.2 1B and Llama 3 8B.

FLOPs are those under the mask: a forward has 2 products of T x T / 2 x d for each head, a backward 5.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from gpu_day.devices import cluster_here, device_here, fake_tensors
from gpu_day.kernel_clock import rate_of, seconds_of
from gpu_day.parts import MODELS
from gpu_day.results import Row, Work
from meshwright.kernels.attention_flash import varlen_attention, whole_rows
from meshwright.spec import load

LENGTH = 8192
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Attention of q (T, H, d), k and v (T, K, d): (T, H, d)."""


class Backend(NamedTuple):
    """A program that computes attention, and the context that chooses it."""

    attend: Attend
    chosen: Callable[[], AbstractContextManager[Any]]


def run(work: Work) -> None:
    """A row for each model, backend and direction; of a backend that fails one with the reason."""
    device = device_here()
    cluster = cluster_here(device)
    peak = cluster.device.peak["bf16"] if cluster else None
    cases = [(name, backend) for backend in backends() for name in MODELS]
    for model, backend in cases:
        told: Row = {"model": model, "backend": backend, **shape_of(model)}
        if work.left < 5:
            work.leave_out(f"{backend}, {model}")
            continue
        with fake_tensors(work, device):
            work.attempt(told, partial(measure, told, backends()[backend], device, peak))


def shape_of(model: str) -> Row:
    """The heads of a model, and the length of the sequence."""
    spec = load(None, [("model.preset", MODELS[model]), ("data.corpus", "synthetic")]).model
    return {"heads": spec.heads, "kv_heads": spec.kv_heads, "head_dim": spec.head_dim, "length": LENGTH}


def measure(told: Row, backend: Backend, device: torch.device, peak: float | None) -> Row:
    """The rates of forward and backward, the second without the first's time."""
    length, dim, heads = told["length"], told["head_dim"], told["heads"]
    q, k, v, grad = (
        torch.randn(length, count, dim, device=device, dtype=torch.bfloat16)
        for count in (heads, told["kv_heads"], told["kv_heads"], heads)
    )
    leaves = [each.requires_grad_() for each in (q, k, v)]
    with backend.chosen():
        out = backend.attend(*leaves)

        def backward() -> None:
            torch.autograd.grad(out, leaves, grad, retain_graph=True)

        forward_seconds = seconds_of(lambda: backend.attend(*leaves))
        backward_seconds = seconds_of(backward)
    product = heads * length * length * dim  # of a triangle, with 2 FLOPs for a multiplication that is added
    rates = {"forward": (2 * product, forward_seconds), "backward": (5 * product, backward_seconds)}
    return {name: rate_of(flops, seconds, peak) for name, (flops, seconds) in rates.items()}


def backends() -> dict[str, Backend]:
    """Backends by name: SDPA's three, and flash attention over sequences laid end to end by each package."""
    found = {
        "SDPA flash": Backend(_sdpa, partial(sdpa_kernel, [SDPBackend.FLASH_ATTENTION])),
        "SDPA cuDNN": Backend(_sdpa, partial(sdpa_kernel, [SDPBackend.CUDNN_ATTENTION])),
        "SDPA efficient, kv heads repeated": Backend(
            _sdpa_repeated, partial(sdpa_kernel, [SDPBackend.EFFICIENT_ATTENTION])
        ),
    }
    for name in ("FA2", "FA3", "FA4"):
        found[f"varlen {name}"] = Backend(_varlen, partial(_implementation, name))
    return found


@contextmanager
def _implementation(name: str) -> Iterator[None]:
    """Block in which torch's operators of flash attention are those of a package, by torch's name of it."""
    if name == "FA2":  # torch's own
        yield
        return
    # An older torch has no such functions, which is that backend's row then.
    from torch.nn.attention import activate_flash_attention_impl, restore_flash_attention_impl

    activate_flash_attention_impl(name)
    try:
        yield
    finally:
        restore_flash_attention_impl()


def _batched(x: Tensor) -> Tensor:
    """(T, H, d) -> (1, H, T, d)."""
    return x.transpose(0, 1).unsqueeze(0)


def _sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = F.scaled_dot_product_attention(*map(_batched, (q, k, v)), is_causal=True, enable_gqa=True)
    return out[0].transpose(0, 1)


def _sdpa_repeated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    times = q.shape[1] // k.shape[1]
    return _sdpa(q, *(each.repeat_interleave(times, 1) for each in (k, v)))


def _varlen(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    ends, longest, _ = whole_rows(1, q.shape[0], q.device)
    out, _ = varlen_attention(q, k, v, ends, ends, longest, longest, True, None)
    return out
