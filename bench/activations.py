"""Activations of one rank, against the formulas of Korthikanti et al. 2022.

    python bench/activations.py [--ranks 4] [--layers 8] [--hidden 1024]

A GPT model as in that paper: LayerNorm, GELU, a key-value head for each head, four times the hidden size
inside. For N tokens of D channels in 16 bits, on t ranks, its table 2 gives for a layer

    tensor                                    N D (10 + 24 / t + 5 a s / (D t))
    tensor + sequence                         N D (34 / t + 5 a s / (D t))
    tensor + sequence, selective              N D 34 / t
    full                                      N D 2

Masks of dropout take 2 N D of the 10 (a layer here has none), and attention's scores the 5 a s / D, which are
never kept here (Dao et al. 2022): what that paper's selective recomputation does, every row here does. So

    tensor                                    N D (8 + 24 / t)
    tensor + sequence                         N D 32 / t
    tensor + sequence, selective              N D 20 / t     norms and GELU are computed again
    full                                      N D 2 / t      tokens are shared, so a layer's input is too

One JSON object a line: bytes that a layer keeps by these formulas; bytes kept between forward and backward of
a microbatch and the most at any time, by the planner's formula (embedding, head and temporaries in it) and
measured. Exit code 1 where a measured one is off by more than 5%.
"""

from __future__ import annotations

import argparse
import json
import sys
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from allocations import measure
from meshwright.comm.mesh import build_mesh
from meshwright.planner.activations import activations
from meshwright.spec import RunSpec, load

TOLERANCE = 0.05
CASES = {
    "tensor": ("none", False, lambda t: 8 + 24 / t),
    "tensor + sequence": ("none", True, lambda t: 32 / t),
    "tensor + sequence, selective": ("selective", True, lambda t: 20 / t),
    "full": ("full", True, lambda t: 2 / t),
}


def spec_of(policy: str, sequence: bool, options: argparse.Namespace) -> RunSpec:
    hidden, length, sequences = options.hidden, 512, 8
    flags = {
        "model.family": "gpt2", "model.norm": "layernorm", "model.activation": "gelu_tanh",
        "model.position": "learned", "model.layers": options.layers, "model.hidden": hidden,
        "model.heads": hidden // 64, "model.kv_heads": hidden // 64, "model.ffn": 4 * hidden,
        "model.vocab_size": 8192, "model.max_seq_len": length, "data.corpus": "synthetic",
        "data.seq_len": length, "train.batch_tokens": 2 * length * sequences, "layout.micro_batch": sequences,
        "layout.tp": options.ranks, "layout.sequence_parallel": sequence, "recompute.policy": policy,
        "precision.compute": "bf16",
    }  # fmt: skip
    return load(None, [(key, str(value).lower()) for key, value in flags.items()])


def worker(rank: int, options: argparse.Namespace, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=options.ranks)
    failed = False
    for case, (policy, sequence, per_token) in CASES.items():
        spec = spec_of(policy, sequence, options)
        mesh = build_mesh(spec.layout, torch.device("cpu"), spec.model.kv_heads)
        assert mesh is not None
        kept, peak = measure(mesh, spec)
        expected = activations(spec)
        tokens = spec.micro_batch * spec.data.seq_len
        row = {"case": case, "ranks": options.ranks, "layers": options.layers, "hidden": options.hidden}
        row["layer_formula"] = round(tokens * options.hidden * per_token(options.ranks))
        row["layer_planned"] = expected.by_block[0]
        row |= {"kept_planned": expected.kept, "kept": kept, "kept_off": round(kept / expected.kept - 1, 4)}
        row |= {"peak_planned": expected.peak, "peak": peak, "peak_off": round(peak / expected.peak - 1, 4)}
        off = [
            expected.by_block[0] / row["layer_formula"] - 1,
            kept / expected.kept - 1,
            peak / expected.peak - 1,
        ]
        failed |= max(abs(x) for x in off) > TOLERANCE
        if rank == 0:
            print(json.dumps(row), flush=True)
    dist.destroy_process_group()
    if failed:
        sys.exit(1)


def main() -> None:
    parser = argparse.ArgumentParser(description="Activations of a tensor rank, against the formulas")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=1024)
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        mp.spawn(worker, args=(options, f"{folder}/store"), nprocs=options.ranks)


if __name__ == "__main__":
    main()
