"""Model FLOPs utilisation of decoder blocks in bf16 on one device, through the project's own Trainer.

    python bench/blocks_mfu.py [--device cpu|cuda] [--quick] [--shape 1b 8b] [--rounds 5] [--out FILE]

Rows of kind "blocks" time the forward and backward of a step (`Trainer.gradients`, one rank, ZeRO-0) of a few
decoder blocks with the shapes of Llama 3.2 1B and Llama 3 8B in sequences of 8,192 tokens, with recompute
`none` and `selective`, with and without `train.compile`. Their vocabulary is small, so that the head does not
count; rows of kind "head" time the chunked linear cross entropy on the model's own vocabulary. The microbatch
is the largest of 4, 2 and 1 sequences that fits. `--quick` takes tiny shapes: it shows that the program runs.

A table goes to stderr, and one JSON object to stdout and to `--out`:

    {"date", "command", "torch", "cuda", "device", "datasheet", "datasheet_tflops", "precision", "rows"}

A row has tokens per second, TFLOP/s of the model (recomputation not counted, attention's causal half counted
whole, as `ModelSpec.flops_per_token`), the rate of a matrix product measured just before the row, MFU against
it and against the datasheet (null where the device is in no catalogue), and the peak of allocated memory.
"""

from __future__ import annotations

import argparse
import gc
import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from meshwright.comm.mesh import build_mesh
from meshwright.data.corpus import open_corpus
from meshwright.data.loader import Loader
from meshwright.hardware.catalogue import cluster_of_gpu
from meshwright.model.chunked_cross_entropy import linear_cross_entropy
from meshwright.parallel.precision import use_fast_fp32_matmul
from meshwright.rank.process_group import process_group
from meshwright.spec import RunSpec, load
from meshwright.train.matmul_peak import matmul_flops_per_second
from meshwright.train.step import Trainer

Row = dict[str, Any]
VOCABULARY_OF_BLOCKS = 256


@dataclass(frozen=True)
class Shape:
    """The blocks of one model: sizes as in `ModelSpec`, and how much of it a measurement takes."""

    sizes: dict[str, int]
    layers: int
    vocabulary: int
    seq_len: int = 8192
    sequences: int = 4


SHAPES = {
    "1b": Shape({"hidden": 2048, "ffn": 8192, "heads": 32, "kv_heads": 8, "head_dim": 64}, 4, 128256),
    "8b": Shape({"hidden": 4096, "ffn": 14336, "heads": 32, "kv_heads": 8, "head_dim": 128}, 4, 128256),
}
QUICK = {
    "1b": Shape({"hidden": 64, "ffn": 256, "heads": 4, "kv_heads": 2, "head_dim": 16}, 1, 512, 128),
    "8b": Shape({"hidden": 128, "ffn": 448, "heads": 4, "kv_heads": 2, "head_dim": 32}, 1, 512, 128),
}


def run_of(shape: Shape, micro_batch: int, recompute: str, compiled: bool) -> RunSpec:
    """The run whose step is timed."""
    given: dict[str, object] = {
        "model.preset": "llama3-8b",
        **{f"model.{name}": size for name, size in shape.sizes.items()},
        "model.layers": shape.layers,
        "model.vocab_size": VOCABULARY_OF_BLOCKS,
        "data.corpus": "synthetic",
        "data.seq_len": shape.seq_len,
        "data.document_mask": "false",
        "train.batch_tokens": shape.seq_len * shape.sequences,
        "train.steps": 10**6,
        "train.compile": str(compiled).lower(),
        "recompute.policy": recompute,
        "precision.compute": "bf16",
        "layout.zero": 0,
        "layout.micro_batch": micro_batch,
    }
    return load(None, [(key, str(value)) for key, value in given.items()])


def seconds_of(work: Callable[[], None], device: torch.device, rounds: int) -> tuple[float, int | None]:
    """(median seconds of a call after two that warm up, most bytes allocated during the calls that count).

    The bytes are None on a CPU, whose allocator keeps no count.
    """
    for _ in range(2):
        work()
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    found = []
    for _ in range(rounds):
        start = time.perf_counter()
        work()
        if on_gpu:
            torch.cuda.synchronize(device)
        found.append(time.perf_counter() - start)
    return statistics.median(found), torch.cuda.max_memory_allocated(device) if on_gpu else None


def largest_that_fits(
    shape: Shape, measure: Callable[[int], tuple[float, int | None]]
) -> tuple[int, tuple[float, int | None]]:
    """(sequences of a microbatch, its measurement): half as many each time the device is out of memory."""
    micro_batch = shape.sequences
    while True:
        try:
            return micro_batch, measure(micro_batch)
        except torch.OutOfMemoryError:
            if micro_batch == 1:
                raise
        micro_batch //= 2  # here the error is gone, which holds the tensors of its frames


def time_blocks(spec: RunSpec, device: torch.device, rounds: int) -> tuple[float, int | None]:
    """Forward and backward of a step, as `seconds_of`."""
    torch.compiler.reset()
    gc.collect()  # the trainer before, whose modules and hooks refer to each other
    torch.cuda.empty_cache()
    mesh = build_mesh(spec.layout, device, spec.model.kv_heads, experts=False)
    assert mesh is not None
    trainer = Trainer(spec, mesh)
    trainer.initialise()
    loader = Loader(open_corpus(spec), spec, mesh.data_rank, spec.layout.data_ranks)
    batch = loader.step(0)
    loader.close()

    def work() -> None:
        trainer.expect(batch)
        loss = trainer.gradients(batch)
        trainer.states.end_step()
        assert bool(loss.isfinite())

    return seconds_of(work, device, rounds)


