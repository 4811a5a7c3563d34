"""Measured runs as `RunSpec`s: what ran, on which cluster, with which software stack, and how fast.

Properties that a row leaves out are inferred from the field's habits. Every inference is recorded, because it
widens the prediction's interval. A row that cannot be predicted says why.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pydantic import ValidationError

from meshwright.hardware.cluster import Cluster
from meshwright.planner.cost.kernels import peak
from meshwright.planner.cost.precision import precision
from meshwright.planner.cost.software import SoftwareStack
from meshwright.planner.programs.table import PROGRAMS
from meshwright.planner.validation.infer_cluster import cluster_of
from meshwright.planner.validation.infer_layout import batch_of, check_layout, choices, layout_of
from meshwright.planner.validation.infer_model import model_of
from meshwright.planner.validation.infer_program import format_of, program_of
from meshwright.planner.validation.infer_remat import note_unknown
from meshwright.planner.validation.table import PredictionError, Row, check, phrase
from meshwright.spec import ModelSpec, RunSpec
from meshwright.spec.precision import PrecisionSpec
from meshwright.spec.sections import DataSpec
from meshwright.spec.train import TrainSpec

_AGREE = {"step_seconds": 1.0, "tokens_per_sec_per_gpu": 1.1, "tflops_per_gpu": 1.5}
"""Largest ratio of a measurement's seconds to those of the first that a row has. FLOPs may include
recomputation. Source: assumed."""
_HARDWARE = r"hardware t?flops?(?:/s)?|incl(?:\.|uding|udes?) recompute|hfu(?! ?[=:]? ?\d)"
"""Words for FLOPs that count recomputation; HFU with a number is a measurement beside the row's."""
_CAUSAL = (
    r"megatron[ -]?bridge|half of (?:the )?attention|causal t?flops?(?:/s)?|t?flops?(?:/s)? (?:are )?causal"
)
"""Words for FLOPs that count what a causal mask leaves of attention. Source: all 87 published rows of
Megatron-Bridge state tokens per second, too, and count so within 1%."""
_SHARES = 1.15
"""The ratio for shares of the peak, times that of the format's peak to the one in 16 bits, of which they may
be, or times 2. Source: assumed."""

_COLUMN_OF = {"vocab_size": "vocab", "batch_tokens": "global_batch_seqs x seq_len"}
"""Keys of a run -> columns of a table, where they differ."""


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
    """'allocated', 'reserved' by the allocator, or 'device' for all that the driver reports as used."""
    ran: bool | None
    """True if it fitted into memory; None if that is not known."""
    block_only: bool
    runs_layout: bool = True
    """False if its program is known not to run the row's layout."""

    @property
    def inferred(self) -> list[str]:
        """Properties that nothing tells, as 'name = value'."""
        return [f"{name} = {value}" for name, value in self.row.inferred.items()]

    @property
    def derived(self) -> list[str]:
        """Properties that comments or other cells tell, as 'name = value'; they widen no interval."""
        return [f"{name} = {value}" for name, value in self.row.derived.items()]


def case_of(row: Row, table: Sequence[Row]) -> Case:
    """The case of a row, completed from other rows of `table`. Raises `PredictionError` or `UserError`."""
    check(row)
    try:
        return _case_of(row, table)
    except ValidationError as error:
        first = error.errors()[0]
        key, problem = str(first["loc"][-1]), first["msg"].removeprefix("Input ")
        raise PredictionError(f"its {_COLUMN_OF.get(key, key)} = {first['input']} {problem}") from None


