"""Tokens per second of `small` under tensor parallelism, beside DTensor and Megatron-Core.

    python bench/tensor.py [--rounds 6] [--steps 2] [--megatron-python /tmp/megatron-venv/bin/python]

Two processes of one thread each on a CPU, tp=2 with sequence sharding, bf16; shapes, step and conventions are
those of `throughput.py`. The sides take turns of a few steps. One JSON object a line for each baseline, all
from the same turns:

    {"case": "tp2", "precision", "baseline", "ours", "theirs", "ratio", "matmul_gflops"}

Baselines   DTensor: transformers' Llama (SDPA) under torch's `parallelize_module`, with the plan of torch's
            tensor-parallel tutorial: column- and row-parallel maps, embedding and head split by vocabulary,
            sequence-parallel norms, `loss_parallel`. With weights in bf16, and in fp32 under autocast.
            LlamaModel's own forward takes positions and mask from the embedding's output, which here has only
            this rank's tokens, so the bench calls its parts in turn.
            Megatron-Core: `megatron_side.py`, one subprocess a rank, from a venv of its own:

    python -m venv /tmp/megatron-venv
    /tmp/megatron-venv/bin/pip install torch==2.13.0 numpy packaging einops setuptools
    /tmp/megatron-venv/bin/pip install --no-deps megatron-core==0.16.1

            It waits at a pipe while others have the turn, as those do in a barrier while it has.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from meshwright.data.corpus import open_corpus
from meshwright.data.loader import Batch, Loader
from meshwright.parallel.mesh import Mesh, build_mesh
from meshwright.spec import RunSpec
from meshwright.train.matmul_peak import matmul_flops_per_second
from meshwright.train.step import Trainer
from throughput import SEQ_LEN, SEQUENCES, Step, llama, small_run, timed

RANKS = 2
CPU = torch.device("cpu")

Turn = Callable[[], float]
"""Train a few steps; the seconds that each took."""


def our_spec() -> RunSpec:
    return small_run(layout__tp=RANKS, layout__micro_batch=SEQUENCES, precision__compute="bf16")


def our_step(spec: RunSpec, mesh: Mesh) -> Step:
    trainer = Trainer(spec, mesh)
    trainer.initialise()

    def step(batch: Batch) -> None:
        trainer.step(batch, 1)

    return step


def split_llama(mesh: DeviceMesh, dtype: torch.dtype) -> nn.Module:
    """transformers' Llama, cut by the plan of torch's tutorial."""
    torch.manual_seed(0)
    model = llama().to(dtype)
    ends = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "model.norm": SequenceParallel(),
        "lm_head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    }
    layer = {
        "input_layernorm": SequenceParallel(),
        "self_attn": PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": Shard(1)},
            desired_input_kwarg_layouts={"hidden_states": Replicate()},
        ),
        "self_attn.q_proj": ColwiseParallel(),
        "self_attn.k_proj": ColwiseParallel(),
        "self_attn.v_proj": ColwiseParallel(),
        "self_attn.o_proj": RowwiseParallel(output_layouts=Shard(1)),
        "post_attention_layernorm": SequenceParallel(),
        "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        "mlp.gate_proj": ColwiseParallel(),
        "mlp.up_proj": ColwiseParallel(),
        "mlp.down_proj": RowwiseParallel(output_layouts=Shard(1)),
    }
    parallelize_module(model, mesh, ends)
    for block in model.model.layers:
        parallelize_module(block, mesh, layer)
    return model


def split_logits(model: nn.Module, tokens: Tensor) -> Tensor:
    """LlamaForCausalLM's forward; the logits are a DTensor, split by the vocabulary."""
    decoder = model.model
    x = decoder.embed_tokens(tokens)
    rotation = decoder.rotary_emb(x, position_ids=torch.arange(tokens.shape[1]).unsqueeze(0))
    for block in decoder.layers:
        x = block(x, position_embeddings=rotation)
    logits: Tensor = model.lm_head(decoder.norm(x))
    return logits