def time_head(shape: Shape, micro_batch: int, device: torch.device, rounds: int) -> tuple[float, int | None]:
    """Loss and gradients of the head on one microbatch, as `seconds_of`."""
    tokens, hidden = shape.seq_len * micro_batch, shape.sizes["hidden"]
    x = torch.randn(tokens, hidden, device=device).bfloat16().requires_grad_()
    weight = (torch.randn(shape.vocabulary, hidden, device=device) * 0.02).bfloat16().requires_grad_()
    targets = torch.randint(0, shape.vocabulary, (tokens,), device=device)

    def work() -> None:
        x.grad = weight.grad = None
        linear_cross_entropy(x, weight, targets, scale=1 / tokens).backward()

    return seconds_of(work, device, rounds)


def datasheet_of(device: torch.device) -> tuple[str | None, float | None]:
    """(name in the planner's catalogue, dense bf16 peak in FLOP/s), or None of both."""
    if device.type != "cuda":
        return None, None
    cluster = cluster_of_gpu(torch.cuda.get_device_name(device))
    return (cluster.device.name, cluster.device.peak["bf16"]) if cluster else (None, None)


def row_of(
    told: Row, tokens: int, flops_per_token: float, measured: tuple[float, int | None], rates: Row
) -> Row:
    """One row: `told` says what was measured, `rates` has the FLOP/s of "matmul" and of "datasheet"."""
    seconds, memory = measured
    reached = flops_per_token * tokens / seconds
    sheet = rates["datasheet"]
    return {
        **told,
        "seconds": round(seconds, 6),
        "tokens_per_second": round(tokens / seconds, 1),
        "tflops": round(reached / 1e12, 3),
        "matmul_tflops": round(rates["matmul"] / 1e12, 3),
        "mfu_matmul": round(reached / rates["matmul"], 4),
        "mfu_datasheet": round(reached / sheet, 4) if sheet else None,
        "peak_memory_bytes": memory,
    }


def measure(name: str, shape: Shape, device: torch.device, rounds: int, sheet: float | None) -> list[Row]:
    """All rows of one shape; each is printed as it comes."""
    rows = []

    def matmul() -> Row:
        return {"matmul": matmul_flops_per_second(torch.bfloat16, device), "datasheet": sheet}

    def add(told: Row, tokens: int, per_token: float, found: tuple[float, int | None], rates: Row) -> None:
        rows.append(row_of({"shape": name, **told}, tokens, per_token, found, rates))
        print_row(rows[-1])

    for recompute in ("none", "selective"):
        for compiled in (False, True):
            rates = matmul()
            micro_batch, found = largest_that_fits(
                shape, lambda n, r=recompute, c=compiled: time_blocks(run_of(shape, n, r, c), device, rounds)
            )
            spec = run_of(shape, micro_batch, recompute, compiled)
            told = {"kind": "blocks", "layers": shape.layers, "seq_len": shape.seq_len}
            told |= {"micro_batch": micro_batch, "recompute": recompute, "compile": compiled}
            per_token = spec.model.flops_per_token(shape.seq_len)
            add(told, spec.train.batch_tokens, per_token, found, rates)
    rates = matmul()
    micro_batch, found = largest_that_fits(shape, lambda n: time_head(shape, n, device, rounds))
    told = {"kind": "head", "layers": 0, "seq_len": shape.seq_len, "vocabulary": shape.vocabulary}
    told |= {"micro_batch": micro_batch, "recompute": None, "compile": False}
    add(told, shape.seq_len * micro_batch, 6.0 * shape.sizes["hidden"] * shape.vocabulary, found, rates)
    return rows


COLUMNS = {
    "shape": 6,
    "kind": 7,
    "recompute": 10,
    "compile": 8,
    "micro_batch": 12,
    "tokens_per_second": 18,
    "tflops": 9,
    "matmul_tflops": 14,
    "mfu_matmul": 11,
    "mfu_datasheet": 14,
    "peak_memory_bytes": 18,
}


def print_row(row: Row) -> None:
    cells = (f"{'-' if row[key] is None else row[key]!s:>{width}}" for key, width in COLUMNS.items())
    print("".join(cells), file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--quick", action="store_true", help="tiny shapes, to see that it runs")
    parser.add_argument("--shape", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--rounds", type=int, default=5, help="calls that count, of which the median")
    parser.add_argument("--out", type=Path, help="file for the JSON object, its folders made")
    options = parser.parse_args()
    if options.device == "cpu" and not options.quick:
        parser.error("--device cpu: a CPU takes hours for these shapes; give --quick, or --device cuda")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: this torch sees no CUDA device")
    device = torch.device("cuda", 0) if options.device == "cuda" else torch.device("cpu")
    sheet, peak = datasheet_of(device)
    print("".join(f"{key:>{width}}" for key, width in COLUMNS.items()), file=sys.stderr)
    rows: list[Row] = []
    with process_group(None, options.device):
        use_fast_fp32_matmul(device)
        for name in options.shape:
            shape = (QUICK if options.quick else SHAPES)[name]
            rows += measure(name, shape, device, options.rounds, peak)
    result = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", *sys.argv]),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "datasheet": sheet,
        "datasheet_tflops": peak / 1e12 if peak else None,
        "precision": "bf16",
        "rows": rows,
    }
    print(json.dumps(result))
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
