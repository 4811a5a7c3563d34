"""Training steps of a 1B- and of an 8B-class model, clocked, and their kernels.

On one GPU the 8B-class model has as many of its blocks as fit; on several its states are sharded (ZeRO-3).
Steps are clocked first, and some more are recorded by `torch.profiler`, whose own work would slow the clock.
Where the device is faked, the record is that of the faked device, and compiled blocks run as they are.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import cycle, islice, pairwise
from typing import Any, NamedTuple

import torch

from gpu_day import profiles, traces
from gpu_day.devices import Faked, cluster_here, device_here, world_of
from gpu_day.parts import MODELS
from gpu_day.results import Row, Work
from meshwright.data.corpus import open_corpus
from meshwright.data.loader import Batch, Loader
from meshwright.hardware.cluster import Cluster
from meshwright.planner.plan import estimate
from meshwright.spec import RunSpec, load
from meshwright.train.step import Trainer


class Length(NamedTuple):
    """Steps that warm up, that are clocked, and that are recorded."""

    warm_up: int
    clocked: int
    recorded: int


REAL, FAKED = Length(3, 20, 2), Length(1, 1, 1)
FAKED_LAYERS = 1
"""Blocks of a model where the device is faked."""
SEQ_LEN = 8192
MICRO_BATCH = {"1b": 2, "8b": 1}
MICROBATCHES = 2
ROOM = 0.85
"""Share of a device's memory that an estimate may take."""
LONGEST = 12
"""Kernels that are listed."""
RESERVE = 20.0
"""Seconds before the part's end from which on no further step is clocked, so that some can be recorded."""


def spec_of(
    model: str, compute: str, gpus: int, layers: int | None = None, compiled: bool = False
) -> RunSpec:
    """The run whose step is timed, with so many of the model's blocks."""
    batch = SEQ_LEN * MICRO_BATCH[model] * MICROBATCHES * gpus
    given: dict[str, object] = {
        "model.preset": MODELS[model],
        "data.corpus": "synthetic",
        "data.seq_len": SEQ_LEN,
        "data.document_mask": "false",
        "train.batch_tokens": batch,
        "train.steps": 10**6,
        "train.compile": str(compiled).lower(),
        "precision.compute": compute,
        "layout.dp": gpus,
        "layout.zero": 3 if gpus > 1 else 0,
        "layout.micro_batch": MICRO_BATCH[model],
    }
    if layers is not None:
        given["model.layers"] = layers
    return load(None, [(key, str(value)) for key, value in given.items()])


def layers_that_fit(model: str, compute: str, gpus: int, cluster: Cluster, memory: float) -> int:
    """Blocks of a model whose step takes `ROOM` of a device's memory or less, as the planner estimates."""
    layers = spec_of(model, compute, gpus).model.layers
    sized = cluster.resized(gpus)
    while layers > 1:
        needed = estimate(spec_of(model, compute, gpus, layers), sized).memory.device
        if needed <= ROOM * memory:
            break
        layers -= 1
    return layers


