"""Tokens per second of `small`, side by side with plain PyTorch loops over transformers' Llama.

    python bench/throughput.py [--device cpu|cuda] [--rounds 6] [--precision bf16 fp32]
                               [--case one replicate zero3]

Both sides live in the same processes and take turns, a few steps each, so that a machine whose speed drifts
slows both: what counts is the ratio. Model and step: 8 layers, hidden 512, ffn 1408, 8 heads, 4 kv heads,
vocabulary 8192; 8 sequences of 512 random tokens a step, AdamW (fused), gradient norm clipped at 1.0. `one`
is one process with all threads; the others are two processes that share them. One JSON object a line, speeds
in tokens per second, with the machine's matmul rate just before:

    {"case", "precision", "baseline", "ours", "theirs", "ratio", "matmul_gflops"}

Baselines: eager loops as a user writes them, SDPA attention, DDP or FSDP2; for bf16 both autocast over fp32
weights and weights held in bf16; for fp32 both PyTorch's default matmul setting and the one that we choose.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from meshwright.comm.mesh import build_mesh
from meshwright.data.corpus import open_corpus
from meshwright.data.loader import Batch, Loader
from meshwright.parallel.precision import DTYPES, use_fast_fp32_matmul
from meshwright.spec import RunSpec, load
from meshwright.train.matmul_peak import matmul_flops_per_second
from meshwright.train.step import Trainer
from world import join

SEQ_LEN, SEQUENCES = 512, 8
CASES = {"one": (1, 0), "replicate": (2, 0), "zero3": (2, 3)}
"""(processes, ZeRO stage)"""

Step = Callable[[Batch], None]


def small_run(**flags: object) -> RunSpec:
    """`small` as every side trains it, with `flags` laid over: keys with dots as double underscores."""
    given = {
        "model.preset": "small",
        "data.corpus": "synthetic",
        "data.seq_len": SEQ_LEN,
        "data.document_mask": "false",  # the baselines' attention is plain causal
        "train.batch_tokens": SEQ_LEN * SEQUENCES,
        "train.steps": 10**6,
    }
    given |= {key.replace("__", "."): value for key, value in flags.items()}
    return load(None, [(key, str(value)) for key, value in given.items()])


def our_spec(case: str, precision: str) -> RunSpec:
    processes, zero = CASES[case]
    return small_run(
        layout__dp=processes,
        layout__zero=zero,
        layout__micro_batch=SEQUENCES // processes,
        precision__compute=precision,
    )


def baselines(case: str, precision: str) -> list[str]:
    if precision == "fp32":
        return ["default matmul", "our matmul setting"]
    return ["FSDP2 mixed precision"] if case == "zero3" else ["autocast", "bf16 weights"]


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        attn_implementation="sdpa",
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def their_step(name: str, case: str, precision: str, device: torch.device) -> Step:
    """A plain training loop's body: forward with labels, backward, clip, AdamW."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    torch.manual_seed(0)
    model = llama().to(device)
    if name == "bf16 weights":
        model = model.to(torch.bfloat16)
    if case == "zero3":
        policy = (
            MixedPrecisionPolicy(torch.bfloat16, torch.float32)
            if precision == "bf16"
            else MixedPrecisionPolicy()
        )
        for layer in [*model.model.layers, model]:
            if device.type == "cpu":
                fully_shard(layer, mesh=mesh, mp_policy=policy).set_force_sum_reduction_for_comms(True)
            else:
                fully_shard(layer, mesh=mesh, mp_policy=policy)
    elif case == "replicate":
        model = nn.parallel.DistributedDataParallel(model, process_group=mesh.get_group())
    optimiser = torch.optim.AdamW(
        model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    casting = torch.autocast(device.type, torch.bfloat16) if name == "autocast" else nullcontext()

    def step(batch: Batch) -> None:
        tokens: Tensor = batch.tokens.to(device)
        with casting:
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad()
        float(loss)

    return step


def timed(step: Step, batches: list[Batch], device: torch.device) -> float:
    """Seconds a step."""
    dist.barrier()
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    for batch in batches:
        step(batch)
    if device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()
    return (time.perf_counter() - start) / len(batches)


def measure(case: str, precision: str, device: torch.device, rounds: int, steps: int) -> None:
    spec = our_spec(case, precision)
    mesh = build_mesh(spec.layout, device)
    assert mesh is not None
    trainer = Trainer(spec, mesh)
    trainer.initialise()
    loader = Loader(open_corpus(spec), spec, mesh.data_rank, spec.layout.data_ranks)
    batches = [loader.step(i) for i in range(steps)]
    loader.close()
    default = torch.get_float32_matmul_precision()
    use_fast_fp32_matmul(device)
    ours_setting = torch.get_float32_matmul_precision()

    def ours(batch: Batch) -> None:
        trainer.step(batch, 1)

    for name in baselines(case, precision):
        setting = default if name == "default matmul" else ours_setting
        torch.set_float32_matmul_precision(ours_setting)
        gflops = matmul_flops_per_second(DTYPES[precision], device) / 1e9 * mesh.control.size
        theirs = their_step(name, case, precision, device)
        seconds: dict[str, list[float]] = {"ours": [], "theirs": []}
        for turn in range(rounds + 1):
            torch.set_float32_matmul_precision(ours_setting)
            mine = timed(ours, batches, device)
            torch.set_float32_matmul_precision(setting)
            other = timed(theirs, batches, device)
            if turn:  # the first is warm-up
                seconds["ours"].append(mine)
                seconds["theirs"].append(other)
        torch.set_float32_matmul_precision(default)
        speed = {side: SEQ_LEN * SEQUENCES / statistics.median(times) for side, times in seconds.items()}
        row: dict[str, Any] = {
            "case": case,
            "precision": precision,
            "baseline": name,
            "ours": round(speed["ours"], 1),
            "theirs": round(speed["theirs"], 1),
            "ratio": round(speed["ours"] / speed["theirs"], 3),
            "matmul_gflops": round(gflops, 1),
        }
        if mesh.control.rank == 0:
            print(json.dumps(row), flush=True)


def rank_main(rank: int, processes: int, store: str, case: str, options: argparse.Namespace) -> None:
    threads = max(1, len(os.sched_getaffinity(0)) // processes)
    torch.set_num_threads(threads)
    device = join(options.device, store, rank, processes)
    for precision in options.precision:
        measure(case, precision, device, options.rounds, options.steps)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--case", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--precision", nargs="+", choices=["bf16", "fp32"], default=["bf16", "fp32"])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=2, help="steps of a turn")
    options = parser.parse_args()
    for case in options.case:
        processes, _ = CASES[case]
        if options.device == "cuda" and processes > torch.cuda.device_count():
            continue
        with TemporaryDirectory() as folder:
            arguments = (processes, f"{folder}/store", case, options)
            mp.spawn(rank_main, args=arguments, nprocs=processes)


if __name__ == "__main__":
    main()
