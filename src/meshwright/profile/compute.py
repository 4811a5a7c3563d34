"""Products, attention, memory and the optimiser, over shapes like those of a decoder's training."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import accumulate, cycle
from math import ceil, prod
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.hardware.cluster import AttentionTime, Matmul
from meshwright.kernels.half_precision_products import products_in_fp32
from meshwright.model.attention import attend
from meshwright.parallel.precision import DTYPES
from meshwright.profile.clock import Clock, time_shares

FORMATS = ("fp32", "bf16")

Shape = TypeVar("Shape", bound=tuple[int, ...])

Meet = Callable[[], object]
"""Lets all ranks start at once."""

_ROWS = (32, 256, 2048, 8192)
_SMALL = (
    *((64, 64), (128, 128), (256, 256), (512, 512), (1024, 1024), (2048, 2048)),  # square
    *((64, 512), (512, 64), (128, 512), (512, 128), (384, 1024), (1024, 384)),  # up and down
    *((4096, 256), (256, 4096), (512, 2048), (2048, 512), (1024, 4096), (4096, 1024)),
)
_LARGE = (
    *((512, 512), (1024, 1024), (2048, 2048), (4096, 4096), (8192, 8192)),
    *((1024, 4096), (4096, 1024), (14336, 4096), (4096, 14336), (128256, 4096), (128, 4096), (4096, 128)),
)
_SEQUENCES = ((1, 128), (8, 128), (1, 512), (4, 512), (1, 1024), (1, 2048), (1, 4096), (1, 8192))
_LEAST_PRODUCTS, _LEAST_ATTENTIONS = 24, 6
"""Shapes that are measured however slow a machine seems: the largest product is 100 times the least."""
_HEADS = ((4, 4, 32), (8, 8, 64), (8, 2, 64), (8, 8, 128), (32, 8, 128))


def product_shapes(flops: float, cuda: bool) -> list[tuple[int, int, int]]:
    """(m, n, k), small and skinny ones among them, the largest first; as many as `flops` are enough for."""
    rows = (*_ROWS, 32768) if cuda else _ROWS
    shapes = {(m, n, k) for n, k in (_LARGE if cuda else _SMALL) for m in rows}
    # Gradients of weights
    shapes |= {(n, k, m) for n, k in ((256, 256), (256, 1024), (1024, 256)) for m in rows[1:]}
    return _affordable(shapes, _product_work, flops, _LEAST_PRODUCTS)


def _product_work(shape: tuple[int, int, int]) -> int:
    """FLOPs, and for each number that is made and moved as much time as for 100 of them."""
    m, n, k = shape
    return 2 * m * n * k + 100 * (m * k + n * k + m * n)


def _affordable(
    shapes: Iterable[Shape], work: Callable[[Shape], int], flops: float, least: int
) -> list[Shape]:
    """The smallest shapes of which `flops` allow three calls at half the rate; the largest first.

    At least `least` of them, since a busy machine's probe allows hardly any and a table needs a range.
    """
    ranked = sorted(shapes, key=lambda shape: (work(shape), shape))
    spent = accumulate(2 * 3 * work(shape) for shape in ranked)
    affordable = sum(total <= flops for total in spent)
    return ranked[: max(least, affordable)][::-1]


def products(
    clock: Clock, name: str, shapes: list[tuple[int, int, int]], seconds: float, meet: Meet
) -> Iterator[Matmul]:
    """Times of x (m, k) with weights (n, k), as a linear map has them; `seconds` for all shapes.

    Each call has other weights: a step reads each once a pass, from memory and not from a cache.
    """
    pool = _random(clock.device, name, _elements(clock.device))
    for (m, n, k), share in zip(shapes, time_shares(seconds, len(shapes)), strict=True):
        count = pool.numel() // (n * k)
        whole = pool[: count * n * k] if count > 1 else _random(clock.device, name, n * k)
        weights = whole.view(-1, n, k)
        calls = map(partial(F.linear, _random(clock.device, name, m, k)), cycle(weights))
        meet()
        yield Matmul(name, m, n, k, clock.during(partial(next, calls), share))


def probe(clock: Clock, name: str) -> float:
    """FLOP/s of one product of middle size."""
    size = 4096 if clock.cuda else 512
    x, weight = (_random(clock.device, name, size, size) for _ in range(2))
    with products_in_fp32(clock.device, DTYPES[name]):
        return 2 * size**3 / clock.during(lambda: F.linear(x, weight), 0.02)


def attention_shapes(flops: float, cuda: bool) -> list[tuple[int, int, int, int, int]]:
    """(sequences, heads, key-value heads, channels of a head, length), the largest first.

    `flops` are those of products; attention is taken to be slower by a factor of 4.
    """
    heads = _HEADS if cuda else _HEADS[:4]
    shapes = [(batch, *shape, length) for batch, length in _SEQUENCES for shape in heads]

    def work(shape: tuple[int, ...]) -> int:
        batch, query_heads, _, dim, length = shape
        return 4 * 7 * batch * query_heads * dim * length**2

    return _affordable(shapes, work, flops, _LEAST_ATTENTIONS)


def attentions(
    clock: Clock, name: str, shapes: list[tuple[int, int, int, int, int]], seconds: float, meet: Meet
) -> Iterator[AttentionTime]:
    """Times of the model's own causal attention, forward and backward."""
    for shape, share in zip(shapes, time_shares(seconds, len(shapes)), strict=True):
        batch, heads, kv_heads, dim, length = shape
        q, k, v = (
            _random(clock.device, name, batch, length, n, dim).requires_grad_()
            for n in (heads, kv_heads, kv_heads)
        )
        meet()
        forward = clock.during(partial(attend, q, k, v, None), share / 3)
        out = attend(q, k, v, None)
        backward = partial(torch.autograd.grad, out, (q, k, v), torch.ones_like(out), retain_graph=True)
        yield AttentionTime(name, *shape, forward, clock.during(backward, share * 2 / 3))


