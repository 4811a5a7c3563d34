"""Times of the kernels in C++ beside torch's operators, in turns.

    python bench/cpu_kernels.py [--threads 1] [--rounds 20]

8 sequences of 512 tokens with the sizes of `small`, in fp32 and bf16; what the processor lacks of bf16 is
computed in fp32, as in a run. One JSON object for each format, with the best milliseconds of forward and
backward (of the loss both together, and of rotary positions one way):

    {"precision", "threads", "attention": {"operators": [...], "kernel": [...]}, "rms_norm", "swiglu", ...}
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from allocations import by_operators
from meshwright.kernels.attention_cpu import blocked_attention
from meshwright.kernels.half_precision_products import products_in_fp32
from meshwright.model.chunked_cross_entropy import _loss
from meshwright.model.mlp import _SiluProduct
from meshwright.model.norm import RmsNorm
from meshwright.model.rope import rotate
from meshwright.parallel.precision import DTYPES, use_fast_fp32_matmul
from meshwright.rank.env import keep_freed_memory

BATCH, TOKENS, HEADS, KEY_HEADS, DIM, HIDDEN, FFN, VOCABULARY = 8, 512, 8, 4, 64, 512, 1408, 8192


def timed(compute: Callable[..., Tensor], inputs: Sequence[Tensor]) -> list[float]:
    """Seconds of a forward and of its backward."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    start = time.perf_counter()
    out = compute(*leaves)
    middle = time.perf_counter()
    grad = torch.ones_like(out)
    again = time.perf_counter()
    torch.autograd.grad(out, leaves, grad)
    return [middle - start, time.perf_counter() - again]


def cases(dtype: torch.dtype) -> dict[str, Callable[[], list[float]]]:
    """Name -> a function that runs the case once and returns its seconds."""

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)

    heads = [drawn(BATCH, TOKENS, count, DIM) for count in (HEADS, KEY_HEADS, KEY_HEADS)]
    norm = RmsNorm(HIDDEN, 1e-5).to(dtype)
    torch.nn.init.ones_(norm.weight)
    gates = [drawn(BATCH, TOKENS, FFN) for _ in range(2)]
    rope = drawn(BATCH, TOKENS, 1, DIM), drawn(BATCH, TOKENS, 1, DIM // 2)
    logits, targets = drawn(256, VOCABULARY), torch.randint(VOCABULARY, (256,))

    def loss() -> list[float]:
        given = logits.clone()
        start = time.perf_counter()
        _loss(given, targets, True, None, 1.0)
        return [time.perf_counter() - start]

    return {
        "attention": lambda: timed(lambda *x: blocked_attention(*x, None), heads),
        "rms_norm": lambda: timed(norm, [drawn(BATCH, TOKENS, HIDDEN)]),
        "swiglu": lambda: timed(_SiluProduct.apply, gates),
        "rotate": lambda: timed(lambda x: rotate(x, rope), heads[:1])[:1],
        "loss": loss,
    }


def measure(precision: str, rounds: int) -> dict[str, Any]:
    """Name of a case -> its best milliseconds by operators and by the kernel."""
    found: dict[str, Any] = {}
    for name, run in cases(DTYPES[precision]).items():
        times: dict[str, list[list[float]]] = {"operators": [], "kernel": []}
        for _ in range(rounds):
            with by_operators():
                times["operators"].append(run())
            times["kernel"].append(run())
        found[name] = {
            side: [round(1e3 * min(part), 2) for part in zip(*rows, strict=True)]
            for side, rows in times.items()
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    if min(options.threads, options.rounds) < 1:
        parser.error("--threads and --rounds: give 1 or more")
    torch.set_num_threads(options.threads)
    keep_freed_memory()
    use_fast_fp32_matmul(torch.device("cpu"))
    for precision in ("fp32", "bf16"):
        with products_in_fp32(torch.device("cpu"), DTYPES[precision]):
            found = measure(precision, options.rounds)
        print(json.dumps({"precision": precision, "threads": options.threads} | found), flush=True)


if __name__ == "__main__":
    main()
