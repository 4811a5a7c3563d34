"""The part that all peers' programs share: their job, their world, the clock of their steps, what ranks hold.

A peer's program runs in a venv of its own, without Meshwright, and gets the path of a job as its argument: a
JSON object with the fields of `Job`. `run` trains the steps, and rank 0 writes one JSON object a line:

    {"seconds", "loss"} for each step, and at the end {"held": [...], "note"}

`held` is what each rank stored after the last step, in numbers of elements and in bytes: what a layout's name
promises is seen there.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import Tensor, nn

LR, BETAS, WEIGHT_DECAY, CLIP = 3e-4, (0.9, 0.95), 0.1, 1.0
"""AdamW and clipping of every side."""


@dataclass(frozen=True)
class Job:
    """A run that every side trains."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    vocab_size: int
    moe: dict[str, Any] | None
    seq_len: int
    tokens: str
    """A .npy file, int64 (steps, sequences, seq_len + 1); the last one of each row is the last target."""
    steps: int
    precision: str
    """bf16 or fp32."""
    layout: str
    """one, replicate, zero3, tp2 or pp2."""
    micro_batch: int
    """Sequences of a microbatch."""
    variant: str
    """Which of a program's ways to train."""


def job() -> Job:
    """The job that the command names."""
    return Job(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))


def world(alone: bool = False) -> tuple[int, int]:
    """Rank and number of ranks; joins gloo's world where torchrun has started several.

    With `alone` one process joins a world, too, for programs that expect one.
    """
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1 and not dist.is_initialized():
        dist.init_process_group("gloo")
    elif alone and ranks == 1:
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group("gloo", rank=0, world_size=1, store=store)
    return (dist.get_rank() if ranks > 1 else 0), ranks


def settings(given: Job) -> None:
    """Threads and torch's setting for fp32 products, for every program."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    torch.set_float32_matmul_precision("medium")  # as we do where it keeps fp32's precision
    torch.manual_seed(0)


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.AdamW:
    """torch's fused AdamW."""
    return torch.optim.AdamW(parameters, lr=LR, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True)


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that this rank stores."""
    found: Tensor = getattr(tensor, "_local_tensor", tensor)
    return found


def held(model: nn.Module, optimiser: Any = None) -> dict[str, Any]:
    """Elements, bytes and number formats that this rank stores of parameters and of optimiser states."""
    parameters = [local(each) for each in model.parameters()]
    states: list[Tensor] = []
    if optimiser is not None:
        states = [
            local(value)
            for state in optimiser.state.values()
            for value in state.values()
            if isinstance(value, Tensor) and value.numel() > 1
        ]
    return {
        name: {
            "elements": sum(each.numel() for each in listed),
            "bytes": sum(each.numel() * each.element_size() for each in listed),
            "types": sorted({str(each.dtype).removeprefix("torch.") for each in listed}),
        }
        for name, listed in (("parameters", parameters), ("states", states))
    }


def run(
    given: Job, step: Callable[[Tensor], float], holds: Callable[[], dict[str, Any]], note: str = ""
) -> None:
    """Train the job's steps, each on the whole batch's tokens (sequences, seq_len + 1), and time them.

    `step` takes its rank's part by itself, and returns the loss.
    """
    rank, ranks = world()
    batches = torch.from_numpy(numpy.load(given.tokens))
    for number in range(given.steps):
        if ranks > 1:
            dist.barrier()
        start = time.perf_counter()
        loss = step(batches[number % len(batches)])
        if ranks > 1:
            dist.barrier()
        if rank == 0:
            print(json.dumps({"seconds": time.perf_counter() - start, "loss": loss}), flush=True)
    mine: list[Any] = [holds()]
    if ranks > 1:
        mine = [None] * ranks
        dist.all_gather_object(mine, holds())
    if rank == 0:
        print(json.dumps({"held": mine, "note": note}), flush=True)
    if ranks > 1:
        dist.barrier()
        os._exit(0)  # gloo's threads may hang as the interpreter ends: seen with DDP


def share(tokens: Tensor) -> Tensor:
    """This rank's part of the sequences, for ranks that divide them."""
    rank, ranks = world()
    return tokens.chunk(ranks)[rank]
