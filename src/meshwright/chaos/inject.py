"""Injection of faults into a rank of a run: each hits where its plan says, once, and is noted before it acts.

Only a supervisor that was given a plan (`chaos/faults.py`) makes its ranks load this module.
"""

from __future__ import annotations

import errno
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.hooks import RemovableHandle

from meshwright.chaos.faults import KINDS, Fault, HitTable
from meshwright.checkpoint.disk import Disk
from meshwright.data.loader import Batch
from meshwright.parallel.flat_param import UnpaddedDTensor
from meshwright.rank.env import Supervision, Worker
from meshwright.train.loop import TrainingRun


class FailingDisk(Disk):
    """A disk whose next write fails with the error `fails`, once; then `failed` is called."""

    def __init__(self) -> None:
        self.fails = 0
        self.failed: Callable[[], None] = lambda: None

    def write(self, descriptor: int, data: memoryview) -> int:
        if self.fails:
            code, self.fails = self.fails, 0
            self.failed()
            raise OSError(code, os.strerror(code))
        return super().write(descriptor, data)


class Injection:
    """Faults of a plan that hit this rank, and on rank 0 notes of how the run goes on after each.

    To be made before the rank looks for snapshots in memory: after a fault that damages checkpoints it drops
    its own, so that the damage is met. `disk` is what the run must save on.
    """

    def __init__(self, supervision: Supervision, place: Worker) -> None:
        assert supervision.hits is not None
        hits = HitTable(supervision.hits, [Fault.from_json(fault) for fault in supervision.faults])
        self._hits, self._generation, self._rank = hits, supervision.generation, place.rank
        self.disk = FailingDisk()
        self._next = 0
        self._slow = (0, 0.0)
        """Completed steps up to which each phase takes longer, and by how many seconds."""
        self._save_begun: int | None = None
        self._has_bad_batches = any(KINDS[fault.kind].skips for fault in hits.faults)
        self._bad: tuple[Batch, Fault] | None = None
        """The last batch that a fault has made bad."""
        last = hits.last()
        before = last is not None and hits[last].starts == self._generation  # in the generation before this
        if last is not None and before and KINDS[hits.faults[last].kind].damages:
            for descriptor in _flat(supervision.snapshots[place.local_rank]):
                os.ftruncate(descriptor, 0)

    def attach(self, run: TrainingRun) -> None:
        """Inject into this run from its next phase on."""
        self._run = run
        run.heartbeat.on_phase = self._on_phase
        if self._has_bad_batches:
            compute = run.trainer.gradients
            run.trainer.gradients = partial(self._gradients, compute)  # type: ignore[method-assign]

    def _on_phase(self, phase: str, done: int) -> None:
        if self._rank == 0:
            self._note_save(phase)
            self._note_progress(phase)
        if phase == "data" and self._has_bad_batches:
            self._meet_bad_batches(done)
        until, seconds = self._slow
        if done < until:
            time.sleep(seconds)
        while self._next < len(self._hits.faults) and self._hits[self._next].starts:
            self._next += 1
        if self._next == len(self._hits.faults):
            return
        fault = self._hits.faults[self._next]
        due = (self._generation, done) >= (fault.generation, fault.step) and phase == fault.phase
        if due and fault.rank == self._rank and self._hits[self._next].armed:
            self._hits.write(self._next, step=done, starts=self._generation + 1)
            _ACTS[fault.kind](self, self._next, fault, done)

    def _meet_bad_batches(self, done: int) -> None:
        """Make the batch of a step bad that was so before the ranks were started again."""
        for number, fault in enumerate(self._hits.faults):
            hit = self._hits[number]
            if KINDS[fault.kind].skips and fault.rank == self._rank and hit.starts and hit.step == done:
                self._bad = self._run.batch, fault

    def _gradients(self, compute: Callable[[Batch], Tensor], batch: Batch) -> Tensor:
        """Compute the gradients of a batch, which a fault may have made bad: in a step or aside."""
        if self._bad is None or batch is not self._bad[0]:
            return compute(batch)
        fault = self._bad[1]
        value = math.inf if fault.kind == "inf-batch" else math.nan
        if fault.kind != "nan-loss":
            with _spoiled(fault.number % 4, fault.number, value):
                return compute(batch)
        if not self._run.trainer.due.steps:
            return compute(batch) * value
        with _spoiled(0, fault.number, value, _spoil_gradient):  # a late gradient is judged by itself
            return compute(batch) * value

    def acted(self, number: int) -> None:
        """Note that a fault does now what it does."""
        self._hits.write(number, acted_step=self._run.done, acted=time.monotonic_ns())

    # Notes of rank 0 ----------------------------------------------------------------------------------

    def _note_save(self, phase: str) -> None:
        """Measure how long saves stop training; the last one, after which none goes on, does not count."""
        now = time.monotonic_ns()
        if self._save_begun is not None and phase == "data":
            self._hits.note_save(now - self._save_begun)
        self._save_begun = now if phase == "save" else None

    def _note_progress(self, phase: str) -> None:
        last = self._hits.last()
        if last is None or self._hits[last].back or not self._hits[last].acted or phase == "start":
            return
        hit, fault, now = self._hits[last], self._hits.faults[last], time.monotonic_ns()
        again = self._generation >= hit.starts
        if again and not hit.resumed:
            self._hits.write(last, resumed_step=self._run.done, resumed=now)
        new = self._run.done >= hit.acted_step + fault.steps or phase == "end"  # there are no more steps
        if new and (again or KINDS[fault.kind].failure is None):
            self._hits.write(last, back=now)

    # Acts ---------------------------------------------------------------------------------------------

    def _kill(self, number: int, fault: Fault, done: int) -> None:
        self.acted(number)
        os.kill(os.getpid(), signal.SIGKILL)

    def _kill_later(self, number: int, fault: Fault, done: int) -> None:
        timer = threading.Timer(fault.seconds, self._kill, (number, fault, done))
        timer.daemon = True
        timer.start()

    def _kill_zygote(self, number: int, fault: Fault, done: int) -> None:
        self.acted(number)
        os.kill(os.getppid(), signal.SIGKILL)

    def _stop(self, number: int, fault: Fault, done: int) -> None:
        self.acted(number)
        os.kill(os.getpid(), signal.SIGSTOP)

    def _wait_for_ever(self, number: int, fault: Fault, done: int) -> None:
        self.acted(number)
        while True:
            time.sleep(60.0)

    def _slow_down(self, number: int, fault: Fault, done: int) -> None:
        self.acted(number)
        self._slow = (done + fault.steps, fault.seconds)

    def _raise(self, number: int, fault: Fault, done: int) -> None:
        self.acted(number)
        raise RuntimeError(f"fault {number} of a plan")

    def _run_out_of_memory(self, number: int, fault: Fault, done: int) -> None:
        self.acted(number)
        bytearray(1 << 62)

    def _jump(self, number: int, fault: Fault, done: int) -> None:
        self.acted(number)
        before = time.time
        time.time = lambda: before() + fault.seconds

    def _fail_a_write(self, number: int, fault: Fault, done: int) -> None:
        self.disk.failed = lambda: self.acted(number)
        self.disk.fails = errno.ENOSPC if fault.kind == "disk-full" else errno.EIO

    def _spoil_an_activation(self, number: int, fault: Fault, done: int) -> None:
        """Make a number of one of the next outputs of modules NaN, once."""

        def spoil(output: Tensor) -> Tensor:
            self.acted(number)
            return _spoil(output, fault.number, math.nan)

        _spoil_next(fault.number % 8, spoil)

    def _spoil_a_batch(self, number: int, fault: Fault, done: int) -> None:
        self.acted(number)
        self._bad = self._run.batch, fault

    @torch.no_grad()
    def _flip_a_bit(self, number: int, fault: Fault, done: int) -> None:
        self.acted(number)
        units = (unit for unit in self._run.trainer.states.units if unit.quantised is None)
        stored = [tensor for unit in units for _, tensor in unit.parameters_stored()]
        held = [(x.padded if isinstance(x, UnpaddedDTensor) else x).to_local() for x in stored]
        held = [local for local in held if local.numel()]
        bits = held[fault.number % len(held)].view(-1).view(torch.uint8)
        bits[fault.number % len(bits)] ^= 1 << fault.number % 8