def dtensor_step(mesh: DeviceMesh, autocast: bool) -> Step:
    """A plain training loop's body: forward, loss over the split vocabulary, backward, clip, AdamW."""
    model = split_llama(mesh, torch.float32 if autocast else torch.bfloat16)
    optimiser = torch.optim.AdamW(
        model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )

    def step(batch: Batch) -> None:
        with loss_parallel():
            with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
                logits = split_logits(model, batch.tokens)
                loss = F.cross_entropy(logits.flatten(0, 1).float(), batch.targets.flatten())
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad()
        float(loss.detach())

    return step


class Megatron:
    """This rank's half of the Megatron-Core side: a subprocess at the other end of two pipes."""

    def __init__(self, python: str, rank: int, store: str) -> None:
        side = Path(__file__).with_name("megatron_side.py")
        place = [f"--rank={rank}", f"--ranks={RANKS}", f"--store={store}"]
        command = [python, "-W", "ignore", str(side), *place]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._line()

    def _line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"Megatron-Core's process ended with status {self.process.wait()}")
        return line

    def turn(self, steps: int) -> float:
        assert self.process.stdin is not None
        dist.barrier()
        print(steps, file=self.process.stdin, flush=True)
        return float(self._line().split()[0])

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def sides(options: argparse.Namespace, store: str, rank: int, stack: ExitStack) -> dict[str, Turn]:
    """Every side's turn, ours first."""
    spec = our_spec()
    mesh = build_mesh(spec.layout, CPU, spec.model.kv_heads)
    assert mesh is not None
    loader = Loader(open_corpus(spec), spec, mesh.data_rank, spec.layout.data_ranks)
    batches = [loader.step(i) for i in range(options.steps)]
    loader.close()
    steps = {
        "ours": our_step(spec, mesh),
        "DTensor, bf16 weights": dtensor_step(mesh.storage["tp"], autocast=False),
        "DTensor, autocast": dtensor_step(mesh.storage["tp"], autocast=True),
    }
    turns: dict[str, Turn] = {name: partial(timed, step, batches, CPU) for name, step in steps.items()}
    if options.megatron_python:
        megatron = Megatron(options.megatron_python, rank, f"{store}.megatron")
        stack.callback(megatron.close)
        turns["Megatron-Core"] = partial(megatron.turn, options.steps)
    return turns


def rows(speed: dict[str, float], gflops: float) -> list[dict[str, object]]:
    return [
        {
            "case": f"tp{RANKS}",
            "precision": "bf16",
            "baseline": name,
            "ours": round(speed["ours"], 1),
            "theirs": round(theirs, 1),
            "ratio": round(speed["ours"] / theirs, 3),
            "matmul_gflops": round(gflops, 1),
        }
        for name, theirs in speed.items()
        if name != "ours"
    ]


def measure(options: argparse.Namespace, turns: dict[str, Turn], rank: int) -> None:
    seconds: dict[str, list[float]] = {name: [] for name in turns}
    for number in range(options.rounds + options.warmup):
        if number == options.warmup:
            gflops = matmul_flops_per_second(torch.bfloat16, CPU) / 1e9 * RANKS
        for name, turn in turns.items():
            taken = turn()
            if number >= options.warmup:
                seconds[name].append(taken)
    speed = {name: SEQ_LEN * SEQUENCES / statistics.median(times) for name, times in seconds.items()}
    if rank == 0:
        for row in rows(speed, gflops):
            print(json.dumps(row), flush=True)


def rank_main(rank: int, store: str, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    with ExitStack() as stack:
        measure(options, sides(options, store, rank, stack), rank)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--warmup", type=int, default=2, help="rounds that do not count")
    parser.add_argument("--steps", type=int, default=2, help="steps of a turn")
    parser.add_argument("--megatron-python", metavar="PYTHON", help="the interpreter of Megatron-Core's venv")
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        mp.spawn(rank_main, args=(f"{folder}/store", options), nprocs=RANKS)


if __name__ == "__main__":
    main()
