"""Rates of fp32 matrix products by torch's two libraries on a CPU, beside each other.

    python bench/fp32_products.py [--threads 2] [--rounds 9]

Products of the layers of `small` with 4,096 tokens: forward, gradient of the input, gradient of the weight.
`oneDNN` is what torch takes with its setting "medium", `default` what it takes with "highest" (MKL in builds
for x86). The libraries take turns; a rate is the best of the rounds, since other work on the machine only
slows a product down. One JSON object for each layer:

    {"inputs", "outputs", "oneDNN": {"forward", "input", "weight"}, "default": {...}, "error"}

in GFLOP/s; `error` is the largest one of oneDNN's forward against float64, of its largest value: some 1e-6
in fp32, 1e-3 where it multiplies in bf16.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from meshwright.spec.presets import PRESETS

TOKENS = 4096
SETTINGS = {"oneDNN": "medium", "default": "highest"}


def layers() -> list[tuple[int, int]]:
    """(inputs, outputs) of the linear maps of `small`, each shape once."""
    model: Any = PRESETS["small"]
    hidden, ffn = model["hidden"], model["ffn"]
    keys = hidden * model["kv_heads"] // model["heads"]
    return [(hidden, hidden), (hidden, keys), (hidden, ffn), (ffn, hidden), (hidden, model["vocab_size"])]


def rates(inputs: int, outputs: int, rounds: int) -> dict[str, Any]:
    """The row of a layer."""
    x, weight, grad = (
        torch.randn(shape) for shape in ((TOKENS, inputs), (outputs, inputs), (TOKENS, outputs))
    )
    products: dict[str, Callable[[], Tensor]] = {
        "forward": lambda: x @ weight.T,
        "input": lambda: grad @ weight,
        "weight": lambda: grad.T @ x,
    }
    best = {library: dict.fromkeys(products, float("inf")) for library in SETTINGS}
    for _ in range(rounds + 1):  # the first round also plans
        for library, setting in SETTINGS.items():
            torch.set_float32_matmul_precision(setting)
            for name, product in products.items():
                start = time.perf_counter()
                product()
                best[library][name] = min(best[library][name], time.perf_counter() - start)
    flops = 2 * TOKENS * inputs * outputs
    row: dict[str, Any] = {"inputs": inputs, "outputs": outputs}
    for library, seconds in best.items():
        row[library] = {name: round(flops / second / 1e9, 1) for name, second in seconds.items()}
    torch.set_float32_matmul_precision(SETTINGS["oneDNN"])
    exact = x.double() @ weight.T.double()
    row["error"] = float(((x @ weight.T) - exact).abs().max() / exact.abs().max())
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    if min(options.threads, options.rounds) < 1:
        parser.error("--threads and --rounds: give 1 or more")
    torch.set_num_threads(options.threads)
    for inputs, outputs in layers():
        print(json.dumps(rates(inputs, outputs, options.rounds)), flush=True)


if __name__ == "__main__":
    main()
