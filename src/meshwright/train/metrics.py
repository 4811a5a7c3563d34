"""Numbers of a run for its metrics and its result: speed, use of the device, memory, balance of experts.

They are written to metrics.jsonl by `runs/record.py`.
"""

from __future__ import annotations

import resource
import statistics
import sys
from collections import deque
from typing import Any

import torch

from meshwright.parallel.precision import DTYPES
from meshwright.parallel.router_balance import LayerBalance
from meshwright.spec import MoeSpec
from meshwright.spec.training_flops import flops_per_token
from meshwright.train.matmul_peak import matmul_flops_per_second
from meshwright.train.step import StepResult, Trainer

Row = dict[str, Any]
MOST_LOADS = 4096
"""Loads of single experts that one row of metrics holds at most."""
RECENT_STEPS = 20
"""Steps of which the run's speed is the median."""


class Metrics:
    """Measurements of one start of a run on one rank.

    `peak_flops` is the rate of a matrix product on this device, in FLOP/s, the best of all measurements.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer, self.mesh = trainer, trainer.run_mesh
        apart = trainer.run_spec.own_step_group is not None
        self.spec = trainer.spec if apart else trainer.run_spec
        self.peak_flops = 0.0
        self._speeds: deque[float] = deque(maxlen=RECENT_STEPS)

    def measure_peak(self) -> None:
        """Measure what a matrix product reaches, summed over all ranks, which call this together."""
        rate = matmul_flops_per_second(DTYPES[self.spec.precision.base], self.mesh.device)
        (measured,) = self.mesh.control.sum([rate])
        self.peak_flops = max(self.peak_flops, measured)

    def row(self, step: int, result: StepResult, seconds: float) -> Row | None:
        """Take note of a step's duration, and return its row of metrics if it is to be logged."""
        train = self.spec.train
        speed = train.batch_of_step(step) / seconds
        self._speeds.append(speed)
        if step % train.log_every and step != train.last_step:
            return None
        moe = self.spec.model.moe if self.mesh.rank == 0 else None
        return {
            "step": step,
            "loss": result.loss,
            **({} if result.further_loss is None else {"mtp_loss": result.further_loss}),
            "grad_norm": result.grad_norm,
            "lr": result.rate,
            "tokens": train.tokens_after(step),
            "tokens_per_second": speed,
            "mfu": self._mfu(speed),
            "memory_bytes": peak_memory_bytes(self.mesh.device),
            "seconds": seconds,
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
        every = control.gather([own, peak_memory_bytes(self.mesh.device)])
        fullest = max((held for held, _ in every), key=lambda held: sum(held.values()), default=own)
        memory, peak = control.broadcast([fullest, max((peak for _, peak in every), default=0)])
        return {
            "tokens_per_second": speed,
            "mfu": self._mfu(speed) if speed else None,
            "matmul_flops_per_second": self.peak_flops,
            "peak_memory_bytes": peak,
            "memory": memory,
        }

    def _mfu(self, tokens_per_second: float) -> float:
        """The share of `peak_flops` that the model takes, and the parts of a step beside it."""
        flops = flops_per_token(self.spec) + sum(part.flops_per_token() for part in self.trainer.parts)
        return flops * tokens_per_second / self.peak_flops


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


def peak_memory_bytes(device: torch.device) -> int:
    """Most memory that this rank has held: allocated on CUDA, resident on the CPU."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