def memory_rates(clock: Clock, seconds: float, meet: Meet) -> list[float]:
    """(elementwise, copy, optimiser) bytes per second, read and written, by `seconds` of large calls each.

    Fused AdamW on fp32 reads 16 bytes of each parameter and writes 12.
    """
    elements = _elements(clock.device)
    a, b, c = (torch.ones(elements, device=clock.device) for _ in range(3))
    weight = torch.ones(elements // 4, device=clock.device, requires_grad=True)
    weight.grad = torch.ones_like(weight)
    adam = torch.optim.AdamW([weight], lr=1e-3, fused=True)
    calls: list[tuple[int, Callable[[], object]]] = [
        (3 * 4 * elements, partial(torch.add, a, b, out=c)),
        (2 * 4 * elements, partial(a.copy_, b)),
        (28 * weight.numel(), adam.step),
    ]
    rates = []
    for moved, call in calls:
        meet()
        rates.append(moved / clock.during(call, seconds))
    return rates


def launch_time(clock: Clock) -> float:
    """Seconds of an operator on one number, many in a row."""
    count, one = 1000, torch.ones(1, device=clock.device)

    def row() -> None:
        for _ in range(count):
            one.mul_(1.0)

    return clock.during(row, 0.05) / count


def _elements(device: torch.device) -> int:
    """Elements of an fp32 tensor that is larger than any cache."""
    return 2**28 if device.type == "cuda" else 2**24


def _random(device: torch.device, name: str, *shape: int) -> Tensor:
    """Normal numbers; large tensors repeat them, as drawing takes longer than using them."""
    drawn = torch.randn(min(prod(shape), 2**16), device=device).to(DTYPES[name])
    return drawn.repeat(ceil(prod(shape) / drawn.numel()))[: prod(shape)].view(shape)
