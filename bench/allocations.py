"""Bytes that one microbatch allocates on one rank, read from the profiler's record of the CPU's allocator."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from meshwright.comm.mesh import Mesh
from meshwright.data.corpus import open_corpus
from meshwright.data.loader import Loader
from meshwright.kernels import attention_cpu_kernel, elementwise_cpu
from meshwright.parallel.microbatches import microbatches, own_tokens
from meshwright.spec import RunSpec
from meshwright.train.step import Trainer

_FORWARD = "the forward of a microbatch"


@contextmanager
def by_operators() -> Iterator[None]:
    """Compute by torch's operators, whose temporaries the planner and dry runs count, and not by kernels."""
    with (
        patch.object(attention_cpu_kernel, "takes", lambda *_: False),
        patch.object(elementwise_cpu, "takes", lambda *_: False),
    ):
        yield


def measure(mesh: Mesh, spec: RunSpec, pause: float = 0.003) -> tuple[int, int]:
    """(bytes held between forward and backward, the most at any time) of a microbatch that torch's operators
    compute, as in `measure_as_run`."""
    with by_operators():
        return measure_as_run(mesh, spec, pause)


def measure_as_run(mesh: Mesh, spec: RunSpec, pause: float = 0.003) -> tuple[int, int]:
    """(bytes held between forward and backward, the most at any time), beyond what was there before.

    After each message it waits `pause` seconds, in which gloo's threads free what they sent.
    """
    assert spec.microbatches > 1
    trainer = Trainer(spec, mesh)
    trainer.initialise()
    loader = Loader(open_corpus(spec), spec, mesh.data_rank, spec.layout.data_ranks)
    batch = own_tokens(loader.step(0), mesh)
    loader.close()
    micros = list(microbatches(batch, spec.micro_batch, mesh.device))

    def forward_backward(number: int) -> None:
        micro = micros[number]
        with trainer.buffers.used():
            with record_function(_FORWARD):
                trainer.states.begin_microbatch(False)
                loss = trainer.decoder.loss(micro.tokens, micro.targets, micro.positions, micro.documents)
            loss.backward()

    forward_backward(0)  # makes the buffers of gradients, which are no activations
    gc.collect()  # or what an earlier model kept is freed while this one is measured
    with _unhurried(pause), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        forward_backward(1)
    return _history(seen)


@contextmanager
def _unhurried(pause: float) -> Iterator[None]:
    """Wait for gloo's threads to let go of what they sent: the profiler does not see what is freed there."""
    wait = dist.Work.wait

    def slow(work: dist.Work, *args: object) -> bool:
        done = wait(work, *args)
        time.sleep(pause)
        return done

    with patch.object(dist.Work, "wait", slow):
        yield


def _history(seen: profile) -> tuple[int, int]:
    assert seen.profiler is not None and seen.profiler.kineto_results is not None
    events = seen.profiler.kineto_results.events()
    (end,) = [event.end_ns() for event in events if event.name() == _FORWARD]
    held = kept = peak = 0
    for when, size in sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"):
        held += size
        kept = held if when <= end else kept
        peak = max(peak, held)
    return kept, peak
