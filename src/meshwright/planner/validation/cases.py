"""Measured runs as `RunSpec`s: what ran, on which cluster, with which software stack, and how fast.

Properties that a row leaves out are inferred from the field's habits. Every inference is recorded, because it
widens the prediction's interval. A row that cannot be predicted says why.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import ValidationError

from meshwright.hardware.cluster import Cluster
from meshwright.planner.cost.software import SoftwareStack
from meshwright.planner.validation.infer_layout import (
    batch_of,
    choices,
    contradiction,
    layout_of,
    recomputes,
)
from meshwright.planner.validation.infer_model import model_of
from meshwright.planner.validation.infer_program import cluster_of, format_of, program_of
from meshwright.planner.validation.table import Guesses, PredictionError, Row, short, unknown_word
from meshwright.spec import ModelSpec, RunSpec, UserError
from meshwright.spec.sections import DataSpec, PrecisionSpec, TrainSpec


@dataclass(frozen=True)
class Case:
    """A measured run, and the runs that its row may describe: several if it leaves choices open."""

    row: Row
    specs: tuple[RunSpec, ...]
    stack: SoftwareStack
    cluster: Cluster
    format: str
    """Number format of matrix products."""
    seconds: float | None
    """Measured seconds of a step, or of one block's forward and backward."""
    memory: float | None
    """Measured bytes at the peak."""
    memory_kind: str
    """'allocated', or 'device' for all that the driver reports as used."""
    ran: bool | None
    """True if it fitted into memory; None if that is not known."""
    block_only: bool
    inferred: tuple[str, ...] = ()
    """Properties that were inferred, as 'name = value'."""


def case_of(row: Row, table: Sequence[Row]) -> Case:
    """The case of a row, completed from other rows of `table`. Raises `PredictionError`."""
    if mistake := row.words.get("broken") or unknown_word(row):
        raise PredictionError(mistake)
    try:
        return _case_of(row, table)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise PredictionError(f"{key or 'its values'}: not a valid run: {first['msg']}") from None
    except UserError as error:
        raise PredictionError(str(error)) from None


def _case_of(row: Row, table: Sequence[Row]) -> Case:
    gpus, length = row.whole("gpus"), row.whole("seq_len")
    if not gpus or not length:
        raise PredictionError(f"it has no {'gpus' if not gpus else 'seq_len'}")
    guesses: Guesses = {}
    program = program_of(row)
    cluster = cluster_of(row, gpus)
    if cluster is None:
        raise PredictionError(f"the GPU '{short(row.words['gpu'])}' is not in the catalogue")
    model = model_of(row, length, guesses)
    if model is None:
        raise PredictionError("neither its layers nor its size tell which model it is")
    format = format_of(row, cluster, guesses)
    layout = layout_of(row, gpus, program, guesses)
    block_only = model.layers == 1 and row.whole("global_batch_seqs") is None
    batch = (row.whole("micro_batch") or 1) if block_only else batch_of(row, table, layout, guesses)
    if batch is None:
        raise PredictionError("its batch is not known")
    if reason := contradiction(row, layout, model, batch):
        raise PredictionError(reason)
    seconds = measured_seconds(row, model, batch, length, cluster, format)
    memory, kind = measured_memory(row)
    if seconds is None and memory is None and "oom" not in row.words:
        raise PredictionError("it has no measurement of time or memory")
    policies = recomputes(row, guesses)
    base = RunSpec.model_construct(
        model=model,
        layout=layout,
        data=DataSpec(seq_len=length),
        train=TrainSpec(batch_tokens=batch * length),
        precision=PrecisionSpec.model_validate({"compute": "bf16" if format == "fp8" else format}),
        recompute=policies[0],
    )
    specs = tuple(choices(row, base, program, policies, guesses))
    if not specs:
        raise PredictionError(f"no microbatch goes with {batch} sequences of {layout.data_ranks} data ranks")
    # Memory alone, if it exceeds the device's, was computed and not run.
    ran = None if seconds is None and (memory is None or memory > cluster.device.memory) else True
    inferred = tuple(f"{name} = {value}" for name, value in guesses.items())
    return Case(
        row,
        specs,
        program,
        cluster,
        format,
        seconds,
        memory,
        kind,
        False if "oom" in row.words else ran,
        block_only,
        inferred,
    )


def measured_seconds(
    row: Row, model: ModelSpec, batch: int, length: int, cluster: Cluster, format: str
) -> float | None:
    """Seconds of a step: as printed, or from tokens per second, TFLOP/s or MFU; None without any of them."""
    numbers, gpus = row.numbers, row.numbers["gpus"]
    tokens = batch * length
    if seconds := numbers.get("step_seconds"):
        return seconds
    if rate := numbers.get("tokens_per_sec_per_gpu"):
        return tokens / rate / gpus
    if rate := numbers.get("tflops_per_gpu"):
        return tokens * _printed_flops(row, model, length) / (rate * 1e12) / gpus
    if share := numbers.get("mfu_pct"):
        peaks = cluster.device.peak
        name = "fp8" if format == "fp8" and "fp8" in peaks else "bf16"
        peak = peaks.get(name, peaks.get("fp16", 0.0))
        return tokens * model.flops_per_token(length) / (share / 100 * peak) / gpus
    return None


def _printed_flops(row: Row, model: ModelSpec, length: int) -> float:
    """FLOPs of a token as the source counts them: the model's, or the hardware's with recomputation."""
    flops = model.flops_per_token(length)
    hardware = re.search(r"hardware|incl\. recompute", row.text) and row.words["recompute"] == "full"
    return flops + (flops - 3.0 * model.head_flops) / 3 if hardware else flops


def measured_memory(row: Row) -> tuple[float | None, str]:
    """Measured bytes or None, and what they count, 'device' or 'allocated'."""
    kind = "device" if "nvidia-smi" in row.text else "allocated"
    value = row.numbers.get("peak_mem_gib")
    unit = 1e9 if re.search(r"\bgb\b", row.words["where"].lower()) else 2**30
    return None if value is None else value * unit, kind
