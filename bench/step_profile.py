"""Where a training step's time goes, in percent, beside the rate of matrix products.

    python bench/step_profile.py [--model small] [--precision bf16] [--threads 2] [--steps 5]
                                 [--keys layout.micro_batch=4 ...]

One process trains on synthetic tokens (8 sequences of 512, no document mask). The time of a step is the
median of steps without the profiler; the shares are self times of operators under it, by what they belong
to. What is left is Python and the profiler itself. `matmul_fraction` is the model's FLOP/s over the rate of
products measured just before. One JSON object:

    {"model", "precision", "threads", "step_seconds", "tokens_per_second", "matmul_gflops", "matmul_fraction",
     "shares": {...}}
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from meshwright.comm.mesh import build_mesh
from meshwright.data.corpus import open_corpus
from meshwright.data.loader import Loader
from meshwright.kernels.half_precision_products import products_in_fp32
from meshwright.parallel.precision import DTYPES, use_fast_fp32_matmul
from meshwright.rank.env import keep_freed_memory
from meshwright.train.matmul_peak import matmul_flops_per_second
from meshwright.train.step import Trainer
from throughput import SEQ_LEN, SEQUENCES, small_run
from world import join

INSIDE = (
    ("blocked_attention", "attention"),
    ("LinearCrossEntropy", "loss"),
    ("RmsNorm", "norms"),
    ("Optimizer.step", "optimiser"),
    ("AccumulateGrad", "gradients added up"),
)
"""A part of an operator's name, or of one that it is called by, and what both belong to."""
OWN = {
    "aten::mm": "products",
    "aten::addmm": "products",
    "aten::silu": "activation",
    "aten::silu_backward": "activation",
    "aten::_fused_adamw_": "optimiser",
    "aten::linalg_vector_norm": "gradient norm",
    "aten::copy_": "copies and casts",
    "aten::fill_": "copies and casts",
    "aten::zero_": "copies and casts",
    "aten::embedding_dense_backward": "embedding",
    "aten::index_select": "embedding",
}
"""The groups of other operators."""


def belongs_to(event: Any) -> str:
    """The group of an operator of a profile."""
    names, above = [event.name], event.cpu_parent
    while above is not None:
        names.append(above.name)
        above = above.cpu_parent
    for part, group in INSIDE:
        if any(part in name for name in names):
            head = group == "loss" and OWN.get(event.name) == "products"
            return "products of the head" if head else group
    return OWN.get(event.name, "other elementwise")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """The figures of a step."""
    cpu = torch.device("cpu")
    keys = {
        "model__preset": options.model,
        "precision__compute": options.precision,
        "layout__micro_batch": SEQUENCES,
    }
    keys |= {
        key.replace(".", "__"): value for key, _, value in (each.partition("=") for each in options.keys)
    }
    spec = small_run(**keys)
    mesh = build_mesh(spec.layout, cpu, spec.model.kv_heads)
    assert mesh is not None
    trainer = Trainer(spec, mesh)
    trainer.initialise()
    loader = Loader(open_corpus(spec), spec, 0, 1)
    batches = [loader.step(number) for number in range(options.steps + 2)]
    loader.close()
    rate = matmul_flops_per_second(DTYPES[options.precision], cpu, 2.0)
    seconds = []
    for number, batch in enumerate(batches, 1):
        start = time.perf_counter()
        trainer.step(batch, number)
        seconds.append(time.perf_counter() - start)
    step = statistics.median(seconds[2:])
    with profile(activities=[ProfilerActivity.CPU]):  # a first one's preparations count as an operator's
        trainer.step(batches[0], len(batches) + 1)
    shares: Counter[str] = Counter()
    start = time.perf_counter()
    with profile(activities=[ProfilerActivity.CPU]) as found:
        for batch in batches[: options.steps]:
            trainer.step(batch, len(batches) + 2)
    whole = 1e6 * (time.perf_counter() - start)
    for event in found.events():
        shares[belongs_to(event)] += event.self_cpu_time_total / whole
    shares["Python and the rest"] = 1 - sum(shares.values())
    tokens = SEQ_LEN * SEQUENCES
    fraction = spec.model.flops_per_token(SEQ_LEN) * tokens / step / rate
    return {
        "model": options.model,
        "precision": options.precision,
        "threads": options.threads,
        "step_seconds": round(step, 4),
        "tokens_per_second": round(tokens / step),
        "matmul_gflops": round(rate / 1e9),
        "matmul_fraction": round(fraction, 3),
        "shares": {name: round(100 * share, 1) for name, share in shares.most_common()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="small")
    parser.add_argument("--precision", choices=["bf16", "fp32"], default="bf16")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--keys", nargs="*", default=[], help="further keys: layout.micro_batch=4")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    keep_freed_memory()
    use_fast_fp32_matmul(torch.device("cpu"))
    with TemporaryDirectory() as folder:
        join("cpu", str(Path(folder) / "store"), 0, 1)
        with products_in_fp32(torch.device("cpu"), DTYPES[options.precision]):
            print(json.dumps(measure(options)), flush=True)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