def run(work: Work) -> None:
    """A row with the rates of the step, its kernels and its operators."""
    device = device_here()
    model, compute, compiled = (work.options[key] for key in ("model", "compute", "compiled"))
    gpus = work.task.gpus
    cluster = cluster_here(device)
    layers = FAKED_LAYERS if work.faked else None
    if layers is None and cluster is not None:
        memory = torch.cuda.get_device_properties(device).total_memory
        layers = layers_that_fit(model, compute, gpus, cluster, memory)
    layers = layers or spec_of(model, compute, gpus).model.layers
    while True:
        spec = spec_of(model, compute, gpus, layers, compiled)
        told: Row = {"model": model, "compute": compute, "compiled": compiled, "gpus": gpus, "layers": layers}
        try:
            measure(work, told, spec, device, cluster)
            return
        except torch.OutOfMemoryError as error:
            if gpus > 1 or layers == 1:
                raise
            work.leave_out(f"{layers} blocks", str(error).splitlines()[0])
        layers = max(1, layers * 3 // 4)
        gc.collect()  # here the error is gone, which holds the tensors of its frames
        torch.cuda.empty_cache()


def measure(work: Work, told: Row, spec: RunSpec, device: torch.device, cluster: Cluster | None) -> None:
    """Add the row of a run's step: first what was clocked, and then its kernels."""
    length = FAKED if work.faked else REAL
    with stepper(work, spec, device) as (take, faked):
        began = time.perf_counter()
        for _ in range(length.warm_up):
            take()
        torch.cuda.synchronize(device)
        warm_up = time.perf_counter() - began
        torch.cuda.reset_peak_memory_stats(device)
        seconds = clocked(work, take, length.clocked)
        step = statistics.median(seconds)
        work.add(
            {
                **told,
                "microbatches": spec.microbatches,
                "micro_batch": spec.micro_batch,
                "steps": len(seconds),
                "warm_up_seconds": round(warm_up, 3),
                "step_seconds": round(step, 6),
                "slowest_step_seconds": round(max(seconds), 6),
                **rates(spec, step, cluster),
                "peak_memory_bytes": faked.memory.peak if faked else torch.cuda.max_memory_allocated(device),
            }
        )
        known = traces.operators(told["model"], told["compute"], told["gpus"])
        work.add_to_last(partial(profiled, take, faked, known, length.recorded))


def profiled(take: Any, faked: Faked | None, known: frozenset[str], steps: int) -> Row:
    """Fields of the kernels of further steps."""
    calls = recorded(take, faked, known, steps)
    if not calls:
        raise RuntimeError("torch.profiler recorded no kernel")
    total = sum(call.seconds for call in calls)
    longest = profiles.longest(calls, LONGEST)
    return {
        "recorded_steps": steps,
        "kernels_a_step": round(len(calls) / steps, 1),
        "kernel_seconds": round(total / steps, 6),
        "kernels": [row | {"share": round(row["seconds"] / total, 4)} for row in longest],
        "operators": profiles.operators(calls, steps),
    }


def rates(spec: RunSpec, step: float, cluster: Cluster | None) -> Row:
    """Tokens per second and model FLOPs utilisation against the datasheet's dense peak of bf16."""
    gpus, tokens = spec.layout.world_size, spec.train.batch_tokens
    found: dict[str, Any] = {"tokens_per_second_per_gpu": round(tokens / step / gpus, 1)}
    for name, causal in (("mfu", False), ("causal_mfu", True)):
        flops = spec.model.flops_per_token(spec.data.seq_len, causal) * tokens / gpus
        found[name] = round(flops / step / cluster.device.peak["bf16"], 4) if cluster else None
    return found


@contextmanager
def stepper(work: Work, spec: RunSpec, device: torch.device) -> Iterator[tuple[Any, Faked | None]]:
    """A function that takes the next step of a run, and the record of a device that is faked."""
    with world_of(work, spec, device) as (mesh, faked):
        trainer = Trainer(spec, mesh)
        if faked is None:  # without values some hundred thousand operators would draw nothing
            trainer.initialise()
        loader = Loader(open_corpus(spec), spec, mesh.data_rank, spec.layout.data_ranks)
        batches = [loader.step(number) for number in range(4)]
        loader.close()
        trainer.expect(batches[0])
        if faked:
            torch.compiler.set_stance("force_eager")
        yield partial(_step, trainer, _pairs(batches)), faked


def _pairs(batches: list[Batch]) -> Iterator[tuple[int, Batch, Batch]]:
    """The number of each step, its batch, and the one after it."""
    following = zip(cycle(batches), islice(cycle(batches), 1, None), strict=True)
    return ((number, *pair) for number, pair in enumerate(following, 1))


def _step(trainer: Trainer, batches: Iterator[tuple[int, Batch, Batch]]) -> None:
    number, batch, following = next(batches)
    trainer.step(batch, number, following=following)


def clocked(work: Work, take: Any, steps: int) -> list[float]:
    """Seconds of steps, between events on the device: all of them, or as many as there is time for."""
    marks = [torch.cuda.Event(enable_timing=True)]
    marks[0].record()
    for _ in range(steps):
        take()
        marks.append(torch.cuda.Event(enable_timing=True))
        marks[-1].record()
        if work.task.gpus == 1 and work.left < RESERVE:  # ranks would stop at different steps
            work.leave_out(f"{steps + 1 - len(marks)} of {steps} steps")
            break
    torch.cuda.synchronize()
    return [start.elapsed_time(end) / 1e3 for start, end in pairwise(marks)]


def recorded(take: Any, faked: Faked | None, known: frozenset[str], steps: int) -> list[profiles.KernelCall]:
    """The kernels of further steps, which are recorded."""
    kinds = torch.profiler.ProfilerActivity
    if faked:
        faked.trace.events.clear()
    with torch.profiler.profile(activities=[kinds.CPU] if faked else [kinds.CPU, kinds.CUDA]) as profiler:
        for _ in range(steps):
            take()
        torch.cuda.synchronize()
    calls = profiles.kernel_calls(profiler.events(), known)
    return profiles.calls_of_trace(faked.trace.events) if faked else calls
