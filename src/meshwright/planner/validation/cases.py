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
from meshwright.planner.cost.kernels import peak
from meshwright.planner.cost.precision import precision
from meshwright.planner.cost.software import SoftwareStack
from meshwright.planner.validation.infer_layout import batch_of, check_layout, choices, layout_of
from meshwright.planner.validation.infer_model import model_of
from meshwright.planner.validation.infer_program import cluster_of, format_of, program_of
from meshwright.planner.validation.table import PredictionError, Row, check
from meshwright.spec import ModelSpec, RunSpec
from meshwright.spec.sections import DataSpec, PrecisionSpec, TrainSpec

_AGREE = 0.1
"""Largest relative difference between two measurements of a row. Source: assumed."""


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

    @property
    def inferred(self) -> list[str]:
        """Properties that were inferred, as 'name = value'."""
        return [f"{name} = {value}" for name, value in self.row.inferred.items()]


def case_of(row: Row, table: Sequence[Row]) -> Case:
    """The case of a row, completed from other rows of `table`. Raises `PredictionError` or `UserError`."""
    check(row)
    try:
        return _case_of(row, table)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise PredictionError(f"{key or 'its values'}: not a valid run: {first['msg']}") from None


def _case_of(row: Row, table: Sequence[Row]) -> Case:
    gpus, length = row.whole("gpus"), row.whole("seq_len")
    if not gpus or not length:
        raise PredictionError(f"it has no {'gpus' if not gpus else 'seq_len'}")
    stack, cluster = program_of(row), cluster_of(row, gpus)
    model = model_of(row, length)
    format, layout = format_of(row, cluster), layout_of(row, gpus, stack)
    block_only = model.layers == 1 and row.whole("global_batch_seqs") is None
    batch = (row.whole("micro_batch") or 1) if block_only else batch_of(row, table, layout)
    check_layout(row, layout, model, batch)
    seconds = measured_seconds(row, model, batch, length, cluster, format)
    if seconds and not block_only:
        rate = model.flops_per_token(length) * batch * length / seconds / gpus
        if rate > peak(cluster.device, precision(format).products):
            raise PredictionError(f"its {rate / 1e12:.4g} TFLOP/s per GPU are above the peak of its devices")
    # A GB where the source says so, else a GiB
    unit = 1e9 if re.search(r"\bgb\b", row.words["where"].lower()) else 2**30
    memory = row.numbers["peak_mem_gib"] * unit if "peak_mem_gib" in row.numbers else None
    oom = "oom" in row.words
    if seconds is None and memory is None and not oom:
        raise PredictionError("it has no measurement of time or memory")
    base = RunSpec.model_construct(
        model=model,
        layout=layout,
        data=DataSpec(seq_len=length),
        train=TrainSpec(batch_tokens=batch * length),
        precision=PrecisionSpec.model_validate({"compute": "bf16" if precision(format).cast else format}),
    )
    specs = tuple(choices(row, base, stack))
    # Memory alone, if it exceeds the device's, was computed and not run.
    computed = seconds is None and (memory is None or memory > cluster.device.memory)
    ran = False if oom else None if computed else True
    kind = "device" if "nvidia-smi" in row.text else "allocated"
    return Case(row, specs, stack, cluster, format, seconds, memory, kind, ran, block_only)


def measured_seconds(
    row: Row, model: ModelSpec, batch: int, length: int, cluster: Cluster, format: str
) -> float | None:
    """Seconds of a step: as printed, or from tokens per second, TFLOP/s or MFU; None without any of them."""
    numbers, per_gpu = row.numbers, batch * length / row.numbers["gpus"]
    seconds, rate = numbers.get("step_seconds"), numbers.get("tokens_per_sec_per_gpu")
    if rate and seconds and abs(per_gpu / rate / seconds - 1) > _AGREE:
        raise PredictionError(
            f"its {seconds:g} s a step are not its {rate:g} tokens per second and GPU, which take "
            f"{per_gpu / rate:.4g} s for its batch"
        )
    if seconds:
        return seconds
    if rate:
        return per_gpu / rate
    if rate := numbers.get("tflops_per_gpu"):
        return per_gpu * _printed_flops(row, model, length) / (rate * 1e12)
    if share := numbers.get("mfu_pct"):
        peaks = cluster.device.peak
        name = "fp8" if precision(format).products == "fp8" and "fp8" in peaks else "bf16"
        peak = peaks.get(name, peaks.get("fp16", 0.0))
        return per_gpu * model.flops_per_token(length) / (share / 100 * peak)
    return None


def _printed_flops(row: Row, model: ModelSpec, length: int) -> float:
    """FLOPs of a token as the source counts them: the model's, or the hardware's with recomputation."""
    flops = model.flops_per_token(length)
    hardware = re.search(r"hardware|incl\. recompute", row.text) and row.words["recompute"] == "full"
    return flops + (flops - 3.0 * model.head_flops) / 3 if hardware else flops
