"""Measured runs from a table, each as a run of ours: what ran, on what, with which program, how fast.

The columns are those of `planner/validation/data/published_runs.csv`. What a table leaves out is inferred
where the field has a habit, and every inference is kept beside the row: it widens the interval of what is
predicted. A row that cannot be predicted says why.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ValidationError

from meshwright.hardware.cluster import Cluster
from meshwright.planner.cost.software import SoftwareStack
from meshwright.planner.validation import table as said
from meshwright.planner.validation.infer_layout import (
    Guess,
    batch_of,
    choices,
    contradiction,
    layout_of,
    recomputes,
)
from meshwright.planner.validation.infer_model import model_of
from meshwright.planner.validation.infer_program import cluster_of, format_of, program_of
from meshwright.spec import ModelSpec, RunSpec, UserError
from meshwright.spec.sections import DataSpec, PrecisionSpec, TrainSpec

PUBLISHED = Path(__file__).parent / "data" / "published_runs.csv"
"""303 runs from papers and public benchmark tables, each with its source."""

NEEDED = ("source", "gpu", "gpus", "seq_len")
_WORDS = ("source", "model", "gpu", "recompute", "sequence_parallel", "precision", "where", "confidence")


class PredictionError(Exception):
    """A row that cannot be predicted, and why."""


@dataclass(frozen=True)
class Row:
    """A line of the table: its numbers, and its words."""

    number: int
    """From 0, without the heading."""
    words: dict[str, str]
    numbers: dict[str, float]

    def whole(self, name: str, default: int | None = None) -> int | None:
        """A whole number, or `default` where the cell is empty."""
        value = self.numbers.get(name)
        return default if value is None else round(value)

    @property
    def text(self) -> str:
        """Everything that it says about itself, in small letters."""
        return " ".join(self.words.get(name, "") for name in ("source", "model", "where")).lower()


@dataclass(frozen=True)
class Case:
    """A row as runs of ours: more than one where it does not say which of them was run."""

    row: Row
    specs: tuple[RunSpec, ...]
    stack: SoftwareStack
    cluster: Cluster
    format: str
    seconds: float | None
    """Of a step, or of one block's forward and backward."""
    memory: float | None
    """Bytes at the peak."""
    memory_kind: str
    """'allocated', or 'device' for what the driver counts."""
    ran: bool | None
    """Whether it fitted; None where that is not said."""
    block_only: bool
    inferred: tuple[str, ...] = field(default=())


