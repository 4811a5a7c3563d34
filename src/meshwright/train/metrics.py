"""Numbers of a run for its metrics and its result: speed, use of the device, memory, balance of experts.

They are written to metrics.jsonl by `runs/record.py`.
"""

from __future__ import annotations

import socket
import statistics
import time
from collections import deque
from typing import Any

import torch

from meshwright.parallel.precision import DTYPES
from meshwright.parallel.router_balance import LayerBalance
from meshwright.spec import MoeSpec
from meshwright.train.matmul_peak import matmul_flops_per_second
from meshwright.train.memory_use import peak_memory_bytes
from meshwright.train.mfu import datasheet_flops_per_second, shares_of_rates
from meshwright.train.step import Trainer
from meshwright.train.step_result import StepResult

Row = dict[str, Any]
MOST_LOADS = 4096
"""Loads of single experts that one row of metrics holds at most."""
RECENT_STEPS = 20
"""Steps of which the run's speed is the median."""
MOST_RANKS = 1024
"""Ranks of which the result has a row; further ones count in the maxima alone."""


class Metrics:
    """Measurements of one start of a run on one rank.

    `peak_flops` is the rate of a matrix product on all ranks, in FLOP/s, the best of all measurements, and
    `datasheet_flops` that of as many devices as rank 0's by their datasheet, None where that is not known.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer, self.mesh = trainer, trainer.run_mesh
        apart = trainer.run_spec.own_step_group is not None
        self.spec = trainer.spec if apart else trainer.run_spec
        self.peak_flops = 0.0
        peak = datasheet_flops_per_second(self.mesh.device, self.spec.precision.compute)
        self.datasheet_flops = None if peak is None else peak * self.mesh.control.size
        self._begun = time.perf_counter()
        self._speeds: deque[float] = deque(maxlen=RECENT_STEPS)
        self._steps: deque[tuple[float, float]] = deque(maxlen=RECENT_STEPS)
        """(seconds, seconds of these that the rank waited) of steps."""
        self._waited_ns = 0

    def measure_peak(self) -> None:
        """Measure what a matrix product reaches, summed over all ranks, which call this together."""
        rate = matmul_flops_per_second(DTYPES[self.spec.precision.base], self.mesh.device)
        (measured,) = self.mesh.control.sum([rate])
        self.peak_flops = max(self.peak_flops, measured)

    def begin_step(self) -> None:
        """Take note of what the rank has waited until now, so that `row` knows the waits of a step."""
        self._waited_ns = self.mesh.heartbeat.waited_ns

    def row(self, step: int, result: StepResult, seconds: float) -> Row | None:
        """Take note of a step's duration, and return its row of metrics if it is to be logged."""
        train = self.spec.train
        speed = train.batch_of_step(step) / seconds
        self._speeds.append(speed)
        self._steps.append((seconds, (self.mesh.heartbeat.waited_ns - self._waited_ns) / 1e9))
        if step % train.log_every and step != train.last_step:
            return None
        moe = self.spec.model.moe if self.mesh.rank == 0 else None
        return {
            "step": step,
            "loss": result.loss,
            **({} if result.further_loss is None else {"mtp_loss": result.further_loss}),
            **result.metrics,
            "grad_norm": result.grad_norm,
            "lr": result.rate,
            "tokens": train.tokens_after(step),
            "tokens_per_second": speed,
            **self._mfu(speed),
            "memory_bytes": peak_memory_bytes(self.mesh.device),
            "seconds": seconds,
            "elapsed_seconds": round(time.perf_counter() - self._begun, 3),
            **(balance_row(moe, self.trainer.layers_balance()) if moe else {}),
            **({} if result.applied else {"skipped": True}),
        }

    def summary(self) -> Row:
        """Return the fields of the run's result about speed and memory; every rank calls this."""
        speed = statistics.median_high(self._speeds) if self._speeds else None
        own = {**self.trainer.states.memory(), **self.trainer.optimiser.memory()}
        if (offload := self.trainer.offload) is not None:
            own["offloaded activations"] = offload.host.most
        averages = [flat for part in self.trainer.parts for _, _, flat in part.averages()]
        own["optimiser"] += sum(flat.untyped_storage().nbytes() for flat in averages)
        control = self.mesh.control
        every = control.gather([own, self._rank_row(own)])
        fullest = max((held for held, _ in every), key=lambda held: sum(held.values()), default=own)
        rows = [row for _, row in every]
        peak = max((row["peak_memory_bytes"] for row in rows), default=0)
        memory, peak = control.broadcast([fullest, peak])
        return {
            "tokens_per_second": speed,
            **(self._mfu(speed) if speed else {"mfu": None}),
            "matmul_flops_per_second": self.peak_flops,
            "datasheet_flops_per_second": self.datasheet_flops,
            "peak_memory_bytes": peak,
            "memory": memory,
            **({"ranks": rows[:MOST_RANKS]} if rows else {}),
        }

    def _rank_row(self, states: dict[str, int]) -> Row:
        """Return what the result tells of this rank: where it is, its recent steps, and its memory.

        Waits are those for collectives, which only ranks on CPUs wait for: with CUDA the device does.
        """
        mesh, cuda = self.mesh, self.mesh.device.type == "cuda"
        seconds, waits = zip(*self._steps, strict=True) if self._steps else ((), ())
        return {
            "rank": mesh.control.rank,
            "place": self._place(),
            "host": socket.gethostname(),
            "device": torch.cuda.get_device_name(mesh.device) if cuda else "cpu",
            "step_seconds": statistics.median(seconds) if seconds else None,
            "waiting": sum(waits) / sum(seconds) if seconds and not cuda else None,
            "peak_memory_bytes": peak_memory_bytes(mesh.device),
            "memory_before_bytes": self.trainer.memory_before,
            "states_bytes": sum(states.values()),
        }

    def _place(self) -> dict[str, int]:
        """Return this rank's number along each axis of more than one rank."""
        mesh, layout = self.mesh, self.mesh.layout
        numbers = {
            "pp": mesh.pipeline.rank,
            "replicate": mesh.replicate.rank,
            "dp": mesh.shard.rank // layout.cp,
            "cp": mesh.context.rank,
            "tp": mesh.tensor.rank,
        }
        return {axis: number for axis, number in numbers.items() if getattr(layout, axis) > 1}

    def _mfu(self, tokens_per_second: float) -> Row:
        """The MFU at a speed, of the model and of the parts of a step beside it."""
        rates = self.peak_flops, self.datasheet_flops
        return {**shares_of_rates(self.spec, self.trainer.parts, tokens_per_second, *rates)}


def balance_row(moe: MoeSpec, layers: dict[int, LayerBalance]) -> Row:
    """Fields of a metrics row about experts; loads are in even shares, of all layers or of each.

    Losses are there where they have a factor, every expert's load unless that would be more than 4,096
    numbers a row.
    """
    found = layers.values()
    if not found:
        return {}  # told by the first rank
    row: Row = {
        "load_max": max(max(layer.load) for layer in found),
        "load_min": min(min(layer.load) for layer in found),
        "dropped": statistics.mean(layer.dropped for layer in found),
        "router_entropy": statistics.mean(layer.entropy for layer in found),
    }
    if moe.aux_loss:
        row["aux_loss"] = statistics.mean(layer.aux_loss for layer in found)
    if moe.z_loss:
        row["z_loss"] = statistics.mean(layer.z_loss for layer in found)
    if sum(len(layer.load) for layer in found) <= MOST_LOADS:
        row["expert_load"] = {
            str(number): [round(load, 4) for load in layer.load] for number, layer in layers.items()
        }
    return row