def _case_of(row: Row, table: Sequence[Row]) -> Case:
    gpus, length = row.whole("gpus"), row.whole("seq_len")
    if not gpus or not length:
        raise PredictionError(f"it has no {'gpus' if not gpus else 'seq_len'}")
    cluster = cluster_of(row, gpus)
    stack = program_of(row, cluster.device)
    model = model_of(row, length)
    note_unknown(row)
    format, layout = format_of(row, cluster), layout_of(row, gpus, stack)
    block_only = model.layers == 1 and row.whole("global_batch_seqs") is None
    batch = (row.whole("micro_batch") or 1) if block_only else batch_of(row, table, layout)
    check_layout(row, layout, model, batch)
    seconds = measured_seconds(row, model, batch, length, cluster, format)
    if seconds and not block_only:
        rate = model.flops_per_token(length) * batch * length / seconds / gpus
        if rate > peak(cluster.device, precision(format).products):
            raise PredictionError(f"its {rate / 1e12:.4g} TFLOP/s per GPU are above the peak of its devices")
    memory, kind = row.numbers.get("peak_mem_gib"), _memory_kind(row)
    if memory is not None:
        decimal = row.says(r"mem(?:ory)?(?: \w+)? (?:as|in) (?-i:GB)|nvidia-smi (?-i:GB)")
        memory *= 1e9 if decimal else 2**30
        if decimal or kind != "allocated":
            row.derive("peak_mem_gib", f"in {'GB' if decimal else 'GiB'}, {kind}")
    oom = "oom" in row.words
    if oom and seconds is not None:
        raise PredictionError(f"it ran out of memory, and took {seconds:.4g} s a step; leave one of them out")
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
    if not specs:
        raise PredictionError(
            f"vp = {layout.virtual} needs microbatches in multiples of pp = {layout.pp}, unlike its batch"
        )
    runs_layout = _note_rule(row, stack, specs)
    # Memory alone, if it exceeds the device's, was computed and not run.
    computed = seconds is None and (memory is None or memory > cluster.device.memory)
    ran = False if oom else None if computed else True
    return Case(row, specs, stack, cluster, format, seconds, memory, kind, ran, block_only, runs_layout)


def _note_rule(row: Row, stack: SoftwareStack, specs: Sequence[RunSpec]) -> bool:
    """True if a row's program runs its layout; else that is noted of the row, which is predicted still."""
    program = PROGRAMS[stack.name]
    broken = [(program.broken(spec), spec) for spec in specs]
    rule, spec = broken[0]
    if rule is None or any(other is None for other, _ in broken):
        return True
    words = rule.reason(stack.name, program.release, spec)
    row.notes.append(f"{words}, by what is known of it; it is predicted all the same")
    return False


def _memory_kind(row: Row) -> str:
    """The kind of bytes that a row states; torchtitan's own tables have what the allocator reserved."""
    if row.says("nvidia-smi"):
        return "device"
    return "reserved" if row.says("reserved|torchtitan") else "allocated"


def measured_seconds(
    row: Row, model: ModelSpec, batch: int, length: int, cluster: Cluster, format: str
) -> float | None:
    """Seconds of a step: as printed, or from tokens per second, TFLOP/s or MFU; None without any of them.

    Raises `PredictionError` if two of them are of different speeds.
    """
    numbers, per_gpu = row.numbers, batch * length / row.numbers["gpus"]
    fastest = peak(cluster.device, precision(format).products)
    flops, printed = model.flops_per_token(length), _printed_flops(row, model, length)
    halved = model.flops_per_token(length, causal=True) / flops
    takes: dict[str, Callable[[float], float]] = {
        "step_seconds": lambda seconds: seconds,
        "tokens_per_sec_per_gpu": lambda rate: per_gpu / rate,
        "tflops_per_gpu": lambda rate: per_gpu * printed / (rate * 1e12),
        "mfu_pct": lambda share: per_gpu * flops / (share / 100 * fastest),
    }
    found = {name: seconds(numbers[name]) for name, seconds in takes.items() if name in numbers}
    if not found:
        return None
    first, taken = next(iter(found.items()))
    agree = _AGREE | {"mfu_pct": _SHARES * max(2.0, fastest / peak(cluster.device, "bf16"))}
    for name, seconds in found.items():
        power = (name == "tflops_per_gpu") - (first == "tflops_per_gpu")  # which may count half of attention
        ratios = (seconds / taken, seconds / taken * halved**power)
        if not any(1 / agree[name] <= ratio <= agree[name] for ratio in ratios):
            raise PredictionError(
                f"its {first} and its {name} are of different speeds: {taken:.4g} and {seconds:.4g} s a step"
            )
    return taken


def _printed_flops(row: Row, model: ModelSpec, length: int) -> float:
    """FLOPs of a token as the source counts them: the model's, or the hardware's with recomputation."""
    flops = model.flops_per_token(length)
    if "tflops_per_gpu" in row.numbers and (row.says(_CAUSAL) or phrase(_CAUSAL, row.words["program"])):
        row.derive("tflops_per_gpu", "of half of attention, which a causal mask leaves")
        return model.flops_per_token(length, causal=True)
    if "tflops_per_gpu" in row.numbers and row.words["recompute"] == "full" and row.says(_HARDWARE):
        row.derive("tflops_per_gpu", "of the hardware, with recomputation")
        return flops + (flops - 3.0 * model.head_flops) / 3
    return flops