def read(path: Path) -> list[Row]:
    """The rows of a CSV file. Raises `UserError` for a file that is no such table."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            names, listed = list(reader.fieldnames or []), list(reader)
    except FileNotFoundError:
        raise UserError(f"{path}: there is no such file; give a table of runs, as CSV") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read as a table: {error.strerror}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path}: cannot be read as a table: {error}") from None
    _check_columns(path, names)
    if not listed:
        raise UserError(f"{path}: has no rows below its heading; give one for each run that was measured")
    return [_row(number, cells) for number, cells in enumerate(listed)]


def _check_columns(path: Path, names: Sequence[str]) -> None:
    """Refuse a heading without the columns that every table has."""
    for sign, word in ((";", "';'"), ("\t", "tabs")):
        if len(names) == 1 and sign in names[0]:
            raise UserError(f"{path}: its columns are separated by {word}; they must be by ','")
    if not names:
        raise UserError(f"{path}: is empty; a table of runs has the columns of {PUBLISHED.name}")
    if missing := [name for name in NEEDED if name not in names]:
        raise UserError(
            f"{path}: has no column '{missing[0]}'; a table of runs has those of {PUBLISHED.name}"
        )


def _row(number: int, cells: dict[str, str]) -> Row:
    words = {name: (cells.get(name) or "").strip() for name in _WORDS}
    numbers: dict[str, float] = {}
    for name, text in cells.items():
        if name in words or name is None or not isinstance(text, str) or not text.strip():
            continue
        if name == "peak_mem_gib" and text.strip().upper() == "OOM":
            words["oom"] = "yes"
            continue
        numbers[name], wrong = said.number(name, text.strip())
        if wrong:
            words.setdefault("broken", wrong)
    return Row(number, words, numbers)


def case_of(row: Row, table: Sequence[Row]) -> Case:
    """The row as runs of ours, completed from others of `table`. Raises `PredictionError`."""
    if wrong := row.words.get("broken") or said.unknown_word(row.words):
        raise PredictionError(wrong)
    try:
        return _case_of(row, table)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise PredictionError(
            f"{key + ' of ' if key else ''}what it says cannot be: {first['msg']}"
        ) from None
    except UserError as error:
        raise PredictionError(str(error)) from None


def _case_of(row: Row, table: Sequence[Row]) -> Case:
    gpus, length = row.whole("gpus"), row.whole("seq_len")
    if not gpus or not length:
        raise PredictionError(f"it has no {'gpus' if not gpus else 'seq_len'}")
    guess = Guess()
    program = program_of(row)
    cluster = cluster_of(row, gpus)
    if cluster is None:
        raise PredictionError(f"the GPU '{said.short(row.words['gpu'])}' is not in the catalogue")
    model = model_of(row, length, guess)
    if model is None:
        raise PredictionError("neither its layers nor its size tell which model it is")
    format = format_of(row, cluster, guess)
    layout = layout_of(row, gpus, program, model, guess)
    if isinstance(layout, str):
        raise PredictionError(layout)
    block_only = model.layers == 1 and row.whole("global_batch_seqs") is None
    batch = (row.whole("micro_batch") or 1) if block_only else batch_of(row, table, layout, guess)
    if batch is None:
        raise PredictionError("its batch is not known")
    if wrong := contradiction(row, layout, model, batch):
        raise PredictionError(wrong)
    seconds = measured_seconds(row, model, batch, length, cluster, format)
    memory, kind = measured_memory(row)
    if seconds is None and memory is None and "oom" not in row.words:
        raise PredictionError("it has no measurement of time or memory")
    compute = "fp16" if format == "fp16" else "fp32" if format == "fp32" else "bf16"
    base = RunSpec.model_construct(
        model=model,
        layout=layout,
        data=DataSpec(seq_len=length),
        train=TrainSpec(batch_tokens=batch * length),
        precision=PrecisionSpec(compute=compute),
        recompute=recomputes(row, guess)[0],
    )
    specs = tuple(choices(row, base, program, recomputes(row, guess), guess))
    if not specs:
        raise PredictionError(f"no microbatch goes with {batch} sequences of {layout.data_ranks} data ranks")
    ran = False if "oom" in row.words else _ran(seconds, memory, cluster)
    return Case(
        row, specs, program, cluster, format, seconds, memory, kind, ran, block_only, tuple(guess.said)
    )


def _ran(seconds: float | None, memory: float | None, cluster: Cluster) -> bool | None:
    """A measured time means that it fitted; memory alone, beyond the device's, that it was computed."""
    if seconds is not None:
        return True
    return None if memory is None or memory > cluster.device.memory else True


def measured_seconds(
    row: Row, model: ModelSpec, batch: int, length: int, cluster: Cluster, format: str
) -> float | None:
    """Seconds of a step: as printed, from tokens per second, TFLOP/s or MFU."""
    numbers, gpus = row.numbers, row.numbers["gpus"]
    tokens = batch * length
    if seconds := numbers.get("step_seconds"):
        return seconds
    if rate := numbers.get("tokens_per_sec_per_gpu"):
        return tokens / rate / gpus
    if rate := numbers.get("tflops_per_gpu"):
        return tokens * printed_flops(row, model, length) / (rate * 1e12) / gpus
    if share := numbers.get("mfu_pct"):
        peaks = cluster.device.peak
        peak = (
            peaks["fp8"] if format == "fp8" and "fp8" in peaks else peaks.get("bf16", peaks.get("fp16", 0.0))
        )
        return tokens * model.flops_per_token(length) / (share / 100 * peak) / gpus
    return None


def printed_flops(row: Row, model: ModelSpec, length: int) -> float:
    """FLOPs of a token as the source counts them: the model's, or the hardware's with recomputation."""
    every = model.flops_per_token(length)
    counted = re.search(r"hardware|incl\. recompute", row.text)
    if not counted or row.words["recompute"] != "full":
        return every
    return every + (every - 3.0 * model.head_flops) / 3


def measured_memory(row: Row) -> tuple[float | None, str]:
    """Bytes, and what they count."""
    value = row.numbers.get("peak_mem_gib")
    kind = "device" if "nvidia-smi" in row.text else "allocated"
    if value is None:
        return None, kind
    unit = 1e9 if re.search(r"\bgb\b", row.words["where"].lower()) else 2**30
    return value * unit, kind
