"""Tokens per second of `moe-small` over two expert ranks, side by side with loops and with transformers.

    python bench/experts.py [--device cpu|cuda] [--rounds 6] [--precision bf16] [--baseline loop]

Two processes train the same model: 8 layers, hidden 512, 16 experts of 512 channels of which a token takes 2,
384 shared channels, vocabulary 8192; 8 sequences of 512 random tokens a step, AdamW (fused), gradient norm
clipped at 1.0. Sides take turns, a few steps each, so that a machine whose speed drifts slows all: what
counts is the ratio. One JSON object a line, speeds in tokens per second, with the machine's matmul rate just
before, and ours with experts over both ranks (layout.dp = 2, layout.ep = 2, layout.zero = 1):

    {"precision", "baseline", "ours", "theirs", "ratio", "matmul_gflops"}

Baselines: `loop`, our decoder and data parallelism with a loop over all experts on both ranks, each picking
its tokens and adding its results in place; and transformers' Qwen2-MoE (the family with these shared
experts) under FSDP2 with mixed precision, with each of its implementations of experts.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Callable
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from meshwright.comm.mesh import build_mesh
from meshwright.comm.process_groups import Groups
from meshwright.data.corpus import open_corpus
from meshwright.data.loader import Batch, Loader
from meshwright.model.moe import Moe
from meshwright.parallel.precision import DTYPES, use_fast_fp32_matmul
from meshwright.spec import RunSpec
from meshwright.train.matmul_peak import matmul_flops_per_second
from meshwright.train.step import Trainer
from throughput import SEQ_LEN, SEQUENCES, Step, small_run, timed
from world import join

BASELINES = ("loop", "transformers eager", "transformers grouped_mm")


def our_spec(precision: str, ep: int) -> RunSpec:
    return small_run(
        model__preset="moe-small",
        layout__dp=2,
        layout__ep=ep,
        layout__zero=1,
        layout__micro_batch=SEQUENCES // 2,
        precision__compute=precision,
    )


class Loop(nn.Module):
    """The routed experts as they are often written: a loop that picks rows and adds results."""

    def __init__(self, mixture: Moe) -> None:
        super().__init__()
        self.router, self.experts, self.shared = mixture.router, mixture.experts, mixture.shared
        self._admit = partial(mixture.hooks.admit, mixture.moe, mixture.layer)

    def forward(self, x_BTD: Tensor) -> Tensor:
        x = x_BTD.flatten(0, 1)
        routing = self.router(x)
        weights, _ = self._admit(routing, len(x_BTD))
        found = torch.zeros_like(x)
        for expert in range(len(self.experts.gate)):
            token, choice = torch.where(routing.experts == expert)
            rows = x[token]
            inner = F.silu(rows @ self.experts.gate[expert].T) * (rows @ self.experts.up[expert].T)
            out = inner @ self.experts.down[expert].T
            found.index_add_(0, token, (out * weights[token, choice, None]).to(x.dtype))
        return found.view_as(x_BTD) + self.shared(x_BTD)


def ours(spec: RunSpec, device: torch.device, groups: Groups, loop: bool) -> tuple[Step, list[Batch]]:
    mesh = build_mesh(spec.layout, device, spec.model.kv_heads, groups)
    assert mesh is not None
    trainer = Trainer(spec, mesh)
    trainer.initialise()
    if loop:
        for _, mixture in trainer.decoder.each_mixture():
            mixture.forward = Loop(mixture).forward
    loader = Loader(open_corpus(spec), spec, mesh.data_rank, spec.layout.data_ranks)
    batches = [loader.step(i) for i in range(2)]
    loader.close()

    def step(batch: Batch) -> None:
        trainer.step(batch, 1)

    return step, batches


def theirs(implementation: str, spec: RunSpec, device: torch.device) -> Step:
    """A plain training loop's body over Qwen2-MoE: forward with labels, backward, clip, AdamW."""
    from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

    torch.manual_seed(0)
    model, moe = spec.model, spec.model.moe
    assert moe is not None
    config = Qwen2MoeConfig(
        vocab_size=model.vocab_size, hidden_size=model.hidden, num_hidden_layers=model.layers,
        num_attention_heads=model.heads, num_key_value_heads=model.kv_heads, num_experts=moe.experts,
        num_experts_per_tok=moe.top_k, moe_intermediate_size=moe.ffn, decoder_sparse_step=1,
        shared_expert_intermediate_size=moe.shared_ffn, norm_topk_prob=True, output_router_logits=True,
        router_aux_loss_coef=moe.aux_loss, use_cache=False, attn_implementation="sdpa",
        experts_implementation=implementation,
    )  # fmt: skip
    net = Qwen2MoeForCausalLM(config).to(device)
    bf16 = spec.precision.compute == "bf16"
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if bf16 else MixedPrecisionPolicy()
    for layer in [*net.model.layers, net]:
        sharded = fully_shard(layer, mesh=mesh, mp_policy=policy)
        if device.type == "cpu":
            sharded.set_force_sum_reduction_for_comms(True)
    adam = torch.optim.AdamW(net.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def step(batch: Batch) -> None:
        tokens = batch.tokens.to(device)
        loss = net(input_ids=tokens, labels=tokens).loss
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        adam.step()
        adam.zero_grad()
        float(loss.detach())

    return step


def measure(precision: str, device: torch.device, rounds: int, baselines: list[str]) -> None:
    groups, spec = Groups(device.type), our_spec(precision, ep=2)
    use_fast_fp32_matmul(device)
    mine, batches = ours(spec, device, groups, loop=False)
    for baseline in baselines:
        gflops = matmul_flops_per_second(DTYPES[precision], device) / 1e9 * 2
        other: Callable[[Batch], None]
        if baseline == "loop":
            other, _ = ours(our_spec(precision, ep=1), device, groups, loop=True)
        else:
            other = theirs(baseline.split()[1], spec, device)
        seconds: dict[str, list[float]] = {"ours": [], "theirs": []}
        for turn in range(rounds + 1):
            for side, step in (("ours", mine), ("theirs", other)):
                took = timed(step, batches, device)
                if turn:  # the first is warm-up
                    seconds[side].append(took)
        speed = {side: SEQ_LEN * SEQUENCES / statistics.median(times) for side, times in seconds.items()}
        row: dict[str, Any] = {
            "precision": precision,
            "baseline": baseline,
            "ours": round(speed["ours"], 1),
            "theirs": round(speed["theirs"], 1),
            "ratio": round(speed["ours"] / speed["theirs"], 3),
            "matmul_gflops": round(gflops, 1),
        }
        if dist.get_rank() == 0:
            print(json.dumps(row), flush=True)


def rank_main(rank: int, store: str, options: argparse.Namespace) -> None:
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // 2))
    device = join(options.device, store, rank, 2)
    for precision in options.precision:
        measure(precision, device, options.rounds, options.baseline)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--precision", nargs="+", choices=["bf16", "fp32"], default=["bf16"])
    parser.add_argument("--baseline", nargs="+", choices=BASELINES, default=list(BASELINES))
    parser.add_argument("--rounds", type=int, default=6)
    options = parser.parse_args()
    if options.device == "cuda" and torch.cuda.device_count() < 2:
        raise SystemExit("two processes need two GPUs; run with --device cpu")
    with TemporaryDirectory() as folder:
        mp.spawn(rank_main, args=(f"{folder}/store", options), nprocs=2)


if __name__ == "__main__":
    main()
