"""Processor time of a pass that scales gradients and an update after it, and of an update that divides them.

    OMP_NUM_THREADS=1 python bench/divided_update.py

Both are of PyTorch's fused AdamW on 30 million parameters in fp32, in turns. Prints medians as a JSON object:

    {"scaled_ms", "divided_ms", "ratio"}
"""

from __future__ import annotations

import json
import statistics
import time

import torch
from torch import Tensor
from torch.optim.adamw import adamw

PARAMETERS, ROUNDS = 30_000_000, 15


def main() -> None:
    """Print the object."""
    flat, gradient = torch.randn(PARAMETERS), torch.randn(PARAMETERS)
    moments, count = torch.zeros(2, PARAMETERS), torch.zeros(())

    def update(divisor: Tensor | None = None) -> None:
        adamw(
            [flat], [gradient], [moments[0]], [moments[1]], [], [count], fused=True, amsgrad=False,
            lr=1e-3, beta1=0.9, beta2=0.95, weight_decay=0.1, eps=1e-8, maximize=False, grad_scale=divisor,
        )  # fmt: skip

    def scaled() -> None:
        torch._foreach_mul_([gradient], 0.9999)
        update()

    def divided() -> None:
        update(torch.full((), 1.0001))

    seconds: dict[str, list[float]] = {"scaled": [], "divided": []}
    for turn in range(ROUNDS):
        for name, work in (("scaled", scaled), ("divided", divided)):
            began = time.process_time()
            work()
            seconds[name] += [time.process_time() - began] if turn else []  # the first warms up
    before, now = (1e3 * statistics.median(taken) for taken in seconds.values())
    print(json.dumps({"scaled_ms": round(before, 2), "divided_ms": round(now, 2), "ratio": now / before}))


if __name__ == "__main__":
    main()