_Act = Callable[[Injection, int, Fault, int], None]
_ACTS: dict[str, _Act] = {
    "kill-anytime": Injection._kill_later,
    "kill-zygote": Injection._kill_zygote,
    "stop": Injection._stop,
    "stuck": Injection._wait_for_ever,
    "slow": Injection._slow_down,
    "error": Injection._raise,
    "out-of-memory": Injection._run_out_of_memory,
    "clock-jump": Injection._jump,
    "io-error": Injection._fail_a_write,
    "disk-full": Injection._fail_a_write,
    "nan": Injection._spoil_an_activation,
    **{name: Injection._spoil_a_batch for name, kind in KINDS.items() if kind.skips},
    "flip": Injection._flip_a_bit,
    **{name: Injection._kill for name, kind in KINDS.items() if kind.damages or name == "kill"},
}


def _spoil(output: Tensor, element: int, value: float) -> Tensor:
    """An output with another value in one element."""
    output = output.clone()
    output.view(-1)[element % output.numel()] = value
    return output


def _spoil_gradient(output: Tensor, element: int, value: float) -> Tensor:
    """An output whose gradient has another value in one element."""
    output = output.clone()
    output.register_hook(lambda gradient: _spoil(gradient.contiguous(), element, value))
    return output


@contextmanager
def _spoiled(
    passed: int, element: int, value: float, spoil: Callable[[Tensor, int, float], Tensor] = _spoil
) -> Iterator[None]:
    """Spoil an output of a module inside the context, after so many that a gradient passes through."""
    hook = _spoil_next(passed, lambda output: spoil(output, element, value))
    try:
        yield
    finally:
        hook.remove()


def _spoil_next(passed: int, spoil: Callable[[Tensor], Tensor]) -> RemovableHandle:
    """Spoil an output of a module, once, after so many more that a gradient passes through."""

    def after(module: torch.nn.Module, given: Any, output: Any) -> Any:
        nonlocal passed
        if not (isinstance(output, Tensor) and output.is_floating_point() and output.requires_grad):
            return None
        passed -= 1
        if passed >= 0:
            return None
        hook.remove()
        return spoil(output)

    hook = register_module_forward_hook(after)
    return hook


def _flat(descriptors: Any) -> Iterator[int]:
    """Iterate over descriptors in nested sequences."""
    if isinstance(descriptors, int):
        yield descriptors
    else:
        for part in descriptors:
            yield from _flat(part)
