"""torchtitan's Llama 3.1 8B on eight ranks: a step on tensors without memory, as events that clocks follow.

Its own: the model, selective recomputation by operator, FSDP2 with bf16 products and fp32 sums, the loss,
clipping, and torch's fused AdamW, all of torchtitan 0.3.0. `torchtitan_llama.py` says what of it needs a GPU
and is replaced. The published runs are of December 2024: attention was SDPA's FlashAttention 2, which is
asked for here. With its compiler each block is compiled, and the loss; inductor's own programs are run
(`meshwright/fake_cuda/inductor.py`).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.attention import SDPBackend

from meshwright.dryrun.clocks import StepClocks, follow
from meshwright.dryrun.events import Event
from meshwright.dryrun.fake_world import fake_world
from meshwright.dryrun.kernel_seconds import EventSeconds
from meshwright.dryrun.memory_tracker import FakeMemory
from meshwright.dryrun.timeline import kind_of
from meshwright.dryrun.trace import Trace
from meshwright.fake_cuda.inductor import compiled_code
from meshwright.fake_cuda.runtime import DEFAULT_STREAM, RUNTIME
from meshwright.hardware.cluster import Cluster
from meshwright.hardware.find import cluster
from torchtitan_llama import pretend

RANKS, BATCH, LENGTH = 8, 2, 8192
PUBLISHED = {"eager": 5762.0, "compiled": 6667.0}
"""Tokens a second and GPU. Source: torchtitan, benchmarks/llama3_h100_202412_torchtitan.md."""
LIMITED = {
    "matmul": 0.50, "attention": 0.33, "attention_backward": 0.27, "attention_ported": 1.0, "power": 0.0,
    "reference_power": 0.0,
}  # fmt: skip
"""Rates of an H100 that is limited to 500 W: shares of the peak at 700 W in products and in FlashAttention 2.
Source: assumed."""
_OPERATIONS = {
    "c10d::_allgather_base_": "all_gather",
    "c10d::_reduce_scatter_base_": "reduce_scatter",
    "c10d::allreduce_": "all_reduce",
}


class BlockingTrace(Trace):
    """A trace of a program whose collectives let the stream wait that they are called on, as FSDP2's do."""

    def on_operator(self, func: Any, args: Any, kwargs: Any, result: Any, module: str) -> None:
        super().on_operator(func, args, kwargs, result, module)
        if func.namespace == "c10d":
            operation = _OPERATIONS[func.name()]
            whole = max(x.numel() * x.element_size() for x in torch.utils._pytree.tree_leaves(args[:2])
                        if isinstance(x, torch.Tensor))  # fmt: skip
            sent = whole * (RANKS - 1) / RANKS * (2 if operation == "all_reduce" else 1)
            self.waited(self.started("fsdp", operation, sent))


class LocalMemory(FakeMemory):
    """Fakes the device for the local tensors that operators on DTensors come down to."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented
        return super().__torch_dispatch__(func, types, args, kwargs)


def figures(name: str, row: str) -> dict[str, Any]:
    """Figures of the step by the clocks of a cluster of `RANKS` devices, at its rates and at `LIMITED`.

    `row` is one of `PUBLISHED`.
    """
    started, published = time.perf_counter(), PUBLISHED[row]
    events = trace_of_step(row == "compiled")
    known = cluster(name, RANKS)
    limited = replace(known, device=replace(known.device, rates=replace(known.device.rates, **LIMITED)))
    launched = [event for event in events if event.kind in ("kernel", "copy")]
    return {
        "cluster": name,
        "published": published,
        "launches": len(launched),
        "launches of compiled code": sum(event.name.startswith("compiled::") for event in launched),
        "traced_in_seconds": round(time.perf_counter() - started, 1),
        "by the catalogue": timed(events, known, published),
        "by the limited card": timed(events, limited, published),
    }


def timed(events: Sequence[Event], devices: Cluster, published: float) -> dict[str, Any]:
    """Tokens a second and GPU, beside the published ones, and where the seconds of the step go."""
    seconds = EventSeconds(devices)
    clocks = StepClocks(events, seconds.device, seconds.host)
    follow([clocks])
    kinds: Counter[str] = Counter()
    for start, end, event in clocks.streams[DEFAULT_STREAM].spans:
        kinds[kind_of(event)] += end - start
    for idle in clocks.streams[DEFAULT_STREAM].idle:
        kinds[f"waits for {idle.reason}"] += idle.end - idle.start
    rate = BATCH * LENGTH / clocks.seconds
    return {
        "tokens_per_second_per_gpu": round(rate, 1),
        "ratio": round(rate / published, 3),
        "step_seconds": round(clocks.seconds, 4),
        "seconds_by_kind": {kind: round(value, 4) for kind, value in kinds.most_common()},
    }


def trace_of_step(compiled: bool) -> Sequence[Event]:
    """The events of a step of rank 0, after a first one that makes the optimiser's state."""
    pretend("cuda")
    from torchtitan.components.loss import cross_entropy_loss
    from torchtitan.distributed.utils import clip_grad_norm_

    device = torch.device("cuda", 0)
    trace = BlockingTrace(device)
    memory = LocalMemory(device, observer=trace)
    compiler = compiled_code(memory.launched) if compiled else nullcontext()
    loss_of = torch.compile(cross_entropy_loss) if compiled else cross_entropy_loss
    with fake_world(RANKS, 0), RUNTIME.observed(trace), compiler, memory:
        model = parallel_model(compiled)
        model.to_empty(device=device)
        adamw = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
        tokens = torch.zeros(BATCH, LENGTH + 1, dtype=torch.int64, device=device)
        for _ in range(2):
            trace.events.clear()
            logits = model(tokens[:, :-1])
            loss = loss_of(logits, tokens[:, 1:], global_vocab_size=logits.shape[-1])
            del logits
            (loss / (RANKS * BATCH * LENGTH)).backward()
            clip_grad_norm_(list(model.parameters()), 1.0, foreach=True)
            adamw.step()
            adamw.zero_grad()
    return trace.events


def parallel_model(compiled: bool) -> nn.Module:
    """Llama 3.1 8B without memory, recomputed by operator and sharded over all ranks."""
    from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
    from torchtitan.distributed import ParallelDims
    from torchtitan.distributed import utils as distributed
    from torchtitan.distributed.activation_checkpoint import SelectiveAC
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3 import llama3_configs, parallelize_llama
    from torchtitan.trainer import Trainer

    ScaledDotProductAttention.sdpa_backends = [SDPBackend.FLASH_ATTENTION]
    parallelism = ParallelismConfig(data_parallel_shard_degree=RANKS, spmd_backend="partial_dtensor")
    training = TrainingConfig(seq_len=LENGTH, mixed_precision_param="bfloat16", disable_cuda_graphs=True)
    dims = ParallelDims.from_config(parallelism, RANKS)
    distributed.set_spmd_backend(parallelism.spmd_backend)
    dims.build_mesh()
    config = llama3_configs["8B"](attn_backend="varlen")
    for layer in config.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config.update_from_config(config=Trainer.Config(parallelism=parallelism, training=training))
    with torch.device("meta"):
        model = config.build()
    return parallelize_llama(
        model,
        parallel_dims=dims,
        training=training,
        parallelism=parallelism,
        compile_config=CompileConfig(enable=compiled),
        ac_config=SelectiveAC.Config(),
        dump_folder="",
    ).train()
